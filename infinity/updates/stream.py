"""The optimizer as a stream: read a chunk, update it, write it back, while the model computes.

[Note: workers] Several threads run the same loop: start the reads of the next chunks, take the first that no worker
has, update it. Reads are started, and chunks taken and retired, in the order of the jobs; only the computing runs in
parallel, each chunk on one thread. What a parameter keeps once (its step count) changes when the job's last chunk is
retired. So it does not matter which chunk is updated first, and any number of workers gives the same bits. When one
fails, the others end after their chunk, and the last to end raises the error in all who wait: until then a worker may
still write into a unit.

[Note: before the gradients] A step mostly updates what the step before has, in the same order. So before gradients
come, and while no job waits, records are read in that order. That is a guess and never more: whoever opens a chunk gets
what is stored, and a staging buffer if he waits for one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol

import torch

from infinity.device.compute import ComputeDevice, Fence
from infinity.errors import EngineClosedError
from infinity.metrics.timeline import Row, Timeline
from infinity.threads.denormals import flush_denormals
from infinity.threads.openmp import end_openmp_workers, use_threads
from infinity.tiers.state_store import Lease, StateStore
from infinity.tiers.weight_store import ReadThen, WeightStore
from infinity.units.layout import Chunk
from infinity.units.unit import Unit
from infinity.updates.chunk_updater import ChunkUpdater
from infinity.updates.job import ParameterState, UpdateJob, advance
from swapper import Bell, Handle
from swapper.sync.interrupts import POLL_SECONDS
from swapper.sync.limits import start_threads

# Chunks at a time that take working memory, where no staging buffers limit them: no more reads are started until one is
# retired. Each worker may have two, one of them on its way to the device.
_MOST_AHEAD = 32
# Chunks at a time with those that are updated in memory. Those take no buffer, so the stream looks past them and starts
# reads of later ones early. But the window cannot be overtaken: a larger one lets a job that somebody waits for wait
# longer.
_MOST_IN_WINDOW = 256


@dataclass
class _ChunkInHand:
    job: UpdateJob
    chunk: Chunk
    lease: Lease
    reads: list[Handle | ReadThen]
    is_last: bool
    """Whether it is the last of its job, which ends with it."""
    is_in_place: bool
    """Whether the update works on the model weight in the flat buffer."""
    is_taken: bool = False
    """Whether a worker has taken it."""
    writes: list[Handle] = field(default_factory=list)
    """Writes besides that of the record."""
    upload: Fence = None
    """After this point in the device's stream, the new weights are in the flat buffer."""
    is_done: bool = False
    """Whether it is updated. Its memory is free when its writes have ended."""


class Saver(Protocol):
    """Saves units while training goes on."""

    def wait_for(self, unit: Unit, timeout_seconds: float | None = None) -> bool:
        """Whether the unit is saved as it was, or is so in time."""


class _ExpectedUpdates:
    """The updates that a step is expected to make: those of the step before. Under `_order`, except for `are_due`.

    See [Note: before the gradients].
    """

    def __init__(self, records: StateStore) -> None:
        self._records = records
        self.are_due = False
        """Whether gradients are soon to come: set from any thread, and until `begin`."""
        self._updated: dict[Unit, Sequence[Chunk]] = {}
        """Chunks that were updated since the last `begin`, in order."""
        self.left: dict[Unit, deque[Chunk]] = {}
        """Chunks of the step before that have been neither updated nor read ahead since."""

    def on_update(self, unit: Unit, chunks: Sequence[Chunk]) -> None:
        """The update of these chunks begins."""
        self.left.pop(unit, None)
        self._updated[unit] = chunks

    def begin(self) -> None:
        """Expect the updates that began since the last call."""
        self.are_due = False
        if self._updated:  # else the step between was skipped, and what was expected for it still is
            self._records.drop_read_ahead()
            self.left = {unit: deque(chunks) for unit, chunks in self._updated.items()}
            self._updated = {}

    def read(self) -> None:
        """Read what is expected next, as far as there is room."""
        while self.left:
            unit, chunks = next(iter(self.left.items()))
            while chunks:
                # No staging buffer is free, or only the last three: go on when the next job or buffer comes.
                if not self._records.read_ahead(unit, chunks[0]):
                    return
                chunks.popleft()
            del self.left[unit]


@dataclass(eq=False, repr=False)
class UpdateStream:
    """Runs update jobs in order, reading ahead as far as working memory allows."""

    _records: StateStore
    """Where optimizer state rests."""
    _weights: WeightStore | None
    """Where model weights rest; None when they rest in the flat buffers themselves."""
    _updater: ChunkUpdater
    """Updates chunks."""
    _device: ComputeDevice
    """For copies to and from the device."""
    _states: Mapping[tuple[int, int], ParameterState]
    """(unit index, slot index) -> the parameter's scalars; the stream owns the values."""
    _timeline: Timeline | None = None
    """Where updates are recorded, if anywhere."""
    num_workers: InitVar[int] = 1
    """Threads, and so chunks that are updated at a time: see [Note: workers]."""

    def __post_init__(self, num_workers: int) -> None:
        self._is_apart = not self._device.uses_host_memory
        """Whether the device has memory of its own, and works while the host goes on."""
        self._fetches_coefficients = self._is_apart and not self._records.is_on_device
        self._pending: dict[UpdateJob, None] = {}
        """Jobs that have not ended, in the order of their submission. A dict changes in one step, also if
        interrupted."""
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        """Held by any thread while it changes or goes through `_pending`, and by workers for their numbers."""
        self._work, self._progress = Bell(), Bell()
        """Rung for workers, and for the training thread in `drain`."""
        self._is_stopping = False
        """From `stop` on, or from the first error on, for good."""
        self._first_error: BaseException | None = None
        """The error that made the workers end. Under `_lock`."""
        self._error: BaseException | None = None
        """The error that has stopped the stream, for good. The last worker sets it."""
        self._spans: deque[tuple[float, float]] = deque()
        """When a worker was updating, from and to, as far as it has not been counted."""
        self._busy_seconds, self._counted_until = 0.0, 0.0
        """The seconds of `busy_seconds` counted so far, and the end of the last span counted."""
        self._saver: Saver | None = None
        self._order = threading.Lock()
        """Held by the worker that starts, takes or retires chunks; nobody touches what follows without."""
        self._window: deque[_ChunkInHand] = deque()
        """Chunks in hand, each from the start of its reads until it and all before it are updated."""
        self._num_taking = 0
        """How many of these take working memory. The others are updated where they are stored."""
        self._next: tuple[UpdateJob, Chunk] | None = None
        """The next chunk, which waits for working memory."""
        self._coming: Iterator[tuple[UpdateJob, Chunk]] = iter(())
        """The chunks behind it, of the same job."""
        self._is_short = False
        """Whether there was no staging buffer for `_next`."""
        self._num_submitted, self._num_begun = 0, 0
        """Jobs so far, the first number under `_lock` and the second under `_order`. While they are equal, there is none to
        be taken."""
        self._expected = _ExpectedUpdates(self._records)
        # Records on the device need no staging buffers, so nothing is read ahead: two per worker, see `_update_all`.
        self._most_ahead = 2 * num_workers if self._records.is_on_device else max(_MOST_AHEAD, 2 * num_workers)
        self._num_running = num_workers
        """Workers that have not ended. Under `_lock`."""
        self._threads = [
            threading.Thread(target=self._run, name=f"infinity-update-{number}", daemon=True)
            for number in range(num_workers)
        ]
        start_threads(*self._threads, stop=self.stop)

    # ---------------------------------------------------------------------------------------------- training thread

    def submit(self, job: UpdateJob) -> None:
        """Queue a job."""
        # Before it is queued: from then on it may be released, which has to wake a worker.
        job.add_release_callback(self._work.ring)
        with self._lock:
            # A stream that has ended takes no job. Under the lock, or `_end` could miss one that is queued now.
            if self._error is not None:
                job.finish(self._error)
                raise self._error
            self._pending[job] = None
            self._num_submitted += 1
        self._work.ring()

    def expect_again(self) -> None:
        """Read the records that were updated since the last call, in that order, while no update waits."""
        if not self._records.is_on_device:
            self._expected.are_due = True
            self._work.ring()

    def has(self, job: UpdateJob) -> bool:
        """Whether the job is queued or running."""
        return job in self._pending

    def release_all(self) -> None:
        """Hold no job back any longer: nobody will come to ask for the units that are left."""
        for job in sorted(self._pending.copy(), key=lambda job: job.rank):  # by rank: a worker may take one at once
            job.release()

    def wait_for_saver(self, saver: Saver | None) -> None:
        """From now on, update a unit only after ``saver`` has saved it; None: at once."""
        self._saver = saver

    def drain(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Return when every job is done; raises the error of the first that failed. ``on_progress``: called in between."""
        # A held job waits for its unit to be needed. Whoever drains needs none, and would wait for ever.
        self.release_all()
        while self._pending and self._error is None:
            on_progress()
            self._progress.wait(POLL_SECONDS)  # looking up now and then, so that a KeyboardInterrupt gets through
        self.raise_error()

    def raise_error(self) -> None:
        """Raise what stopped the stream, if anything has."""
        if self._error is not None:
            raise self._error

    def pending(self) -> list[UpdateJob]:
        """Jobs that are queued or running."""
        with self._lock:
            return list(self._pending.copy())  # `copy` first: see `_take`

    def stop(self) -> None:
        """Have the workers end after the chunks in hand. Waits for nothing."""
        self._is_stopping = True
        self._work.ring()

    def close(self) -> None:
        """End the workers after the chunks in hand. Queued jobs are dropped: `drain` first if they matter."""
        self.stop()
        for thread in self._threads:
            thread.join()

    # --------------------------------------------------------------------------------------------------------- workers

    def _run(self) -> None:
        try:
            use_threads(1)  # see [Note: one pool] in infinity.threads.openmp
            with self._device.background_thread():
                self._update_all()
        except BaseException as error:
            with self._lock:
                self._first_error = self._first_error or error
            self._is_stopping = True
        with self._lock:
            self._num_running -= 1
            is_last = self._num_running == 0
        # Others may sleep: the ring passes from one worker that ends to the next.
        self._work.ring()
        if is_last:
            self._end()

    def _update_all(self) -> None:
        # Copies to a device are double-buffered: while the weights of `before` are on their way, this thread updates
        # the next chunk. So it holds two chunks at most, and waits for work only when it holds none.
        before: _ChunkInHand | None = None
        current: UpdateJob | None = None  # the job for which this thread's stream and settings are prepared
        while not self._is_stopping:
            item = self._next_item(waits=before is None)
            if item is not None:
                if item.job is not current:
                    self._prepare(item.job)
                self._update(item)
            current = None if item is None or item.is_last else item.job
            if before is not None:
                self._retire(before)
            before = item
            if before is not None and (before.upload is None or before.is_last):  # for the last somebody may be waiting
                self._retire(before)
                before = None

    def _next_item(self, *, waits: bool) -> _ChunkInHand | None:
        """The first chunk that no worker has taken. None: there is none and the caller does not wait, or the stream
        ends."""
        while not self._is_stopping:
            # One worker at a time starts reads and takes a chunk, so that both keep the order of the jobs.
            with self._order:
                self._fill()
                found = None
                for item in self._window:
                    if not item.is_taken and found is not None:
                        if len(self._threads) > 1:
                            self._work.ring()  # for the next worker
                        break
                    if not item.is_taken:
                        found, item.is_taken = item, True
            if found is not None:
                return found
            if not waits:
                return None
            # Rung by a new or released job, a free buffer, expected updates, a worker that saw another chunk, and
            # `stop`.
            self._work.wait()
        return None

    def _prepare(self, job: UpdateJob) -> None:
        """Prepare the calling thread for the job's chunks."""
        if job.after is not None:
            self._device.compute_waits_for(job.after)
        if job.flat_arrival is not None:
            job.await_flat(self._device)
        if job.after is not None:  # what another worker has waited for
            self._device.compute_waits_for(job.after)
        if job.clip_coefficient is not None and self._fetches_coefficients:
            job.fetch_coefficient(self._device)
        flush_denormals(job.flushes_denormals)

    def _update(self, item: _ChunkInHand) -> None:
        # The record, spilled gradients, and model weights, as far as each is not in memory.
        for read in item.reads:
            if not read.is_finished or read.failure is not None:  # as a rule it is over: that costs no call
                read.wait()
        begin = time.perf_counter()
        job, chunk, workspace = item.job, item.chunk, item.lease.workspace
        # In place, `workspace.weight` is the flat buffer itself: nothing is copied from it, or to it.
        flat = None if item.is_in_place or job.weights is None else job.weights[chunk.start : chunk.stop]
        # The unit is resident: its weights are copied from the flat buffer, not read from the drive.
        if job.flat_is_current and flat is not None and workspace.needs_weight:
            if self._is_apart:
                self._device.synchronize(self._device.download(workspace.weight, flat, job.after))
            else:
                workspace.weight.copy_(flat)
        # As many threads as the training thread has, for the bits of plain torch; afterwards the OpenMP workers of this
        # thread are ended, or they would compete with the model's.
        if self._updater.mixes_elements:  # bits of a norm depend on the number of threads
            use_threads(job.num_threads)
        self._updater.update(job, chunk, workspace)
        if self._updater.mixes_elements:
            end_openmp_workers()
        # The update wrote an fp32 main weight; the model weight is its cast. (With a remainder both were written.)
        if not workspace.needs_weight:
            workspace.cast_main()
        if flat is not None and self._is_apart:
            # Behind `after`: the model may still compute with the old weights there.
            item.upload = self._device.upload(flat, workspace.weight, job.after)
        elif flat is not None:
            flat.copy_(workspace.weight)
        # Persistent units have no extent for weights: their flat buffer is where they rest.
        if self._weights is not None and not job.unit.is_persistent:
            weight = workspace.weight
            written = self._weights.write_chunk(
                job.unit, chunk, weight if weight.is_cpu else self._in_host_memory(weight)
            )
            if written is not None:
                item.writes.append(written)
        end = time.perf_counter()
        self._spans.append((begin, end))
        if self._timeline is not None:
            self._timeline.add(Row.OPTIMIZER, f"update of {item.job.unit.name}", begin, end)

    @property
    def busy_seconds(self) -> float:
        """How long any worker was updating. For the training thread."""
        while self._spans:
            begin, end = self._spans.popleft()  # in the order of their ends, nearly: what overlaps counts once
            self._busy_seconds += max(0.0, end - max(begin, self._counted_until))
            self._counted_until = max(self._counted_until, end)
        return self._busy_seconds

    def _retire(self, item: _ChunkInHand) -> None:
        """Store an updated chunk, and finish its job if it was the last one."""
        if item.upload is not None:
            self._device.synchronize(item.upload)
        item.lease.write_back(item.writes, then=self._work.ring)
        with self._order:
            # In the order of the window: a chunk that is done waits for those before it. So a job ends once, with its
            # last.
            item.is_done = True
            while self._window and self._window[0].is_done:
                first = self._window.popleft()
                self._num_taking -= first.lease.takes_memory
                # The job's gradient memory is freed up to this chunk, while later ones are still in use.
                if first.is_last:
                    self._finish(first.job)
                elif first.job.gradients.on_release is not None:
                    first.job.gradients.on_used(first.chunk)

    def _fill(self) -> None:
        """Start the reads of the next chunks while there are staging buffers; the first one waits for a staging buffer.

        The caller holds `_order`.
        """
        # Example: 4 staging buffers, chunks of 2 jobs: a0 a1 a2 b0 b1. Reads of a0 a1 a2 b0 are started, and b1 waits
        # in `_next`. When a0 is written, its buffer is free, and a worker starts the read of b1.
        while not self._is_stopping:
            if self._expected.are_due:
                self._expected.begin()
            if self._next is None:
                self._next = next(self._coming, None)
                if self._next is None and self._num_begun < self._num_submitted:
                    self._next = self._take()
                if self._next is None:
                    if self._expected.left:
                        self._expected.read()
                    return
            # As a rule nothing has changed since the last look; where the window is empty, it waits.
            if self._is_short and self._window and not self._records.free_buffers:
                return
            job, chunk = self._next
            for item in self._window:
                if item.job.unit is job.unit and item.job is not job:
                    return  # an earlier update of this unit has not written yet: a read now would be stale
            if self._num_taking >= self._most_ahead or len(self._window) >= _MOST_IN_WINDOW:
                return
            # A save is under way, and this unit's states are to be saved as they are: the worker waits for that.
            saver = self._saver
            if saver is not None and not saver.wait_for(job.unit, 0 if self._window else POLL_SECONDS):
                if self._window:  # it may need the staging buffers that those hold
                    return
                continue
            gradients = job.gradients
            weight = self._weight_in_place(job, chunk) if job.unit.is_persistent else None
            lease = self._records.open(
                job.unit,
                chunk,
                # With an empty window no worker holds a buffer, so waiting blocks nobody. Otherwise a worker must not
                # wait here, because buffers become free only when chunks in the window are retired.
                is_blocking=not self._window,
                weight=weight,
                needs_scratch=gradients.needs_scratch or gradients.dtype not in self._updater.used_as_they_are,
            )
            self._is_short = lease is None
            if lease is None:
                return
            self._next = None
            reads: list[Handle | ReadThen] = [] if lease.read is None else [lease.read]
            item = _ChunkInHand(job, chunk, lease, reads, chunk is job.chunks[-1], is_in_place=weight is not None)
            self._window.append(item)
            self._num_taking += lease.takes_memory
            if gradients.needs_scratch:
                handle = gradients.prepare(chunk, lease.workspace.landing(gradients.dtype))
                if handle is not None:
                    item.reads.append(handle)
            # The update computes with the model weight (fp32, or with a remainder): it is read, if no buffer has it.
            if not job.flat_is_current and self._weights is not None and lease.workspace.needs_weight:
                read = self._weights.read_chunk(job.unit, chunk, lease.workspace.weight)
                if read is not None:
                    item.reads.append(read)

    def _weight_in_place(self, job: UpdateJob, chunk: Chunk) -> torch.Tensor | None:
        """The chunk's model weights in the flat buffer, if the update may work on them there."""
        # Gradients that land before they are widened land where the model weights of the workspace are.
        is_taken = job.gradients.needs_scratch and job.gradients.dtype not in self._updater.used_as_they_are
        if is_taken or (self._is_apart and not self._records.is_on_device):
            return None
        return None if job.weights is None else job.weights[chunk.start : chunk.stop]

    def _take(self) -> tuple[UpdateJob, Chunk] | None:
        """Begin the next job, and return its first chunk."""
        while True:
            # A copy first: when a tuple is made, garbage may be collected, and other threads come in between.
            pending = tuple(self._pending.copy())
            first: UpdateJob | None = None
            for job in pending * 2:  # `release_all` may go on, and releases a lower rank before a higher one
                if not job.has_begun and not job.is_held and (first is None or job.rank < first.rank):
                    first = job
            if first is None:
                return None
            if tuple(self._pending.copy()) != pending:
                continue  # others came meanwhile, and may go before this one: it was released with them, or after
            for job in pending:
                if not job.has_begun and job.unit is first.unit:  # updates of one unit keep their order
                    break
            job.begin()
            self._num_begun += 1
            self._expected.on_update(job.unit, job.chunks)
            if not job.chunks:
                self._finish(job)
                continue
            self._coming = zip(itertools.repeat(job), job.chunks, strict=False)
            return next(self._coming)

    def _in_host_memory(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy of a model weight that is on a GPU, as its record is: a write to the drive needs it in host memory."""
        copied = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
        self._device.synchronize(self._device.download(copied, weight, self._device.mark()))
        return copied

    def _finish(self, job: UpdateJob) -> None:
        if len(job.advanced) < len(job.slots):
            self._updater.update_empty(job)
        # Before `finish`: the training thread reads step counts as soon as a job is finished.
        advance(self._states, job)
        if self._is_apart:
            self._device.synchronize(self._device.mark())  # what ran on the device still read the gradients
        job.gradients.release()
        job.finish(None)
        # After `finish`: `drain` returns when nothing is pending. Before, it can only help jobs that have not begun.
        del self._pending[job]
        if not self._pending or self._num_begun < self._num_submitted:
            self._progress.ring()

    def _end(self) -> None:
        """No worker is left: raise the error in all who wait for a job, or submit one."""
        with self._lock:
            if self._first_error is None and self._pending:
                self._first_error = EngineClosedError.after_close("an update that was still pending")
            self._error = self._first_error
            jobs = list(self._pending.copy()) if self._error is not None else []
        # Their leases hold staging buffers and views of flat buffers, and those have to become free.
        for item in self._window:
            if not item.is_done:
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    self._device.synchronize(item.upload)
                    item.lease.discard()
        for job in jobs:
            job.gradients.release()
            job.finish(self._error)
        self._progress.ring()
