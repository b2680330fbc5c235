"""Means that go to the ranks which update with them, beside the backward: when, how many bytes, and what comes in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process
from torch import nn

import infinity
from infinity.errors import AccessError, RankError
from tests.internals import world
from tests.ranks import At, require_ranks, run_ranks

_WIDTH = 128
_PATIENCE_SECONDS = 60.0


class _Deep(nn.Module):
    """``near_end`` is called when its backward has left all blocks, and only ``first`` is yet to come."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near_end: Callable[[], Any] = lambda: None
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(num_blocks))
        self.expert = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor, *, takes_expert: bool = True) -> torch.Tensor:
        x = At.apply(self.first(x), lambda: self.near_end())
        for block in self.blocks:
            x = x + block(x)
        return (self.expert(x) if takes_expert else x).square().mean()


def _config(directory: Path, stage: int, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    drive = {"device": "nvme", "nvme_path": str(directory)}
    zero = {"stage": stage, "offload_optimizer": drive} | ({"offload_param": drive} if stage == 3 else {})
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
        "infinity": {"keep_in_memory": False},
    } | (changes or {})


_LITTLE: dict[str, Any] = {"infinity": {"keep_in_memory": False, "host_memory_budget": "2000KiB"}}
"""In which gradients of some units are spilled."""


def _input(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(1000 * rank + number))


def _loss(engine: Any, rank: int, number: int, **kwargs: Any) -> torch.Tensor:
    loss: torch.Tensor = engine(_input(rank, number), **kwargs)
    return loss


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def _require_same(found: dict[Any, dict[str, torch.Tensor]]) -> None:
    first = next(iter(found))
    for key, values in found.items():
        assert all(torch.equal(values[name], value) for name, value in found[first].items()), key


def _sent() -> int:
    return world().sent_bytes["gradients"]


def _require_sent(more_than: int) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    while _sent() <= more_than:
        assert time.monotonic() < until, "nothing was sent"
        time.sleep(0.01)


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 3}, _LITTLE], ids=["one", "three", "spilled"])
def test_means_are_on_their_way_before_the_backward_ends(changes: dict[str, Any], tmp_path: Path) -> None:
    def train(rank: int) -> None:
        found = {}
        for stage in (0, 2, 3):
            engine = infinity.initialize(model=_Deep(), config=_config(tmp_path, stage, changes))[0]
            num = engine.gradient_accumulation_steps()
            for number in range(2 * num):
                before = _sent()
                if stage and number % num == num - 1:
                    engine.module.near_end = lambda before=before: _require_sent(before)
                engine.backward(_loss(engine, rank, number))
                engine.module.near_end = lambda: None
                engine.step()
            found[stage] = _weights(engine)
            engine.close()
        _require_same(found)

    require_ranks(2, train, tmp_path)


@pytest.mark.deep
def test_those_of_micro_batches_that_go_together_are_too(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        changes = {"gradient_accumulation_steps": 3, "infinity": {"schedule": "vertical", "keep_in_memory": False}}
        engine = infinity.initialize(model=_Deep(), config=_config(tmp_path, 2, changes))[0]
        for step in range(3):
            before = _sent()
            if step:  # the first one is a trial
                engine.module.near_end = lambda before=before: _require_sent(before)
            engine.train_batch(iter([_input(rank, 3 * step + part) for part in range(3)]))
            assert engine.report.schedule == "vertical", engine.report.schedule_reason
        engine.close()

    require_ranks(2, train, tmp_path)


@pytest.mark.deep
def test_of_what_is_spilled_each_rank_writes_its_share(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        written = {}
        for name, changes in (("kept", {}), ("spilled", _LITTLE)):
            with infinity.initialize(model=_Deep(), config=_config(tmp_path, 2, changes))[0] as engine:
                for number in range(2):
                    before = engine._parts.storage.counters().write_bytes
                    engine.backward(_loss(engine, rank, number))
                    engine.step()
                    engine.flush()
                written[name] = engine._parts.storage.counters().write_bytes - before
                units = [
                    grads.unit.layout.trainable_numel for grads in engine._stepper.gradients._grads if not grads.stays
                ]
        assert written["spilled"] - written["kept"] == pytest.approx(4 * sum(units) / 2, rel=0.1)

    require_ranks(2, train, tmp_path)


@pytest.mark.deep
def test_a_rank_that_waits_keeps_no_other_one_waiting(tmp_path: Path) -> None:
    """The script's own exchange in a backward that is in another order on each rank, as of experts."""

    def train(rank: int) -> None:
        found = {}
        for stage in (0, 2):
            engine = infinity.initialize(model=_Deep(), config=_config(tmp_path, stage, _LITTLE))[0]
            engine.module.near_end = torch.distributed.barrier
            for number in range(3):
                engine.backward(_loss(engine, rank, number, takes_expert=(number + rank) % 2 == 0))
                engine.step()
            found[stage] = _weights(engine)
            engine.close()
        _require_same(found)

    require_ranks(2, train, tmp_path)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("changes", [{}, _LITTLE], ids=["kept", "spilled"])
def test_what_comes_between_backward_and_step(changes: dict[str, Any], tmp_path: Path) -> None:
    def train(rank: int) -> None:
        found = {}
        for stage in (0, 1, 2, 3):
            engine = infinity.initialize(model=_Deep(), config=_config(tmp_path, stage, changes))[0]
            weight = engine.module.blocks[0][0].weight
            engine.backward(_loss(engine, rank, 0))
            engine.zero_grad()  # in the midst of it, on all ranks
            engine.backward(_loss(engine, rank, 1, takes_expert=rank == 0))
            if stage:
                with pytest.raises(AccessError, match=r"zero_optimization\.stage to 0"):
                    _ = weight.grad
            weight.grad = torch.ones_like(weight)  # the same on all ranks
            engine.step()
            engine.backward(_loss(engine, rank, 2))
            weight.grad = None
            engine.step()
            engine.backward(_loss(engine, rank, 3), retain_graph=True)
            engine.backward(_loss(engine, rank, 4))
            engine.optimizer.step()  # which keeps gradients, as torch's does
            found[stage] = _weights(engine) | {"gradient": weight.grad.clone()}
            engine.optimizer.zero_grad()
            with pytest.raises(ZeroDivisionError):
                engine.module.near_end = lambda: 1 / 0
                engine.backward(_loss(engine, rank, 5))  # fails on all ranks
            engine.module.near_end = lambda: None
            engine.zero_grad()
            engine.backward(_loss(engine, rank, 6))
            engine.step()
            found[stage] |= {f"then {name}": value for name, value in _weights(engine).items()}
            engine.close()
        _require_same(found)

    require_ranks(2, train, tmp_path)


@pytest.mark.deep
def test_a_plain_loop_clips_by_its_own_norms_after_steps_of_the_engine(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        found = {}
        for stage in (0, 2):
            config = _config(tmp_path, stage, {"gradient_clipping": 0.01})
            engine = infinity.initialize(model=_Deep(2), config=config)[0]
            engine.backward(_loss(engine, rank, 0))
            engine.step()
            (100 * _loss(engine, rank, 1)).backward()
            engine.optimizer.step()
            found[stage] = _weights(engine)
            engine.close()
        _require_same(found)

    require_ranks(2, train, tmp_path)


@pytest.mark.deep
def test_ranks_begin_with_the_same_weights_where_halves_are_rounded(tmp_path: Path) -> None:
    """A main weight halfway between two model weights: each rank has made the halves of its own share alone."""

    def begin(rank: int) -> None:
        found = {}
        for stage in (0, 1, 2, 3):
            model = _Deep(2)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_((parameter.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32))
            config = _config(tmp_path, stage, {"bf16": {"enabled": True}})
            with infinity.initialize(model=model, config=config)[0] as engine:
                found[stage] = _weights(engine)
        _require_same(found)

    require_ranks(2, begin, tmp_path)


@pytest.mark.deep
def test_gradients_dropped_on_one_rank_alone_are_an_error_on_all(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        engine = infinity.initialize(model=_Deep(), config=_config(tmp_path, 2))[0]
        engine.backward(_loss(engine, rank, 0))
        with pytest.raises(RankError, match="came with something else"):
            if rank == 0:
                engine.zero_grad()
                engine.backward(_loss(engine, rank, 1))
            engine.step()

    require_ranks(2, train, tmp_path)


@pytest.mark.deep
def test_a_backward_that_fails_on_one_rank_ends_all(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        engine = infinity.initialize(model=_Deep(), config=_config(tmp_path, 2))[0]
        engine.module.near_end = (lambda: 1 / 0) if rank == 1 else lambda: None
        engine.backward(_loss(engine, rank, 0))
        engine.step()

    errors = run_ranks(2, train, tmp_path)
    assert "ZeroDivisionError" in errors[1]
    assert "RankError" in errors[0] and "ZeroDivisionError" in errors[0], errors[0]


@pytest.mark.deep
def test_two_engines_exchange_at_a_time(tmp_path: Path) -> None:
    """As of a generator and its discriminator: each rank comes to them in its own time, one after the other."""

    def train(rank: int) -> None:
        found = {}
        for stage in (0, 2):
            engines = [infinity.initialize(model=_Deep(2), config=_config(tmp_path, stage))[0] for _ in range(2)]
            for number in range(4):
                for engine in engines:
                    engine.module.near_end = lambda number=number: time.sleep(0.05 * ((number + rank) % 2))
                    engine.backward(_loss(engine, rank, number))
                for engine in reversed(engines):
                    engine.step()
            found[stage] = _weights(engines[0]) | {f"other {name}": each for name, each in _weights(engines[1]).items()}
            for engine in engines:
                engine.close()
        _require_same(found)
        until = time.monotonic() + _PATIENCE_SECONDS
        while world().services["numbers"]:  # process groups that the next engine can take over
            assert time.monotonic() < until
            time.sleep(0.01)

    require_ranks(2, train, tmp_path)
