"""Drives that fail, stall or fill up under an engine: an error in words, never a hang and never stale data."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import InfinityError
from swapper import StallError, SwapperError, TransferError
from swapper.backend import Direction
from tests.exactness.case import Case
from tests.exactness.families import FAMILIES
from tests.exactness.faulty_drives import JitteringBackend, cause_of, faulty_drives, wrapped_drives
from tests.exactness.grid import Row
from tests.exactness.lockstep import PLAIN, SHAPES_BY_NAME, Lockstep, engine_on_nvme, take_steps, with_smallest_budget
from tests.exactness.verification import require_exact_training
from tests.faults import FaultRule
from tests.ticking import LONG_SECONDS, ticking

_CLIPPED = {"gradient_clipping": 0.1}


def _train(engine: Any, first: int, last: int) -> None:
    take_steps(engine, *range(first, last))
    engine.flush()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENODEV])
@pytest.mark.parametrize("direction", [Direction.READ, Direction.WRITE])
@pytest.mark.parametrize("changes", [{}, _CLIPPED, {"gradient_accumulation_steps": 2}], ids=["free", "clip", "ga2"])
@pytest.mark.parametrize("nth", [1, 3])
def test_an_io_error_stops_training_with_file_offset_bytes_and_errno(
    code: int, direction: Direction, changes: dict[str, Any], nth: int, tmp_path: Path
) -> None:
    changes = with_smallest_budget(tmp_path, changes)
    with faulty_drives() as backends, engine_on_nvme(tmp_path, PLAIN.make("none"), changes) as engine:
        _train(engine, 0, 2)
        for backend in backends:
            backend.add(FaultRule(direction=direction, nth=nth, errno=code))
        with pytest.raises((InfinityError, SwapperError)) as raised:
            _train(engine, 2, 6)
        assert sum(backend.num_faults for backend in backends) >= 1
        root = cause_of(raised.value, TransferError)
        assert root.errno == code
        for part in (root.file, str(root.offset), str(root.num_bytes), os.strerror(code)):
            assert part in str(raised.value), f"{part!r} is not in: {raised.value}"
        assert root.num_bytes > 0


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("direction", [Direction.READ, Direction.WRITE])
def test_a_failed_drive_is_never_trained_past(direction: Direction, tmp_path: Path) -> None:
    """Every call after the failure fails too, or trains on true data: never on stale data."""
    with faulty_drives() as backends, Lockstep.start(tmp_path, changes=with_smallest_budget(tmp_path, {})) as both:
        both.engine_step(0)
        both.engine_step(1)
        for backend in backends:
            backend.add(FaultRule(direction=direction, errno=errno.EIO))
        num_errors = 0
        for step in range(2, 5):
            try:
                both.engine_step(step)
                both.engine.flush()
            except (InfinityError, SwapperError):
                num_errors += 1
        assert num_errors == 3
    assert os.listdir(tmp_path) == []


@contextlib.contextmanager
def _time_passing(engine: Any) -> Iterator[None]:
    """Inside the ``with`` block, the deadlines of an engine's drives pass while they hang."""
    with contextlib.ExitStack() as clocks:
        for swapper in engine._parts.storage._swappers.values():
            clocks.enter_context(ticking(swapper.backend, lambda swapper=swapper: [swapper._scheduler]))
        yield


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("direction", [Direction.READ, Direction.WRITE])
def test_a_drive_that_hangs_is_an_error_within_the_deadline(direction: Direction, tmp_path: Path) -> None:
    with faulty_drives() as backends:
        # Time passes only while all that is under way hangs, or a busy machine's first step would miss the deadline.
        changes = with_smallest_budget(tmp_path, {"infinity": {"io_deadline_seconds": LONG_SECONDS}})
        engine = engine_on_nvme(tmp_path, PLAIN.make("none"), changes)
        try:
            _train(engine, 0, 1)
            for backend in backends:
                backend.add(FaultRule(direction=direction, nth=2, hangs=True))
            with _time_passing(engine), pytest.raises((InfinityError, SwapperError)) as raised:
                _train(engine, 1, 4)
            root = cause_of(raised.value, TransferError)
            assert isinstance(root, StallError)
            assert str(root.offset) in str(raised.value)
        finally:
            for backend in backends:
                backend.clear()
                backend.release_hung()
            engine.close()


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "case",
    [
        *(SHAPES_BY_NAME[name] for name in ("plain", "tied_weights", "experts", "skipped_blocks", "called_twice")),
        *(case for case in FAMILIES if case.name in {"t5", "gpt2"}),
    ],
    ids=lambda case: case.name,
)
def test_any_order_of_completion_gives_the_same_bits(case: Case, seed: int, tmp_path: Path) -> None:
    """Reads and writes end late and in any order: what races would compute from stale or half-written memory shows."""
    rows = (
        Row(budget="tight", page="small", checkpointing="non_reentrant"),
        Row(budget="tight", accumulation=3, clipping=True, dtype="bf16"),
        Row(budget="roomy", clipping=True, page="small", checkpointing="reentrant"),
    )
    with wrapped_drives(lambda inner: JitteringBackend(inner, seed, 0.01)):
        require_exact_training(case, rows[seed], tmp_path)


@pytest.mark.root
def test_a_drive_that_fills_up_later_does_no_harm(tmp_path: Path, small_tmpfs: Callable[[int], Path]) -> None:
    """All space is reserved at the start: others may fill the drive to the brim."""
    point = small_tmpfs(8 << 20)
    with Lockstep.start(point, changes=_CLIPPED) as both:
        both.engine_step(0)
        with open(point / "filler", "wb") as filler, pytest.raises(OSError):
            while True:
                filler.write(b"\0" * 65536)
                filler.flush()
        both.engine_step(1)
        both.engine_step(2)
        both.require_equal()
    assert os.listdir(point) == ["filler"]
