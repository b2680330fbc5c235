"""How many processes train, and how many of them on one machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from infinity.distributed.world import num_local_processes
from tests.ranks import run_ranks


@pytest.mark.parametrize(("told", "expected"), [(None, [2, 2, 1]), ("3", [3, 3, 3])])
def test_how_many_processes_share_a_machine(told: str | None, expected: list[int], tmp_path: Path) -> None:
    """A launcher says it, or the names of the machines do: each has its own memory to divide."""

    def count(rank: int) -> None:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if told is not None:
            os.environ["LOCAL_WORLD_SIZE"] = told
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: f"worker-{rank // 2}")
            assert num_local_processes() == expected[rank]

    assert run_ranks(3, count, tmp_path) == [""] * 3
