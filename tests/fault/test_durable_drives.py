"""Durable runs on drives that are full, in use by another process, or give back other bytes than were written."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import InfinityError, StepError, StorageError
from swapper import SwapperError
from tests.exactness.lockstep import BF16
from tests.integration.test_durable_runs import Model, everything, require_equal, train, training
from tests.killed import NEEDS_FORKS


@NEEDS_FORKS
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_second_process_is_refused(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with training(tmp_path / "drive", BF16, Model()) as engine:
                train(engine, 1)
                os.write(writing, b"holds")
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 5) == b"holds"
        refused = pytest.raises(StorageError, match=r"durable_path.*in use, by another process")
        with refused, training(tmp_path / "drive", BF16, Model()):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
    with training(tmp_path / "drive", BF16, Model()) as engine:  # nobody was there to let go
        assert engine.global_steps in (0, 1)


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB of its own, which can really be filled."""
    if os.geteuid() != 0:
        pytest.skip("to mount a file system needs root")
    image, place = tmp_path / "image", tmp_path / "small"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(6 << 20)
    for command in (
        ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(image)],
        ["mount", "-o", "loop", str(image), str(place)],
    ):
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            pytest.skip(f"{command[0]}: {found.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_drive(small_drive: Path) -> None:
    """States have their space from the start; a commit's file does not: the run stops, and goes on when there is room."""
    filler = small_drive / "filler"
    with training(small_drive, BF16, Model()) as engine:
        train(engine, 2)
        engine.flush()
        expected = everything(engine)
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            except OSError:
                pass
        train(engine, 3)
        with pytest.raises(
            StepError,
            match=r"step 3 could not be committed.*No space left.*Free space on the drive, and start the script again",
        ):
            engine.flush()
    filler.unlink()
    with training(small_drive, BF16, Model(1)) as engine:
        assert engine.global_steps == 2
        require_equal(everything(engine), expected)
        train(engine, 3)
    with training(small_drive, BF16, Model(1)) as engine:
        assert engine.global_steps == 3


def test_no_commit_is_made_beside_another_directory_s_states(tmp_path: Path) -> None:
    """The run's directory was renamed, or its drive unmounted, and another one has its name."""
    run, aside = tmp_path / "drive" / "durable", tmp_path / "drive" / "aside"
    with training(tmp_path / "drive", BF16, Model()) as engine:
        train(engine, 2)
        engine.flush()
        expected = everything(engine)
        run.rename(aside)
        run.mkdir(0o700)
        (run / "lock").touch()
        train(engine, 3)
        with pytest.raises(StepError, match=r"step 3 could not be committed.*another directory.*restore the directory"):
            engine.flush()
    assert [path.name for path in run.iterdir()] == ["lock"]
    (run / "lock").unlink()
    aside.replace(run)
    with training(tmp_path / "drive", BF16, Model(1)) as engine:
        assert engine.global_steps == 2
        require_equal(everything(engine), expected)


def test_a_drive_without_room_is_told_at_the_start(small_drive: Path) -> None:
    """Before anything has been trained."""
    changes = {**BF16, "infinity": {"keep_last": 1000}}
    refused = pytest.raises(StorageError, match=r"cannot hold the states.*free.*durable_path")
    with refused, training(small_drive, changes, Model()):
        pass


def test_a_flipped_bit_anywhere_is_found_or_does_no_harm(tmp_path: Path) -> None:
    """Of every file of a run, in every part of it; what is free may change."""
    changes: dict[str, Any] = {**BF16, "infinity": {"keep_last": 1}}
    with training(tmp_path / "drive", changes, Model()) as engine:
        train(engine, 2)
        expected = everything(engine)
    run = tmp_path / "drive" / "durable"
    num_found = 0
    for path in sorted(run.iterdir()):
        data = path.read_bytes()
        for place in range(0, len(data), -(-len(data) // (8 if "states" in path.name else 6)) or 1):
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            try:
                with training(tmp_path / "drive", changes, Model(1)) as engine:
                    require_equal(everything(engine), expected)
            except (InfinityError, SwapperError) as error:
                num_found += 1
                cures = ("ame another directory", "do not continue with these states")
                assert str(run) in str(error) and any(cure in str(error) for cure in cures), error
            path.write_bytes(data)
    assert num_found >= 6
    with training(tmp_path / "drive", changes, Model(1)) as engine:
        require_equal(everything(engine), expected)
