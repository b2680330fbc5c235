"""Fetches packed weights and unpacks them into the flat buffer.

Without a GPU, packed bytes are read into the end of the flat buffer. A thread of the engine unpacks them there, in the
order in which reads end, while a drive reads the next unit and the model computes. For a GPU the packed bytes are
uploaded, and unpacked in the compute stream when the unit is needed.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence

from infinity.device.compute import ComputeDevice
from infinity.units.unit import Arrival, LatchedArrival
from swapper import Handle, Priority
from swapper.sync.limits import start_threads


class _Unpacking(LatchedArrival):
    """One unit whose packed weights are read and unpacked in host memory: an `Arrival`."""

    def __init__(self, reads: Sequence[Handle], unpack: Callable[[], None]) -> None:
        super().__init__()
        self.reads: Sequence[Handle] = reads
        self._unpack: Callable[[], None] | None = unpack

    def run(self) -> None:
        """Unpack. Runs on the unpacking thread, when all reads have ended."""
        error: BaseException | None = None
        try:
            for read in self.reads:
                read.wait()  # returns at once; raises what went wrong with the read
            if self._unpack is not None:
                self._unpack()
        except BaseException as problem:
            error = problem
        self.finish(error)

    def finish(self, error: BaseException | None) -> None:
        # They hold views of the flat buffer. Dropped before the latch is set: a waiter may evict the unit at once,
        # which would fail while a view is alive.
        self.reads, self._unpack = (), None
        super().finish(error)

    def wait(self) -> None:
        for read in self.reads:
            read.wait()  # not only the latch: this wait raises an error if the drive hangs
        super().wait()

    def promote(self) -> None:
        for read in self.reads:
            read.promote(Priority.DEMAND)


class Unpacker:
    """Unpacks in host memory, in one thread of its own, which starts with the first unit."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self._ready: queue.SimpleQueue[_Unpacking | None] = queue.SimpleQueue()
        """Units whose reads have ended or failed; None ends the thread."""
        # No limit is needed: each entry has a flat buffer of the pool, and that is limited.
        self._begun: set[_Unpacking] = set()
        """Units whose reads have begun, until the thread takes them from the queue. Touched by both threads, by single
        operations of a set."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, reads: Sequence[Handle], unpack: Callable[[], None]) -> Arrival:
        """Call ``unpack`` on the thread when all ``reads`` have ended. It must hold all views of memory that it
        needs."""
        if self._is_closed:
            raise RuntimeError("the unpacker is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-unpack", daemon=True)
            start_threads(self._thread)
        unpacking = _Unpacking(reads, unpack)
        self._begun.add(unpacking)
        # The thread gets a unit only when its reads have ended. So a slow read holds up no unit that was read after it.
        self._put_when_read(unpacking)
        return unpacking

    def _put_when_read(self, unpacking: _Unpacking, _: Handle | None = None) -> None:
        for read in unpacking.reads:
            if not read.is_finished:
                read.add_done_callback(functools.partial(self._put_when_read, unpacking))
                return
        self._ready.put(unpacking)

    def close(self) -> None:
        """End the thread when it has unpacked all units that have been read."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ready.put(None)
            thread.join()
        # Units whose reads never ended: nobody may wait for them for ever.
        for unpacking in tuple(self._begun):
            unpacking.finish(RuntimeError("the unpacker is closed"))

    def _run(self) -> None:
        with self._device.background_thread():
            while (unpacking := self._ready.get()) is not None:
                self._begun.discard(unpacking)
                unpacking.run()
                del unpacking  # the thread waits in `get` next, and would hold the unit until then
