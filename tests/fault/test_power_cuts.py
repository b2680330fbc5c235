"""Durable runs whose machine loses power at any moment: each goes on, bit for bit, from the last commit or the one under way"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from swapper import RunDirectory
from tests.exactness.lockstep import BF16
from tests.integration.test_durable_runs import Model, everything, require_equal, training
from tests.power_cut import Machine, copied

_CUTS = int(os.environ.get("INFINITY_POWER_CUTS", "12"))
_MODES: dict[str, dict[str, Any]] = {
    "in backward": BF16,
    "deferred": {**BF16, "gradient_clipping": 0.1, "infinity": {"keep_last": 2}},
    "accumulated": {**BF16, "gradient_accumulation_steps": 2, "infinity": {"keep_last": 3}},
}
_STEPS = 9


class _Cut:
    """The power fails after so many events.

    Attributes:
        allowed: The steps from which the run may go on: that of the last commit, and of one that is being written.
        after: Those, when the power failed; None as long as it has not.
    """

    def __init__(
        self, machine: Machine, num_events: int, found: Path, allowed: set[int], chance: random.Random
    ) -> None:
        self.allowed = allowed
        self.after: set[int] | None = None
        self._machine = machine
        self._left = num_events
        self._found = found
        self._chance = chance
        self._write = RunDirectory.write
        machine.on_event = self._on_event

    def _on_event(self, event: str) -> None:
        self._left -= 1
        if self._left < 0 and self.after is None:
            self.after = self.allowed
            self._machine.after_cut(self._found, self._chance, self._chance.choice([512, 4096]))

    def write(self, directory: RunDirectory, number: int, parts: Sequence[bytes]) -> None:
        step = json.loads(parts[1])["step"]
        self.allowed = self.allowed | {step}
        self._write(directory, number, parts)
        self.allowed = {step}


def _changes(mode: str, places: Sequence[Path]) -> dict[str, Any]:
    changes = _MODES[mode]
    paths = [str(path) for path in places]
    own = {**changes.get("infinity", {}), "durable_path": paths, "io_backend": "threads"}
    return {**changes, "infinity": own}


def _seed() -> None:
    torch.manual_seed(3)
    random.seed(3)


def _batches(engine: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from engine.training_dataloader


def _step(engine: Any, batches: Iterator[Any]) -> None:
    until = engine.global_steps + 1
    while engine.global_steps < until:
        engine.backward(engine(next(batches)))
        engine.step()


def _act(engine: Any, chance: random.Random) -> None:
    kept = engine.config.infinity.durable.keep_last
    batches = _batches(engine)
    for _ in range(chance.randint(1, 3)):
        if engine.global_steps < _STEPS:
            _step(engine, batches)
        if kept > 1 and chance.random() < 0.4:
            engine.rollback(chance.randrange(min(kept, engine.global_steps)))


@pytest.mark.deep(but=1)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_drives", [1, 2])
@pytest.mark.parametrize("mode", _MODES)
def test_power_fails_at_any_moment(mode: str, num_drives: int, tmp_path: Path) -> None:
    chance = random.Random(f"{mode} {num_drives} {os.environ.get('INFINITY_SEED', 0)}")
    expected: list[dict[str, Any]] = []
    first = tmp_path / "first"
    first.mkdir()
    machine, num_events = Machine(first), [0]

    def count(event: str) -> None:
        num_events[0] += 1

    machine.on_event = count
    with machine.running(), training(tmp_path, _changes(mode, _drives(first, num_drives)), Model()) as engine:
        _seed()
        expected.append(everything(engine))
        batches = _batches(engine)
        for _ in range(_STEPS):
            _step(engine, batches)
            expected.append(everything(engine))
    machine.close()
    now, allowed = tmp_path / "0", {0}
    now.mkdir()
    for number in range(_CUTS // (2 * len(_MODES))):
        root = copied(now, tmp_path / f"{number} runs")
        machine = Machine(root)
        now = tmp_path / str(number + 1)
        cut = _Cut(machine, chance.randrange(1 + num_events[0] * 2 // _STEPS), now, allowed, chance)
        changes = _changes(mode, _drives(root, num_drives))
        model = Model(0 if 0 in allowed else number)
        write = mock.patch.object(RunDirectory, "write", _method(cut.write))
        with machine.running(), write, training(root, changes, model) as engine:
            if engine.global_steps == 0:
                _seed()
            assert engine.global_steps in allowed, f"cut {number}"
            require_equal(everything(engine), expected[engine.global_steps])
            _act(engine, chance)
        machine.close()
        if cut.after is None:
            copied(root, now)
        allowed = cut.after or cut.allowed


def _method(function: Callable[..., None]) -> Callable[..., None]:
    return lambda *args: function(*args)


def _drives(root: Path, number: int) -> list[Path]:
    return [root / f"drive{index}" for index in range(number)]
