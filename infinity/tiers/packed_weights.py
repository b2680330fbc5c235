"""How the packed weights of a unit come into its flat buffer.

Knows stored forms and where they rest; must not know when anything is needed.

In host memory, packed bytes are read into the end of the flat buffer and unpacked there by a thread of the engine's own, in the
order in which reads end: while a drive brings the next unit, and while the model computes. On a device that has a memory of its
own, the packed bytes are uploaded, and unpacked in the compute stream when the unit is needed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from infinity.device.compute import ComputeDevice
from infinity.units.unit import Arrival
from swapper import Handle, Latch, Priority
from swapper.sync.limits import start_threads


class _Unpacking:
    """One unit whose packed weights are read and unpacked in host memory."""

    def __init__(self, reads: Sequence[Handle], unpack: Callable[[], None]) -> None:
        self.reads: Sequence[Handle] = reads
        self._unpack: Callable[[], None] | None = unpack
        self._error: BaseException | None = None
        self._is_over = Latch()

    def run(self) -> None:
        """In the thread that unpacks."""
        error: BaseException | None = None
        try:
            for read in self.reads:
                read.wait()
            if self._unpack is not None:
                self._unpack()
        except BaseException as problem:
            error = problem
        self.finish(error)

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        # Views of the buffer, which may be given back as soon as somebody hears of it.
        self.reads, self._unpack = (), None
        self._is_over.set()

    def wait(self) -> None:
        for read in self.reads:
            read.wait()  # which says so if the drive hangs
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._is_over.is_set()

    def promote(self) -> None:
        for read in self.reads:
            read.promote(Priority.DEMAND)


class Unpacker:
    """Unpacks in host memory, in one thread of its own, which begins with the first unit."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self._ready: queue.SimpleQueue[_Unpacking | None] = queue.SimpleQueue()
        """Whose reads have ended, or failed."""
        self._begun: set[_Unpacking] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, reads: Sequence[Handle], unpack: Callable[[], None]) -> Arrival:
        """Call ``unpack`` when these reads have ended; it must hold all views of the unit's memory that are needed."""
        if self._is_closed:
            raise RuntimeError("the unpacker is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-unpack", daemon=True)
            start_threads(self._thread)
        unpacking = _Unpacking(reads, unpack)
        self._begun.add(unpacking)
        left = _Countdown(len(reads), lambda: self._ready.put(unpacking))
        for read in reads:
            read.add_done_callback(left.count)
        return unpacking

    def close(self) -> None:
        """End the thread, after what has been read by now."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ready.put(None)
            thread.join()
        for unpacking in tuple(self._begun):
            unpacking.finish(RuntimeError("the unpacker is closed"))

    def _run(self) -> None:
        with self._device.background():
            while (unpacking := self._ready.get()) is not None:
                self._begun.discard(unpacking)
                unpacking.run()
                del unpacking


class _Countdown:
    """Calls a function when it has been counted so many times, at once if that is none."""

    def __init__(self, count: int, function: Callable[[], object]) -> None:
        self._left = [None] * (count - 1)
        self._function = function
        if not count:
            function()

    def count(self, handle: Handle) -> None:
        try:
            self._left.pop()  # one operation, whichever threads count
        except IndexError:
            self._function()


class UploadedUnpacking:
    """Packed weights that are on their way to a device, and are unpacked there by the thread that waits for them first."""

    def __init__(self, upload: Arrival, unpack: Callable[[], None]) -> None:
        self._upload = upload
        self._unpack: Callable[[], None] | None = unpack

    def wait(self) -> None:
        self._upload.wait()
        unpack, self._unpack = self._unpack, None
        if unpack is not None:
            unpack()

    def done(self) -> bool:
        return self._upload.done()

    def promote(self) -> None:
        self._upload.promote()


def scratch_for(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory of the device for packed bytes: it goes back to the allocator of the calling thread's stream."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
