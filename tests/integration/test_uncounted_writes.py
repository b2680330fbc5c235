"""Writes to weights that torch does not count, in a forward or a hook: they reach the weight as in plain torch, or raise."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import Tensor, nn

import infinity
from infinity.errors import ParameterNotResidentError, UnsupportedModelError
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from tests.exactness.case import Case
from tests.exactness.lockstep import PLAIN, everything_on_nvme, make_batch
from tests.exactness.shapes.blocks import Block, Net, token_batch
from tests.exactness.written import smallest, train
from tests.waiting import wait_until

pytestmark = pytest.mark.deep

_MODES = ("in backward", "bf16 resident", "vertical")


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


class _Writing(Block):
    """A block that writes to its own weights before it uses them."""

    write: Callable[[nn.Parameter], Any]

    def forward(self, x: Tensor) -> Tensor:
        type(self).write(self.up.weight)
        return super().forward(x)


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("write", _WRITES)
def test_a_write_in_forward_counts(write: str, mode: str, tmp_path: Path) -> None:
    block = type("WritingBlock", (_Writing,), {"write": staticmethod(_WRITES[write])})
    train(Case("writing", lambda checkpointing: Net(checkpointing, make_block=block), token_batch), mode, tmp_path)


@pytest.mark.parametrize("mode", _MODES)
def test_the_engine_asks_unseen(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take what it writes itself for what others write."""

    def expose(unit: Unit, slot: Slot) -> None:
        raise AssertionError(f"the engine asked for the memory of {slot.spec.fqn}")

    monkeypatch.setattr(Unit, "expose", expose)
    train(PLAIN, mode, tmp_path)


_PLACES: dict[str, Callable[[nn.Module, Callable[[nn.Parameter], Any]], Any]] = {
    "before forward": lambda m, write: m.register_forward_pre_hook(lambda module, _: write(module.weight)),
    "after forward": lambda m, write: m.register_forward_hook(lambda module, *_: write(module.weight)),
    "backward": lambda m, write: m.register_full_backward_hook(lambda module, *_: write(module.weight)),
    "accumulated": lambda m, write: m.weight.register_post_accumulate_grad_hook(write),
}


def _hooked(place: str, write: str) -> Case:
    def make(checkpointing: str) -> nn.Module:
        model = Net(checkpointing)
        _PLACES[place](model.get_submodule("blocks.1.up"), _WRITES[write])
        return model

    return Case("hooked", make, token_batch)


_HOOKED = [(place, write) for place in ("before forward", "after forward") for write in ("numpy", "address", "fused")]
_HOOKED += [(place, "fused") for place in ("backward", "accumulated")]


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize(("place", "write"), _HOOKED)
def test_a_write_in_a_hook_counts(place: str, write: str, mode: str, tmp_path: Path) -> None:
    train(_hooked(place, write), mode, tmp_path)


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        ("numpy", ValueError, "read-only"),
        ("address", ParameterNotResidentError, r"'blocks\.1\.up\.weight' was touched in data_ptr"),
        ("dlpack", ParameterNotResidentError, "__dlpack__"),
        ("storage", ParameterNotResidentError, "untyped_storage"),
    ],
)
@pytest.mark.parametrize("place", ["backward", "accumulated"])
def test_memory_of_a_weight_that_backward_is_done_with_is_not_given_away(
    place: str, write: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = _hooked(place, write).make("none")
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    with engine, pytest.raises(error, match=message):
        engine.backward(engine(**make_batch(0)))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("fill", ["untyped_storage", "storage"])
def test_a_storage_is_not_written_to_as_such(fill: str, tmp_path: Path) -> None:
    model = PLAIN.make("none")
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    weight = model.get_parameter("blocks.1.up.weight")
    with (
        engine,
        infinity.GatheredParameters(weight),
        pytest.raises(UnsupportedModelError, match=r"all of unit blocks\.1 lies.*parameter\.data\.fill_"),
    ):
        getattr(weight, fill)().fill_(0)


def test_a_write_by_a_function_of_python_to_a_frozen_weight_counts(tmp_path: Path) -> None:
    def make(checkpointing: str) -> nn.Module:
        model = Net(checkpointing)
        module = model.get_submodule("blocks.1.up")
        module.get_parameter("weight").requires_grad_(False)
        module.register_forward_pre_hook(lambda module, _: _halve(module))
        return model

    case = Case("frozen", make, token_batch)
    config = everything_on_nvme(tmp_path)
    own = {**config["infinity"], "host_memory_budget": smallest(case, config)}
    model = make("none")
    expected = model.get_parameter("blocks.1.up.weight").detach() * 0.5
    engine, *_ = infinity.initialize(model=model, config={**config, "infinity": own})
    with engine:
        engine(**make_batch(0))  # the unit has gone to the drive when it ends
        assert torch.equal(model.get_parameter("blocks.1.up.weight").detach().clone(), expected)


def _halve(module: nn.Module) -> None:
    module.get_parameter("weight").apply_(lambda value: value * 0.5)


def test_torch_is_as_it_was_when_the_last_engine_is_closed(tmp_path: Path) -> None:
    plain = torch._C.TensorBase.numpy
    wait_until(lambda: gc.collect() >= 0 and torch.Tensor.numpy is plain)  # what others have dropped is closed soon
    engines = [infinity.initialize(model=PLAIN.make("none"), config=everything_on_nvme(tmp_path))[0] for _ in range(2)]
    places = ((torch.Tensor, "numpy"), (torch.Tensor, "__dlpack__"), (torch.UntypedStorage, "fill_"))
    while_held = [getattr(owner, name) for owner, name in places]
    for engine in engines:
        assert [getattr(owner, name) for owner, name in places] == while_held
        engine.close()
    assert torch.Tensor.numpy is torch._C.TensorBase.numpy  # type: ignore[comparison-overlap]
    assert not any(getattr(owner, name) is held for (owner, name), held in zip(places, while_held, strict=True))
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", "ADInplaceOrView")


class _Keeping(Block):
    """A block that writes to its weight by a view from its forward before."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            self.kept.mul_(0.75)
        self.kept = self.up.weight.detach()
        return super().forward(x)


def test_a_write_that_is_seen_too_late_is_an_error(tmp_path: Path) -> None:
    case = Case("keeping", lambda checkpointing: Net(checkpointing, make_block=_Keeping), token_batch)
    with pytest.raises(
        UnsupportedModelError, match=r"up\.weight' was written to in forward.*seen too late.*main_weights"
    ):
        train(case, "bf16 resident", tmp_path)
