"""The space of a durable run's commits: it is in the plan, and a run that keeps too many is told how many there is room for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import StorageError
from infinity.plan.volumes import Retention
from tests.exactness.lockstep import everything_on_nvme


@pytest.mark.parametrize(
    ("room", "kept", "fitting", "is_cured"),
    [(None, 9, None, False), (100, 8, 8, False), (105, 9, 8, True), (29, 1, 0, False), (5, 1, 0, False)],
)
def test_commits_that_fit(room: int | None, kept: int, fitting: int | None, is_cured: bool) -> None:
    found = Retention(20, 10, kept, room)
    assert found.num_bytes == 20 + 10 * kept and found.num_fitting == fitting
    assert (found.cure() is not None) == is_cured
    assert not is_cured or f"infinity.keep_last to {fitting}" in str(found.cure())


def _config(directory: Path, capacity: str, **ours: Any) -> dict[str, Any]:
    run = {"path": str(directory / "run"), "capacity": capacity}
    changes = {
        "optimizer": {"type": "AdamW"},
        "aio": {"block_size": 16384, "thread_count": 1, "queue_depth": 1},
        "infinity": {"durable": True, "durable_path": run, **ours},
    }
    return everything_on_nvme(directory, changes)


def test_too_many_commits_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    def start(**ours: Any) -> Any:
        torch.manual_seed(0)
        return infinity.initialize(model=nn.Linear(256, 256), config=_config(tmp_path, "8MiB", **ours))[0]

    with pytest.raises(StorageError, match=r"the drives have room for \d+\. Set infinity.keep_last to") as caught:
        start(keep_last=20, keep_every=10)
    (most,) = map(int, re.findall(r"Set infinity\.keep_last to (\d+)", str(caught.value)))
    assert 1 < most < 20
    with start(keep_last=most) as engine:
        kept = engine.plan.retention
        assert kept.num_kept == kept.num_fitting == most
        assert f"each of {most} commits (the drives have room for {most})" in str(engine.plan)
    with pytest.raises(StorageError, match=f"room for {most}"):
        start(keep_last=most + 1)
