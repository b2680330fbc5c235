"""Errors of writes that nobody waits for."""

from __future__ import annotations

import errno
import time

import numpy as np
import pytest

from swapper import ALIGNMENT, Extent, Priority, Swapper, SwapperConfig, TransferError
from swapper.backend import Direction
from swapper.backends.memory import MemoryBackend
from swapper.scheduling.operation import Operation
from swapper.wrappers.faults import FaultInjectingBackend, FaultRule


def test_several_errors_come_one_by_one_in_order() -> None:
    backend = FaultInjectingBackend(MemoryBackend(16 * ALIGNMENT))
    names = [f"extent {index}" for index in range(3)]
    with Swapper(backend, SwapperConfig(deadline_seconds=20.0)) as swapper:
        extents = [swapper.allocate(ALIGNMENT, name) for name in names]
        backend.add(FaultRule(errno=errno.EIO))
        for extent in extents:
            _start_quietly(swapper, extent)
        for name in names:
            with pytest.raises(TransferError, match=name):
                swapper.raise_pending()
        swapper.raise_pending()


def _start_quietly(swapper: Swapper, extent: Extent) -> None:
    """Straight to the scheduler's queue: a public call would raise the error of the one before."""
    memory = np.ones(ALIGNMENT, dtype=np.uint8)
    operation = Operation(Direction.WRITE, extent, 0, memory, Priority.WRITE_BACK, ALIGNMENT)
    swapper._scheduler.submit(operation)
    while not operation.is_finished:
        time.sleep(0.001)
