"""Backends around backends: logging, latency, and faults that happen exactly as told."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from swapper import ALIGNMENT
from swapper.backend import Direction, IOBackend
from swapper.backends.memory import MemoryBackend
from swapper.wrappers.base import BackendWrapper
from tests.conformance.suite import Completion, aligned_bytes, start
from tests.faults import FaultInjectingBackend, FaultRule

_READ, _WRITE = Direction.READ, Direction.WRITE


def _one(backend: IOBackend, direction: Direction, block: int = 0, fill: int = 1) -> tuple[Completion, np.ndarray]:
    array = aligned_bytes(ALIGNMENT)
    array[:] = fill
    completion = start(backend, direction, block * ALIGNMENT, array)
    completion.wait()
    return completion, array


def _faulty(*rules: FaultRule) -> FaultInjectingBackend:
    return FaultInjectingBackend(MemoryBackend(16 * ALIGNMENT), rules)


def _outcomes(backend: IOBackend, direction: Direction, num_requests: int) -> str:
    return "".join("x" if _one(backend, direction, i)[0].error else "." for i in range(num_requests))


def test_rules_choose_by_direction_number_times_and_place() -> None:
    backend = _faulty(FaultRule(direction=_WRITE, errno=errno.EIO))
    assert (_outcomes(backend, _READ, 3), _outcomes(backend, _WRITE, 3)) == ("...", "xxx")
    assert _outcomes(_faulty(FaultRule(nth=2, errno=errno.EIO)), _READ, 4) == ".x.."
    assert _outcomes(_faulty(FaultRule(times=2, errno=errno.EIO)), _READ, 4) == "xx.."
    assert _outcomes(_faulty(FaultRule(offset=2 * ALIGNMENT + 5, errno=errno.EIO)), _READ, 4) == "..x."


def test_short_transfers() -> None:
    backend = _faulty(FaultRule(short_bytes=100, times=2), FaultRule(short_bytes=0, times=1))
    for expected in (100, 100, 0, ALIGNMENT):
        completion, array = _one(backend, _WRITE if expected == ALIGNMENT else _READ)
        assert completion.error is None and completion.transferred_bytes == expected
        if expected == 100:
            assert not array[:100].any() and array[100:].all()


@pytest.mark.parametrize("direction", [_READ, _WRITE])
def test_flipped_bits_are_silent(direction: Direction) -> None:
    backend = _faulty(FaultRule(direction=direction, flipped_bit=8 * 10 + 2))
    completion, written = _one(backend, _WRITE, fill=0xFF)
    assert completion.error is None and (written == 0xFF).all(), "the memory of a write must stay as it is"
    completion, array = _one(backend, _READ)
    assert completion.error is None
    assert array[10] == 0xFF ^ 4 and (np.delete(array, 10) == 0xFF).all()


def test_delays_do_not_block_the_submitter() -> None:
    backend = _faulty(FaultRule(delay_seconds=1000.0, times=2))
    completions = [start(backend, _READ, 0, aligned_bytes(ALIGNMENT)) for _ in range(2)]
    assert not any(completion.num_calls for completion in completions)
    backend.close(1.0)  # which waits for no delay
    for completion in completions:
        completion.require_whole(ALIGNMENT)


def test_hanging_requests_end_when_they_are_released() -> None:
    backend = _faulty(FaultRule(hangs=True, times=1))
    completion = start(backend, _READ, 0, aligned_bytes(ALIGNMENT))
    _one(backend, _READ)
    assert (backend.num_hung, completion.num_calls) == (1, 0)
    backend.release_hung()
    completion.require_whole(ALIGNMENT)
    assert backend.close(60.0)


def test_wrappers_show_what_is_inside() -> None:
    inner = MemoryBackend(16 * ALIGNMENT, 3)
    backend = BackendWrapper(FaultInjectingBackend(inner))
    for name in ("capacity_bytes", "block_bytes", "boundary_bytes", "concurrency", "is_direct", "num_bounced"):
        assert getattr(backend, name) == getattr(inner, name)
    assert backend.locate(5) == inner.locate(5)
    assert backend.describe() == f"BackendWrapper(FaultInjectingBackend({inner.describe()}))"
    assert backend.close(60.0)
