"""Writes inside `GatheredParameters`: with a ``modifier_rank``, whatever changes a weight counts; without, what torch counts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import Tensor, nn

import infinity
from infinity.checkpoint import stored_weights
from infinity.errors import AccessError
from tests.exactness.lockstep import PLAIN, Lockstep, everything_on_nvme, make_batch
from tests.exactness.written import MODES, FollowingTorch

_NAME = "blocks.1.up.weight"
_in_modes = pytest.mark.parametrize("mode", ["in backward", "bf16", "bf16 resident"])


def _array(tensor: Tensor) -> Any:
    return tensor.detach().view(torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()


def _numpy(weight: nn.Parameter) -> None:
    _array(weight)[0] = 0


def _numpy_of_data(weight: nn.Parameter) -> None:
    _array(weight.data)[...] = 0


@torch.no_grad()
def _numpy_of_a_view(weight: nn.Parameter) -> None:
    _array(weight[1].view(-1)[3:])[:6] = 0


def _address(weight: nn.Parameter) -> None:
    ctypes.memset(weight.data_ptr(), 0, 64)


def _address_of_data(weight: nn.Parameter) -> None:
    ctypes.memset(weight.data.data_ptr(), 0, 64)


def _dlpack(weight: nn.Parameter) -> None:
    torch.utils.dlpack.from_dlpack(weight.detach()).zero_()


def _dlpack_capsule(weight: nn.Parameter) -> None:
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).zero_()


def _numpy_dlpack(weight: nn.Parameter) -> None:
    if weight.dtype == torch.bfloat16:
        _address(weight)  # NumPy knows no bfloat16
    else:
        ctypes.memset(np.from_dlpack(weight.detach()).ctypes.data, 0, 64)


def _storage(weight: nn.Parameter) -> None:
    other = torch.empty(0, dtype=weight.dtype)
    other.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride()).zero_()


def _sgd(tensor: Tensor, function: Callable[..., Any] = torch._fused_sgd_) -> None:
    function(
        [tensor],
        [torch.ones_like(tensor)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.125,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


@torch.no_grad()
def _fused(weight: nn.Parameter) -> None:
    _sgd(weight)


@torch.no_grad()
def _fused_operator(weight: nn.Parameter) -> None:
    _sgd(weight, torch.ops.aten._fused_sgd_)


def _fused_on_data(weight: nn.Parameter) -> None:
    _sgd(weight.data)


def _apply(weight: nn.Parameter) -> None:
    weight.detach().apply_(lambda value: value * 0.5)


def _map(weight: nn.Parameter) -> None:
    weight.data.map_(torch.ones_like(weight), lambda value, other: value * 0.5 + other)


@torch.no_grad()
def _map2_of_a_view(weight: nn.Parameter) -> None:
    part = weight.detach()[1:]
    part.map2_(part, part, lambda value, first, second: first * 0.5 + second)  # type: ignore[operator]


_WRITES = {
    "numpy": _numpy,
    "numpy of data": _numpy_of_data,
    "numpy of a view": _numpy_of_a_view,
    "address": _address,
    "address of data": _address_of_data,
    "dlpack": _dlpack,
    "dlpack capsule": _dlpack_capsule,
    "numpy dlpack": _numpy_dlpack,
    "storage": _storage,
    "fused": _fused,
    "fused operator": _fused_operator,
    "fused on data": _fused_on_data,
    "apply_": _apply,
    "map_": _map,
    "map2_ of a view": _map2_of_a_view,
}


def _write_gathered(both: Lockstep, write: Callable[[nn.Parameter], Any], modifier_rank: int | None) -> None:
    following = FollowingTorch(both.reference)
    for step in range(2):
        both.engine_step(step)
        with following.following():
            write(both.reference.model.get_parameter(_NAME))
        weight = both.model.get_parameter(_NAME)
        with infinity.GatheredParameters(weight, modifier_rank=modifier_rank):
            write(weight)
    both.engine_step(2)
    both.require_equal()


@pytest.mark.deep(but=6)
@_in_modes
@pytest.mark.parametrize("write", _WRITES)
def test_a_write_with_a_modifier_rank_counts(write: str, mode: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=MODES[mode]) as both:
        _write_gathered(both, _WRITES[write], 0)


@torch.no_grad()
def _own_methods(weight: nn.Parameter) -> None:
    weight.mul_(0.5)
    weight[1] = 0.25


@torch.no_grad()
def _lists(weight: nn.Parameter) -> None:
    torch._foreach_mul_([weight], 0.75)


_COUNTED: dict[str, Callable[[nn.Parameter], Any]] = {
    "own methods": _own_methods,
    "data": lambda weight: weight.data.clamp_(-0.05, 0.05),
    "detached view": lambda weight: weight.detach()[2:].mul_(0.5),
    "lists": _lists,
    "init": lambda weight: nn.init.constant_(weight, 0.0625),
    "assigned": lambda weight: setattr(weight, "data", weight.data * 0.5),
}


@pytest.mark.deep(but=4)
@_in_modes
@pytest.mark.parametrize("write", _COUNTED)
def test_a_write_that_torch_counts_needs_no_modifier_rank(write: str, mode: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=MODES[mode]) as both:
        _write_gathered(both, _COUNTED[write], None)


def test_blocks_inside_each_other(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=MODES["bf16 resident"]) as both:
        following = FollowingTorch(both.reference)
        for step, (outer, inner) in enumerate([(0, None), (None, 0), (0, 0)]):
            both.engine_step(step)
            with following.following():
                for write in (_address, _own_methods):
                    write(both.reference.model.get_parameter(_NAME))
            weight = both.model.get_parameter(_NAME)
            with infinity.GatheredParameters(weight, modifier_rank=outer):
                with infinity.GatheredParameters(weight, modifier_rank=inner):
                    if inner == 0:
                        _address(weight)
                if inner is None:
                    _address(weight)
                _own_methods(weight)
        both.engine_step(3)
        both.require_equal()


def test_reading_looks_for_no_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, *_ = infinity.initialize(model=PLAIN.make("none"), config=everything_on_nvme(tmp_path))

    def refuse(*_: Any) -> None:
        raise AssertionError("weights are compared, or stored")

    monkeypatch.setattr(stored_weights, "checksum", refuse)
    monkeypatch.setattr(stored_weights.StoredWeights, "store_modified", refuse)
    with engine:
        for parameter in engine.module.parameters():
            with infinity.GatheredParameters(parameter):
                assert parameter.detach().cpu().numpy().shape == parameter.shape


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        ("numpy", ValueError, "read-only"),
        ("address", AccessError, r"'blocks\.1\.up\.weight' was touched in data_ptr"),
        ("dlpack", AccessError, "__dlpack__"),
        ("storage", AccessError, "untyped_storage"),
    ],
)
@pytest.mark.parametrize("place", ["backward", "accumulated"])
def test_memory_of_a_weight_that_backward_is_done_with_is_not_given_away(
    place: str, write: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = PLAIN.make("none")
    module = model.get_submodule("blocks.1.up")
    if place == "backward":
        module.register_full_backward_hook(lambda module, *_: _WRITES[write](module.weight))
    else:
        module.get_parameter("weight").register_post_accumulate_grad_hook(_WRITES[write])
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    with engine, pytest.raises(error, match=message):
        engine.backward(engine(**make_batch(0)))
