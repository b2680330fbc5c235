"""`GatheredParameters`: writes inside the block, graphs made in it, and what an exception leaves of one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.dlpack
from torch import Tensor, nn

import infinity
from infinity.checkpoint import stored_weights
from infinity.errors import StepError
from swapper import ALIGNMENT
from tests.exactness.case import loss_of
from tests.exactness.lockstep import BF16, PLAIN, Lockstep, engine_on_nvme
from tests.exactness.written import MODES, FollowingTorch
from tests.twins import Side, require_same

_NAME = "blocks.1.up.weight"
_in_modes = pytest.mark.parametrize("mode", ["in backward", "bf16", "bf16 resident"])


def _array(tensor: Tensor) -> Any:
    return tensor.detach().view(torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()


def _numpy(weight: nn.Parameter) -> None:
    _array(weight)[0] = 0


def _address(weight: nn.Parameter) -> None:
    ctypes.memset(weight.data_ptr(), 0, 64)


def _dlpack(weight: nn.Parameter) -> None:
    torch.utils.dlpack.from_dlpack(weight.detach()).zero_()


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


def _map(weight: nn.Parameter) -> None:
    weight.data.map_(torch.ones_like(weight), lambda value, other: value * 0.5 + other)


_WRITES = {"numpy": _numpy, "address": _address, "dlpack": _dlpack, "storage": _storage, "fused": _fused, "map_": _map}


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


def test_a_write_stores_no_more_than_the_parameter(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        both.engine.flush()
        storage, weight = both.engine._parts.storage, both.model.get_parameter(_NAME)
        before = storage.counters().write_bytes
        with torch.no_grad(), infinity.GatheredParameters(weight):
            weight[0] = 0.5
        both.engine.flush()
        written = storage.counters().write_bytes - before
        assert weight.nbytes <= written <= weight.nbytes + 2 * ALIGNMENT


def test_reading_looks_for_no_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on_nvme(tmp_path, PLAIN.make("none"))

    def refuse(*_: Any) -> None:
        raise AssertionError("weights are compared, or stored")

    monkeypatch.setattr(stored_weights, "checksum", refuse)
    monkeypatch.setattr(stored_weights.StoredWeights, "store_modified", refuse)
    with engine:
        for parameter in engine.module.parameters():
            with infinity.GatheredParameters(parameter):
                assert parameter.detach().cpu().numpy().shape == parameter.shape


def _halve_first_rows(both: Lockstep) -> None:
    with torch.no_grad():
        for fqn, parameter in both.model.named_parameters():
            if parameter.dim() == 2:
                value = parameter[0].clone() * 0.5
                parameter[0].copy_(value)
                both.reference.main[fqn][0].copy_(value)
                both.reference.trainable[fqn][0].copy_(value)


def test_a_step_inside_the_block_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes={**BF16, "gradient_clipping": 1.0}) as both:
        both.engine_step(0)
        loss = loss_of(both.engine(**both.batch(1)))
        with infinity.GatheredParameters(both.model.parameters(), modifier_rank=0):
            for call in (lambda: both.engine.backward(loss), both.engine.step, both.optimizer.step):
                with pytest.raises(StepError, match="Call it outside the GatheredParameters block"):
                    call()
            _halve_first_rows(both)
            assert torch.equal(
                infinity.safe_get_full_fp32_param(both.model.get_parameter(_NAME))[0], both.reference.main[_NAME][0]
            )
        both.engine.reset()
        both.engine_step(1)
        both.require_equal()


def test_a_forward_that_is_cut_off_inside_the_block_leaves_it_open(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=BF16) as both:
        both.engine_step(0)
        handle = both.model.register_forward_hook(_fail)
        with infinity.GatheredParameters(both.model.parameters(), modifier_rank=0):
            with pytest.raises(_Oops):
                both.engine(**both.batch(1))
            handle.remove()
            both.engine.reset()
            _halve_first_rows(both)
        both.engine_step(1)
        both.require_equal()


class _Oops(Exception):
    pass


def _fail(*_: Any) -> None:
    raise _Oops


_PENALIZED = ("blocks.0.up.weight", "blocks.2.down.weight")
_PENALTIES: dict[str, Callable[[Iterable[nn.Parameter]], torch.Tensor]] = {
    "norm": lambda ps: torch.cat([p.square().flatten() for p in ps]).sum().sqrt(),
    "orthogonality": lambda ps: sum(((p @ p.t()).square().mean() for p in ps), torch.zeros(())),
    "smooth": lambda ps: sum(((p[1:] - p[:-1]).abs().pow(3).sum() for p in ps), torch.zeros(())),
}
_PENALTY_MODES: dict[str, dict[str, Any]] = {
    "in backward": {"infinity": {"update": "in_backward"}},
    "deferred": {"gradient_clipping": 0.1},
    "step": {"infinity": {"update": "step"}},
    "in memory": {"infinity": {"keep_in_memory": True}},
    "bf16": {"bf16": {"enabled": True}},
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", _PENALTY_MODES)
@pytest.mark.parametrize("penalty", _PENALTIES)
def test_a_penalty_made_of_gathered_weights(penalty: str, mode: str, when: str, tmp_path: Path) -> None:
    of = _PENALTIES[penalty]
    with Lockstep.start(tmp_path, changes=_PENALTY_MODES[mode]) as both:
        theirs = [both.reference.model.get_parameter(name) for name in _PENALIZED]
        mine = [both.model.get_parameter(name) for name in _PENALIZED]

        def gathered() -> torch.Tensor:
            with infinity.GatheredParameters(mine):
                return of(mine)

        for step in range(2):
            batch = both.batch(step)
            early = of(theirs) if when == "before" else None
            expected = both.reference.forward(batch)
            expected = expected + 0.01 * (of(theirs) if early is None else early)
            both.reference.backward(expected)
            both.reference.step()
            extra = gathered() if when == "before" else None
            loss = loss_of(both.engine(**batch))
            loss = loss + 0.01 * (gathered() if extra is None else extra)
            both.engine.backward(loss)
            both.engine.step()
            both.note(f"loss {step}", expected, loss)
        both.require_equal()


def _joined_weights(side: Side) -> None:
    for number in range(2):
        whole = torch.cat([parameter.view(-1) for parameter in side.parameters])
        (side.loss(number) + 0.01 * whole.norm()).backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
    with torch.no_grad():
        side.note(
            nn.utils.parameters_to_vector(side.parameters), torch.stack([p.view(-1)[:4] for p in side.parameters])
        )
        nn.utils.vector_to_parameters(whole.detach() * 0.5, side.parameters)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", ["smallest", "smallest deferred"])
def test_weights_that_do_not_fit_together_are_joined(mode: str, tmp_path: Path) -> None:
    require_same(_joined_weights, tmp_path, mode)
