"""The one thread that submits to a ring and reaps from it, and the memory that is registered with the kernel.

[Note: sleeping and waking]
An idle thread sleeps in the kernel until a transfer completes, or until another thread writes to an eventfd that the
ring polls. Before it sleeps, it sets ``_is_asleep`` and then looks for work once more. A submitting thread first queues
its work and then reads ``_is_asleep``. So at least one of both notices the other.

Each sleep has a number (``_nap``). A thread that has written to the eventfd stores that number in ``_woken_nap``, so
that others need not write again. Only the ring's thread clears ``_is_asleep``. If a submitting thread cleared it and
were delayed or interrupted before its write, the next one would not write, and nobody would wake the ring.

In a busy period no thread wakes another: the next requests come from completions of earlier ones, on this thread. One
system call submits them all and waits for the next completion.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from swapper.backend import IORequest, ended
from swapper.backends.uring.ring import Ring, library, needed
from swapper.memory.region import AlignedRegion
from swapper.sync.callbacks import fulfil
from swapper.sync.lifetimes import EXIT_SECONDS, LiveObjects
from swapper.sync.limits import join_all, start_threads
from swapper.uncopyable import Uncopyable

logger = logging.getLogger(__name__)

_WAKE = 0  # the token of the poll; those of transfers count from 1
_BACK_OFF_SECONDS = 0.001  # before another try when the kernel is short of memory
_BURST = 4  # completions between two submissions: fewer cost more system calls, more let the drive's queue run empty
_COMMAND_SECONDS = 60.0  # to pin a region, the kernel faults in each of its pages: long for a large one
# A region of 10 GiB takes 10 slots. Without a free one, register_memory() logs it, and transfers work unregistered.
_NUM_SLOTS = 256
_MAX_SLOT_BYTES = 1 << 30  # the kernel's limit on one registered buffer
_LATER = frozenset({errno.EAGAIN, errno.EBUSY})  # short of memory, or of room for completions: see Ring.submit

_Result = TypeVar("_Result")

# As for worker threads: no thread may be inside native code when the interpreter is finalized.
_open_loops: LiveObjects[RingLoop] = LiveObjects(
    at_exit=lambda loop: loop.close(EXIT_SECONDS), in_child=lambda loop: loop.disown()
)
_abandoned: list[RingLoop] = []  # the kernel may still write into the memory of their requests


@dataclass
class _RingQueue:
    """The transfers of one direction. Slow ones of the other direction cannot take its places in the ring."""

    limit: int
    waiting: deque[tuple[IORequest, int, int]] = field(default_factory=deque)  # request, file, offset in it
    num_inflight: int = 0

    @property
    def is_ready(self) -> bool:
        return bool(self.waiting) and self.num_inflight < self.limit


class MemorySlots:
    """The table of registered memory. Only the ring's thread uses it.

    Args:
        ring: Whose memory it is.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._are_made = False
        self._free = list(range(_NUM_SLOTS - 1, -1, -1))  # a stack: slot 0 is used first
        self._ranges: list[tuple[int, int, int]] = []  # start, end and slot, in order of addresses
        # By slot: an array that keeps the memory mapped. A new mapping at the same address would have other pages than
        # those that the kernel has pinned, and transfers would miss it.
        self._arrays: dict[int, npt.NDArray[np.uint8]] = {}

    def find(self, address: int, num_bytes: int) -> int:
        """Return the slot that holds all of these bytes, or -1."""
        ranges = self._ranges
        if ranges:
            # The last range that begins at `address` or before; maxsize sorts behind each end.
            index = bisect.bisect_right(ranges, (address, sys.maxsize, 0)) - 1
            if index >= 0 and address + num_bytes <= ranges[index][1]:
                return ranges[index][2]
        return -1

    def add(self, region: AlignedRegion) -> list[int]:
        """Register a region and return its slots.

        Raises:
            OSError: It cannot be registered; then nothing of it is.
        """
        if not self._are_made:  # the kernel makes the table once for a ring
            self._ring.make_slots(_NUM_SLOTS)
            self._are_made = True
        array, slots = region.array(), list[int]()
        address = region.address
        stop = address + array.size
        try:
            while address < stop:
                if not self._free:
                    raise OSError(None, f"all {_NUM_SLOTS} places for registered memory are taken")
                num_bytes = min(_MAX_SLOT_BYTES, stop - address)
                self._ring.fill_slot(self._free[-1], address, num_bytes)
                slot = self._free.pop()  # only now: fill_slot may have raised
                slots.append(slot)
                self._arrays[slot] = array
                self._ranges = sorted([*self._ranges, (address, address + num_bytes, slot)])
                address += num_bytes
        except OSError:
            self.remove(slots)
            raise
        return slots

    def remove(self, slots: list[int]) -> None:
        """Release what these slots hold. The kernel keeps pages pinned for transfers that use them now."""
        for slot in slots:
            self._ranges = [held for held in self._ranges if held[2] != slot]
            self._ring.fill_slot(slot, 0, 0)
            self._free.append(slot)
            del self._arrays[slot]

    def clear(self) -> None:
        """Release all memory, once the ring is gone."""
        self._ranges = []
        self._arrays.clear()


class RingLoop(Uncopyable):
    """A ring, its thread, and the transfers in flight. The thread keeps it alive until `stop`.

    Args:
        fds: The files. The kernel holds them open until the loop has ended.
        limit: Number of transfers of each direction in flight at once; others wait.

    Raises:
        BackendUnavailableError: The system does not allow io_uring.
    """

    def __init__(self, fds: Sequence[int], limit: int) -> None:
        self._queues = (_RingQueue(limit), _RingQueue(limit))  # reads and writes: indexed by Direction
        # By direction: take a request, its file and the offset there in a single step; call `on_put` then.
        self.puts = tuple(queue.waiting.append for queue in self._queues)
        self._inflight: dict[int, IORequest] = {}  # by token; keeps the memory that the kernel uses
        self._tokens = itertools.count(_WAKE + 1)
        self._commands: deque[tuple[Future[Any], Callable[[MemorySlots], Any]]] = deque()
        self._is_asleep = False  # these three: see [Note: sleeping and waking]
        self._nap = 0
        self._woken_nap = 0
        self._is_polling = False  # a poll of the eventfd is in the ring; it fires once and is then prepared again
        self.is_stopping = False
        self._is_over = False
        self._pid = os.getpid()
        self._ring: Ring | None = None  # made on its thread: with SINGLE_ISSUER no other may submit
        self._wake_lock = threading.RLock()  # guards _wake_fd; re-entrant, since a finalizer may call stop()
        library()  # raises without the wheel: only Linux has it, and an eventfd
        with needed("no eventfd can be made"):
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        is_set_up: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, args=(list(fds), is_set_up), name="swapper-ring", daemon=True)
        try:
            start_threads(self.thread)
            is_set_up.result()
        except BaseException:
            self.stop()
            if not self.thread.is_alive():
                self._close_wake_fd()
            raise
        finally:
            del is_set_up  # it holds the error, whose traceback holds this frame
        _open_loops.add(self)

    # -- on any thread -----------------------------------------------------------------------------------------------

    def on_put(self) -> None:
        """Have the thread notice what one of `puts` has got."""
        if self._is_asleep:
            self._wake()
        if self._is_over:  # the thread ended after the first look: its _refuse() may have come before the append
            self._refuse()

    def call(self, function: Callable[[MemorySlots], _Result]) -> _Result:
        """Have the ring's thread do something with the registered memory, and return what it returns.

        Raises:
            OSError: The function's own error, or the loop has ended.
        """
        future: Future[_Result] = Future()
        self._commands.append((future, function))
        if threading.current_thread() is self.thread:  # a completion callback: waiting for itself would never end
            self._run_commands()
        if self._is_over:
            self._refuse()
        else:
            self._wake()
        try:
            return future.result(_COMMAND_SECONDS)
        except TimeoutError as error:
            raise OSError(errno.ETIMEDOUT, "the ring's thread does not answer") from error

    def stop(self) -> None:
        """Have the thread end after everything it was asked for."""
        if os.getpid() == self._pid and not self.is_stopping:
            self.is_stopping = True
            self._wake()

    def close(self, timeout_seconds: float) -> bool:
        """Stop the thread and wait for it; return whether it has ended and nothing is in flight."""
        self.stop()
        _open_loops.discard(self)
        join_all([self.thread], timeout_seconds)
        return not self.thread.is_alive() and not self._inflight

    def disown(self) -> None:
        """In a forked child: use nothing of this any more; the parent's thread goes on there."""
        self.is_stopping = self._is_over = True
        self._is_asleep = False  # nobody may write to the eventfd, which is the parent's too
        self._inflight.clear()
        if self._ring is not None:
            self._ring.disown()
        with contextlib.suppress(OSError):
            os.close(self._wake_fd)
        self._wake_fd = -1

    def _wake(self) -> None:
        nap = self._nap
        if self._woken_nap != nap or not self._is_asleep:
            with self._wake_lock:
                if self._wake_fd >= 0:
                    os.eventfd_write(self._wake_fd, 1)
            self._woken_nap = nap

    def _close_wake_fd(self) -> None:
        # Under the lock: the kernel may give the number to another file, and _wake() would write into that.
        with self._wake_lock:
            fd, self._wake_fd = self._wake_fd, -1
            if fd >= 0:
                os.close(fd)

    def _refuse(self) -> None:
        """Complete commands and requests that came too late, with an error."""
        with contextlib.suppress(IndexError):  # several threads may be here at once: popleft decides who gets which
            while True:
                future, _ = self._commands.popleft()
                future.set_exception(_ended())
        for queue in self._queues:
            with contextlib.suppress(IndexError):
                while True:
                    request, _, _ = queue.waiting.popleft()
                    request.complete(0, _ended())

    # -- on the ring's thread ----------------------------------------------------------------------------------------

    def _run(self, fds: Sequence[int], is_set_up: Future[None]) -> None:
        try:
            ring = self._ring = Ring(sum(queue.limit for queue in self._queues) + 1, fds)  # one more for the poll
        except BaseException as error:
            self._is_over = True
            self._close_wake_fd()
            is_set_up.set_exception(error.with_traceback(None))
            return
        self._slots = MemorySlots(ring)
        is_set_up.set_result(None)
        del is_set_up
        try:
            self._serve(ring)
        except Exception:
            logger.exception("the ring's thread failed; what is in flight gets no answer")
        finally:
            self._is_over = True
            self._ring = None
            if self._inflight:  # the loop failed: closing the ring would not stop the kernel's writes
                _abandoned.append(self)
            else:
                ring.close()
                self._slots.clear()
            self._close_wake_fd()
            self._refuse()

    def _serve(self, ring: Ring) -> None:
        """See [Note: sleeping and waking]."""
        while True:
            self._run_commands()
            self._prepare(ring)
            is_stopping = self.is_stopping  # read once: a stop() from here on makes has_work true below
            if is_stopping and not self._inflight and not any(queue.waiting for queue in self._queues):
                return
            self._nap += 1
            self._is_asleep = True  # before the look below; submit() does both in the opposite order
            has_work = bool(self._commands) or any(queue.is_ready for queue in self._queues)
            has_work = has_work or self.is_stopping is not is_stopping
            self._submit(ring, num_awaited=0 if has_work else 1)
            self._is_asleep = False
            self._finish(ring)

    def _run_commands(self) -> None:
        while self._commands:
            future, function = self._commands.popleft()
            fulfil(future, function, self._slots)
            del future, function

    def _prepare(self, ring: Ring) -> None:
        """Put into the submission queue what waits and has room."""
        if not self._is_polling:
            self._is_polling = ring.prepare_poll(self._wake_fd, _WAKE)
        for direction, queue in enumerate(self._queues):
            while queue.is_ready:
                request, file, offset = queue.waiting[0]
                token, num_bytes = next(self._tokens), len(request.memory)
                slot = self._slots.find(request.address, num_bytes)
                if not ring.prepare(direction, file, request.address, num_bytes, offset, token, slot):
                    return  # the queue is full; the next submission makes room
                self._inflight[token] = request
                queue.num_inflight += 1
                queue.waiting.popleft()

    def _submit(self, ring: Ring, num_awaited: int) -> None:
        try:
            ring.submit(num_awaited)
        except OSError as error:
            if error.errno not in _LATER:
                raise
            time.sleep(_BACK_OFF_SECONDS)

    def _finish(self, ring: Ring) -> None:
        """Complete what the kernel has completed; callbacks may submit the next requests."""
        for index, (token, result) in enumerate(ring.reap(), 1):
            if token == _WAKE:
                self._is_polling = False
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                continue
            request = self._inflight.pop(token)
            self._queues[request.direction].num_inflight -= 1
            request.complete(max(0, result), OSError(-result, os.strerror(-result)) if result < 0 else None)
            if index % _BURST == 0:  # the drive must not idle while a long list of completions is gone through
                self._prepare(ring)
                self._submit(ring, num_awaited=0)


def _ended() -> OSError:
    return ended("the ring's thread has")
