"""What ranks send each other is data: nothing that arrives is run, and errors are the same on all of them."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinity.distributed.agreement import PULSE_SECONDS, gather_results, on_rank_0
from infinity.distributed.world import world
from infinity.errors import CheckpointError, RankError
from swapper import StallError, VolumeTooSmallError
from tests.ranks import on_ranks, require_ranks, run_ranks


class _Dangerous:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class _Own(Exception):
    """Of a script."""


_ERRORS: dict[str, Callable[[], Exception]] = {
    "CheckpointError": lambda: CheckpointError(Path("/a"), "is none", cure="Give one"),
    "VolumeTooSmallError": lambda: VolumeTooSmallError(Path("/a"), 20, 10, capacities=[(Path("/a"), 10, "free")]),
    "StallError": lambda: StallError("read", "a", "a drive", 0, 4096, None, "no answer"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "/a"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "KeyError": lambda: KeyError("name"),
}


@pytest.mark.deep(but=4)
@pytest.mark.parametrize("name", _ERRORS)
@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_all(rank: int, name: str, tmp_path: Path) -> None:
    expected = _ERRORS[name]()

    def function() -> int:
        if world().index == 1:
            raise expected
        return 1

    with pytest.raises(type(expected)) as caught:
        gather_results(world(), "a test", function)
    assert type(caught.value) is type(expected)
    assert str(caught.value) == str(expected)
    assert vars(caught.value).keys() >= vars(expected).keys()


@pytest.mark.parametrize("kind", ["class of a script", "value that is no data"])
@on_ranks(2)
def test_what_is_no_data_is_told_in_words(rank: int, kind: str, tmp_path: Path) -> None:
    def function() -> Any:
        if rank == 1 and kind == "class of a script":
            raise _Own("it failed")
        return object() if rank == 1 else 1

    expected = _Own if rank == 1 and kind == "class of a script" else (RankError, TypeError)
    with pytest.raises(expected, match=r"it failed|which is no plain data"):
        gather_results(world(), "a test", function)


@pytest.mark.parametrize("seconds", [0.0, 1.5 * PULSE_SECONDS])
def test_an_interrupted_first_rank_is_named_by_those_that_wait_for_it(seconds: float, tmp_path: Path) -> None:
    """Ctrl-C while it works for all, before it has shown that it is alive and after: its end is not announced."""

    def interrupted() -> None:
        time.sleep(seconds)
        raise KeyboardInterrupt

    first, second = run_ranks(2, lambda rank: on_rank_0(world(), "saving", interrupted), tmp_path)
    assert first.endswith("KeyboardInterrupt\n")
    assert "RankError: rank 1, saving, which rank 0 does: another rank has ended" in second
    assert "rank 0 failed with KeyboardInterrupt" in second


def test_a_pickle_from_another_rank_is_not_run(tmp_path: Path) -> None:
    def attack(rank: int) -> None:
        if rank == 1:
            data = pickle.dumps((False, pickle.dumps(_Dangerous(tmp_path / "ran")), ""))
            world().gather("a test", data)
        else:
            with pytest.raises(RankError, match="rank 1 sent what no rank of this version sends"):
                gather_results(world(), "a test", lambda: 1)

    require_ranks(2, attack, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_values_arrive_as_they_were(tmp_path: Path) -> None:
    value = {"a": (1, [2.5, None]), (1, "b"): {3}, "path": Path("/a"), "bytes": b"x" * 100_000}

    def exchange(rank: int) -> None:
        assert gather_results(world(), "a test", lambda: value) == [value, value]

    require_ranks(2, exchange, tmp_path)
