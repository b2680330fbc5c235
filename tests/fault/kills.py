"""Kills of durable runs by the thousand, with a tally that a later call continues.

    python -m tests.fault.kills TALLY 2000

Runs are numbered, and take the modes in turn: those of `test_durable_kills`, and three ranks of which one is killed. A run is
killed up to four times, at moments that follow from its number, and then has to come to the bits of one that never was. The tally
has a line of JSON for each; the calls end when their kills add up to the number given. A run that differs ends the call at once.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.distributed import test_durable_runs as ranks
from tests.fault import test_durable_kills as alone
from tests.killed import ticking
from tests.ranks import run_ranks

_RANKS = "three ranks"
_NUM_RANKS = 3
_MODES = (*alone.MODES, _RANKS)


class _Alone:
    """One process."""

    def __init__(self, mode: str, folder: Path) -> None:
        self._changes = alone.MODES[mode]
        self._folder = folder
        num_ticks = alone.forked(folder / "whole", self._changes, folder / "expected", None)
        assert num_ticks is not None
        self.num_ticks = num_ticks

    def kill(self, drive: Path, chance: random.Random) -> bool:
        """Run until it is killed, or to its end; whether it was."""
        return alone.forked(drive, self._changes, drive.with_suffix(".end"), self._moment(chance)) is None

    def _moment(self, chance: random.Random) -> int:
        return chance.randint(1, self.num_ticks * 2 // 3)

    def is_equal(self, drive: Path) -> bool:
        """Whether it comes to the bits of one that was never killed."""
        end = drive.with_suffix(".end")
        has_ended = alone.forked(drive, self._changes, end, None) is not None
        return has_ended and end.read_text() == (self._folder / "expected").read_text()


class _Ranks:
    """Three processes, of which one is killed."""

    def __init__(self, folder: Path) -> None:
        self._whole = folder / "whole"
        assert self._run(self._whole, 0, None) == [""] * _NUM_RANKS
        self._num_ticks = int((self._whole / "ticks").read_text())

    def _run(self, directory: Path, killed: int, num_ticks: int | None) -> list[str]:
        directory.mkdir(exist_ok=True)

        def function(rank: int) -> None:
            if rank != killed:
                ranks.train(rank, directory)
                return
            counter = itertools.count(1)

            def tick() -> None:
                if next(counter) == num_ticks:
                    os.kill(os.getpid(), signal.SIGKILL)

            for name in ("pwritev", "fdatasync", "replace", "unlink"):
                mock.patch.object(os, name, ticking(getattr(os, name), tick)).start()
            ranks.train(rank, directory)
            (directory / "ticks").write_text(str(next(counter)))

        group = Path(tempfile.mkdtemp(dir=directory, prefix="group"))
        return run_ranks(_NUM_RANKS, function, group)

    def kill(self, drive: Path, chance: random.Random) -> bool:
        """As `_Alone.kill`."""
        return any(self._run(drive, chance.randrange(_NUM_RANKS), chance.randint(1, self._num_ticks * 2 // 3)))

    def is_equal(self, drive: Path) -> bool:
        """As `_Alone.is_equal`."""
        if self._run(drive, 0, None) != [""] * _NUM_RANKS:
            return False
        return all(_are_equal(drive / f"end{rank}", self._whole / f"end{rank}") for rank in range(_NUM_RANKS))


def _are_equal(left: Path, right: Path) -> bool:
    found, expected = (torch.load(path)["values"] for path in (left, right))
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def main(tally: Path, num_wanted: int, say: Callable[[str], None] = print) -> int:
    """Continue the tally; returns 1 if a run differs."""
    known: list[dict[str, Any]] = []
    if tally.exists():
        known = [json.loads(line) for line in tally.read_text().splitlines()]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    num_kills, runs = sum(each["kills"] for each in known), dict[str, _Alone | _Ranks]()
    with tempfile.TemporaryDirectory() as directory:
        for number in itertools.count(len(known)):
            if num_kills >= num_wanted:
                break
            mode = _MODES[number % len(_MODES)]
            folder = Path(directory) / mode
            if mode not in runs:
                folder.mkdir()
                runs[mode] = _Ranks(folder) if mode == _RANKS else _Alone(mode, folder)
            chance, drive = random.Random(number), folder / str(number)
            kills = sum(runs[mode].kill(drive, chance) for _ in range(alone.MOST_KILLS))
            line = {"run": number, "mode": mode, "kills": kills, "equal": runs[mode].is_equal(drive), "commit": commit}
            with tally.open("a") as file:
                file.write(f"{json.dumps(line)}\n")
            num_kills += kills
            say(f"{line}: {num_kills} kills")
            if not line["equal"]:
                return 1
            subprocess.run(["rm", "-rf", drive], check=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))
