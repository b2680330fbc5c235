"""In backward, updates that the next forward needs last are left for last, where all weights fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.errors import BudgetTooSmallError
from infinity.updates.job import UpdateJob
from infinity.updates.stream import UpdateStream
from tests.exactness.case import loss_of
from tests.exactness.lockstep import PLAIN, everything_on_nvme, make_batch


def _ranks(directory: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> dict[str, int]:
    """Unit name -> rank of its update in the last of a few steps, in the order of submission."""
    ranks: dict[str, int] = {}
    submit = UpdateStream.submit

    def watched(self: UpdateStream, job: UpdateJob) -> None:
        ranks.pop(job.unit.name, None)
        ranks[job.unit.name] = job.rank
        submit(self, job)

    monkeypatch.setattr(UpdateStream, "submit", watched)
    engine, *_ = infinity.initialize(model=PLAIN.make("none"), config=everything_on_nvme(directory, changes))
    with engine:
        for step in range(3):
            engine.backward(loss_of(engine(**make_batch(step))))
            engine.step()
        cache = engine._coordinator.parameter_cache
        forward = [cache.units[i].name for i in cache.training_schedule.forward_order(len(cache.units))]
    assert set(ranks) == set(forward)
    return {name: ranks[name] for name in forward}


def test_with_room_for_all_weights_the_forwards_order_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _ranks(tmp_path, monkeypatch, {})
    assert list(ranks.values()) == list(range(len(ranks)))


def test_without_it_updates_run_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetTooSmallError) as refused:
        _ranks(tmp_path, monkeypatch, {"infinity": {"host_memory_budget": 1}})
    least = refused.value.minimum_bytes
    ranks = _ranks(tmp_path, monkeypatch, {"infinity": {"host_memory_budget": least}})
    assert set(ranks.values()) == {0}
