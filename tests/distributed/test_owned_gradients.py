"""Means that go to the ranks which update with them, beside the backward: when, how many bytes, and what comes in between."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process

import infinity
from infinity.errors import RankError
from tests.distributed.common import LITTLE, Deep, deep_config, input_of, require_all_same, weights_of
from tests.internals import world
from tests.ranks import on_ranks, run_ranks

_TIMEOUT_SECONDS = 60.0


def _loss(engine: Any, rank: int, number: int, **kwargs: Any) -> torch.Tensor:
    return engine(input_of(rank, number), **kwargs)


def _sent() -> int:
    return world().sent_bytes["gradients"]


def _require_sent(more_than: int) -> None:
    until = time.monotonic() + _TIMEOUT_SECONDS
    while _sent() <= more_than:
        assert time.monotonic() < until, "nothing was sent"
        time.sleep(0.01)


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 3}, LITTLE], ids=["one", "three", "spilled"])
@on_ranks(2)
def test_means_are_on_their_way_before_the_backward_ends(rank: int, changes: dict[str, Any], tmp_path: Path) -> None:
    found = {}
    for stage in (0, 2, 3):
        with infinity.initialize(model=Deep(), config=deep_config(tmp_path, stage, changes))[0] as engine:
            num = engine.gradient_accumulation_steps()
            for number in range(2 * num):
                before = _sent()
                if stage and number % num == num - 1:
                    engine.module.near_end = lambda before=before: _require_sent(before)
                engine.backward(_loss(engine, rank, number))
                engine.module.near_end = lambda: None
                engine.step()
            found[stage] = weights_of(engine)
    require_all_same(found)


@pytest.mark.deep
@on_ranks(2)
def test_those_of_micro_batches_that_go_together_are_too(rank: int, tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 3, "infinity": {"schedule": "vertical", "keep_in_memory": False}}
    with infinity.initialize(model=Deep(), config=deep_config(tmp_path, 2, changes))[0] as engine:
        for step in range(3):
            before = _sent()
            if step:  # the first one is a trial
                engine.module.near_end = lambda before=before: _require_sent(before)
            engine.train_batch(iter([input_of(rank, 3 * step + part) for part in range(3)]))
            assert engine.report.schedule == "vertical", engine.report.schedule_reason


@pytest.mark.deep
@on_ranks(2)
def test_of_what_is_spilled_each_rank_writes_its_share(rank: int, tmp_path: Path) -> None:
    written = {}
    for name, changes in (("kept", {}), ("spilled", LITTLE)):
        with infinity.initialize(model=Deep(), config=deep_config(tmp_path, 2, changes))[0] as engine:
            for number in range(2):
                before = engine._parts.storage.counters().write_bytes
                engine.backward(_loss(engine, rank, number))
                engine.step()
                engine.flush()
            written[name] = engine._parts.storage.counters().write_bytes - before
            units = [
                grads.unit.layout.trainable_numel
                for grads in engine._stepper.gradients._grads
                if not grads.stays_in_ram
            ]
    assert written["spilled"] - written["kept"] == pytest.approx(4 * sum(units) / 2, rel=0.1)


@pytest.mark.deep
@on_ranks(2)
def test_a_rank_that_waits_keeps_no_other_one_waiting(rank: int, tmp_path: Path) -> None:
    """The script's own exchange in a backward that is in another order on each rank, as of experts."""
    found = {}
    for stage in (0, 2):
        engine = infinity.initialize(model=Deep(), config=deep_config(tmp_path, stage, LITTLE))[0]
        engine.module.near_end = torch.distributed.barrier
        for number in range(3):
            engine.backward(_loss(engine, rank, number, takes_expert=(number + rank) % 2 == 0))
            engine.step()
        found[stage] = weights_of(engine)
        engine.close()
    require_all_same(found)


@pytest.mark.deep
@on_ranks(2)
def test_a_plain_loop_clips_by_its_own_norms_after_steps_of_the_engine(rank: int, tmp_path: Path) -> None:
    found = {}
    for stage in (0, 2):
        config = deep_config(tmp_path, stage, {"gradient_clipping": 0.01})
        with infinity.initialize(model=Deep(2), config=config)[0] as engine:
            engine.backward(_loss(engine, rank, 0))
            engine.step()
            (100 * _loss(engine, rank, 1)).backward()
            engine.optimizer.step()
            found[stage] = weights_of(engine)
    require_all_same(found)


@pytest.mark.deep
@on_ranks(2)
def test_ranks_begin_with_the_same_weights_where_halves_are_rounded(rank: int, tmp_path: Path) -> None:
    """A main weight halfway between two model weights: each rank has made the halves of its own share alone."""
    found = {}
    for stage in (0, 1, 2, 3):
        model = Deep(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32))
        config = deep_config(tmp_path, stage, {"bf16": {"enabled": True}})
        with infinity.initialize(model=model, config=config)[0] as engine:
            found[stage] = weights_of(engine)
    require_all_same(found)


@pytest.mark.deep
@on_ranks(2)
def test_gradients_dropped_on_one_rank_alone_are_an_error_on_all(rank: int, tmp_path: Path) -> None:
    engine = infinity.initialize(model=Deep(), config=deep_config(tmp_path, 2))[0]
    engine.backward(_loss(engine, rank, 0))
    with pytest.raises(RankError, match=r"rank \d came with '"):
        if rank == 0:
            engine.zero_grad()
            engine.backward(_loss(engine, rank, 1))
        engine.step()


@pytest.mark.deep
def test_a_backward_that_fails_on_one_rank_ends_all(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        engine = infinity.initialize(model=Deep(), config=deep_config(tmp_path, 2))[0]
        engine.module.near_end = (lambda: 1 / 0) if rank == 1 else lambda: None
        engine.backward(_loss(engine, rank, 0))
        engine.step()

    errors = run_ranks(2, train, tmp_path)
    assert "ZeroDivisionError" in errors[1]
    assert "RankError" in errors[0] and "ZeroDivisionError" in errors[0], errors[0]


@pytest.mark.deep
@on_ranks(2)
def test_two_engines_exchange_at_a_time(rank: int, tmp_path: Path) -> None:
    """As of a generator and its discriminator: each rank comes to them in its own time, one after the other."""
    found = {}
    for stage in (0, 2):
        engines = [infinity.initialize(model=Deep(2), config=deep_config(tmp_path, stage))[0] for _ in range(2)]
        for number in range(4):
            for engine in engines:
                engine.module.near_end = lambda number=number: time.sleep(0.05 * ((number + rank) % 2))
                engine.backward(_loss(engine, rank, number))
            for engine in reversed(engines):
                engine.step()
        found[stage] = weights_of(engines[0]) | {f"other {name}": each for name, each in weights_of(engines[1]).items()}
        for engine in engines:
            engine.close()
    require_all_same(found)
    until = time.monotonic() + _TIMEOUT_SECONDS
    while world().services["numbers"]:  # process groups that the next engine can take over
        assert time.monotonic() < until
        time.sleep(0.01)
