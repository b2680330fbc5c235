"""What a training stores is looked at as a whole before anything is reserved: volumes on one drive, and a checkpoint beside."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import infinity
from infinity.config import load_config
from infinity.engine import resources
from infinity.errors import StorageError
from infinity.plan.machine import Room, together
from infinity.plan.placement import place
from infinity.plan.sizes import UnitSize
from infinity.plan.volumes import Volumes
from swapper.volumes.directory import Directory
from tests.exactness.lockstep import everything_on_nvme
from tests.unit.plan.planned import request_of

_MIB = 1 << 20


def _drive(free_bytes: int) -> Any:
    """One drive under all directories."""

    def room_bytes(directories: Sequence[Directory]) -> int | None:
        return together([Room(each, 0, free_bytes, 0) for each in directories])

    return room_bytes


def _on_two(directory: Path) -> dict[str, Any]:
    config = everything_on_nvme(directory, {"optimizer": {"type": "AdamW"}})
    other = {"device": "nvme", "nvme_path": str(directory / "other")}
    config["zero_optimization"] = {**config["zero_optimization"], "offload_optimizer": other}
    return config


def test_volumes_that_fit_one_by_one_and_not_together_are_a_problem(tmp_path: Path) -> None:
    config = load_config(_on_two(tmp_path))
    units = [UnitSize(f"u{index}", 16 * _MIB, 8 * _MIB, 2, True) for index in range(4)]
    request = request_of(budget_bytes=400 * _MIB)
    placement = dataclasses.replace(
        place(units, request), resident_units=frozenset(), hosted_units=frozenset(), states_in_memory=(0,) * 4
    )
    volumes = Volumes.of(config, units, request, placement)
    needs = volumes.reserved_bytes
    total = sum(needs.values())
    assert len(needs) == 2 and max(needs.values()) < total
    assert volumes.problem(_drive(total)) is None
    told = volumes.problem(_drive(total - 1))
    assert told is not None and "on the drives, of which" in told and "are free" in told
    # 8 Mi weights with two states, in fp32, of four units
    assert volumes.checkpoint_bytes == 4 * 8 * _MIB * 3 * 4
    assert volumes.checkpoint_problem(_drive(total + volumes.checkpoint_bytes)) is None
    beside = volumes.checkpoint_problem(_drive(total + volumes.checkpoint_bytes - 1))
    assert beside is not None and "a checkpoint takes up to 402653184 bytes (402.7 MB)" in beside


def test_the_engine_refuses_before_anything_is_reserved_and_tells_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resources, "room_bytes", _drive(4096))
    refused = r"cannot hold the states and what is stored with them: .*of which 4096 bytes are free"
    with pytest.raises(StorageError, match=refused):
        infinity.initialize(model=nn.Linear(256, 256), config=_on_two(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    def start(free_bytes: int) -> list[str]:
        monkeypatch.setattr(resources, "room_bytes", _drive(free_bytes))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            infinity.initialize(model=nn.Linear(256, 256), config=_on_two(tmp_path))[0].close()
        return [record.message for record in caplog.records if "a checkpoint takes" in record.message]

    assert not start(64 * _MIB)
    (told,) = start(1_500_000)
    assert told.endswith("save elsewhere")
