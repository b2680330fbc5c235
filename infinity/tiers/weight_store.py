"""Stores model weights in host memory or on drives, and fetches them into flat buffers.

    stored on      compute on   way of a fetch
    drives         CPU          read straight into the flat buffer
    drives         GPU          read into pinned staging buffers, copied from there (`Uploader`)
    host memory    GPU          one copy from the pinned block (`HostWeights`)
    host memory    CPU          only packed weights: unpacked from the block into the flat buffer (`Unpacker`)
    GPU memory     GPU          only packed weights: unpacked when the unit is needed. The unit's others rest elsewhere

Without a GPU, packed bytes are read into the end of the flat buffer. A thread of the engine unpacks them there, in the
order in which reads end, while a drive reads the next unit and the model computes. For a GPU the packed bytes are
uploaded, and unpacked in the compute stream when the unit is needed.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.device.compute import ComputeDevice, Fence
from infinity.packed.stored_form import PackedSlot, StoredForm
from infinity.tiers.extent_labels import weight_contents
from infinity.tiers.host_block import HostBlock
from infinity.tiers.user_copies import PutAside
from infinity.units.layout import Chunk
from infinity.units.unit import Arrival, LatchedArrival, SimpleArrival, Unit
from swapper import Extent, Handle, NameOf, Priority, StagingBuffer, StagingPool, Swapper
from swapper.sync.limits import start_threads


class ReadThen:
    """A read, and what has to be done with the data when it has ended: the first `wait` does that."""

    # As attributes of a `Handle`: it is not over without `wait`.
    is_finished = False
    failure = None

    def __init__(self, read: Arrival, then: Callable[[], object]) -> None:
        self._read = read
        self._then: Callable[[], object] | None = then

    def wait(self) -> None:
        self._read.wait()
        # Only now, by the waiting thread: its stream is the one that computes with the data, so no further wait is
        # needed.
        then, self._then = self._then, None
        if then is not None:
            then()

    def done(self) -> bool:
        return self._read.done()

    def promote(self) -> None:
        self._read.promote()


class HostWeights(HostBlock):
    """One unit's weights in host memory, with the layout of its flat buffer or of its stored form."""

    def __init__(self, num_bytes: int, device: ComputeDevice) -> None:
        super().__init__(num_bytes, device.pin)
        self._device = device
        # Of the last copy out of this memory. One is enough: copies run in the order of one stream, so earlier ones are
        # done before it.
        self._fence: Fence = None

    def fetch(self, target: torch.Tensor) -> Arrival:
        """Start the copy into ``target``, a flat buffer. Only the compute stream waits for it, not the thread."""
        # After `mark`: kernels that were launched before may still read what the flat buffer held.
        self._fence = self._device.upload(target, self.tensor, self._device.mark())
        return SimpleArrival(functools.partial(self._device.compute_waits_for, self._fence))

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Copy the bytes from ``offset`` on into ``target``."""
        target.copy_(self.tensor[offset : offset + target.nbytes].view(target.dtype))

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Replace bytes from ``offset`` on by those of ``source`` (host memory), after waiting for a copy that reads
        them."""
        self._device.synchronize(self._fence)
        raw = source.view(torch.uint8)
        self.tensor[offset : offset + raw.numel()].copy_(raw)

    def release(self) -> None:
        """Release the memory, after waiting for a copy that reads it."""
        self._device.synchronize(self._fence)
        super().release()


class WeightStore:
    """Stores the weights of all units that are not persistent, with the bytes of their flat buffers."""

    def __init__(self, swapper: Swapper | None, device: ComputeDevice, staging_pool: StagingPool | None = None) -> None:
        """
        Args:
            swapper: for weights on NVMe; None if there are none.
            device: the compute device.
            staging_pool: pinned buffers between drives and a GPU; None without that way.
        """
        self._swapper = swapper
        self._swapper_of: dict[int, Swapper] = {}
        """Unit index -> what its extent belongs to."""
        self._device = device
        self._uploader = None if staging_pool is None else Uploader(device, staging_pool)
        self._in_host_memory: dict[int, HostWeights] = {}
        self._packed: dict[int, StoredForm] = {}
        """Unit index -> its stored form, for units with packed weights."""
        self._codes: dict[int, torch.Tensor] = {}
        """Unit index -> its packed weights (uint8), for units of which they rest in GPU memory."""
        self._unpacker = Unpacker(device)
        self._scratch: dict[int, torch.Tensor] = {}
        """Unit index -> device memory for its packed bytes, from the start of an upload until they are unpacked."""
        # Held here and not by the arrival alone: a unit may be evicted, and its arrival dropped, while the copy still
        # runs.

    def allocate(self, unit: Unit, *, in_host_memory: bool = False, keeps_codes: bool = False) -> None:
        """Allocate space for the weights of ``unit``.

        Args:
            unit: of the model.
            in_host_memory: whether they rest there, and not on drives.
            keeps_codes: whether its packed weights rest in GPU memory.
        """
        if unit.is_persistent:
            return  # its flat buffer is the place
        form = StoredForm(unit.layout)
        num_bytes = form.num_bytes
        if form.slots:
            self._packed[unit.index] = form
        if keeps_codes:
            num_bytes = form.raw_bytes
            device = self._device.torch_device
            self._codes[unit.index] = torch.empty(form.packed_bytes, dtype=torch.uint8, device=device)
        if in_host_memory and num_bytes:
            self._in_host_memory[unit.index] = HostWeights(num_bytes, self._device)
        elif not in_host_memory:
            name_of = weight_contents(unit.layout, form)
            self._allocate(unit, self._swapper, num_bytes, f"weights of {unit.name}", name_of)

    def _allocate(self, unit: Unit, swapper: Swapper | None, num_bytes: int, name: str, name_of: NameOf) -> None:
        if swapper is None:
            raise RuntimeError(f"there is nowhere for the weights of {unit.name}")
        self._swapper_of[unit.index] = swapper
        unit.extent = swapper.allocate(num_bytes, name, name_of=name_of) if num_bytes else None

    def fetch(self, unit: Unit, *, is_demand: bool) -> Arrival:
        """Start to fetch the unit's weights into ``unit.flat``. Waits for nothing."""
        if unit.index in self._packed:
            return self._fetch_packed(unit, self._packed[unit.index], is_demand=is_demand)
        return self._fetch_stored(unit, unit.memory, is_demand=is_demand)

    def _fetch_stored(self, unit: Unit, target: torch.Tensor, *, is_demand: bool) -> Arrival:
        """Start to bring the bytes of the unit as they are stored."""
        if unit.index in self._in_host_memory:
            return self._in_host_memory[unit.index].fetch(target)
        if self._uploader is not None:
            read = functools.partial(self._read, unit)
            return self._uploader.fetch(f"weights of {unit.name}", target, read, is_demand=is_demand)
        return self._read(unit, target, 0, is_demand=is_demand)

    def _fetch_packed(self, unit: Unit, form: StoredForm, *, is_demand: bool) -> Arrival:
        block, memory = self._in_host_memory.get(unit.index), unit.memory
        if unit.index in self._codes:
            codes = self._codes[unit.index].to(memory.device)  # while the engine sleeps, they are elsewhere
            plain = memory[: form.raw_bytes]
            read = (
                self._fetch_stored(unit, plain, is_demand=is_demand) if plain.numel() else SimpleArrival(lambda: None)
            )
            return ReadThen(read, functools.partial(form.unpack, codes, memory))
        if not self._device.uses_host_memory:
            # From torch's caching allocator, on the calling thread's stream.
            stored = torch.empty(form.num_bytes, dtype=torch.uint8, device=memory.device)
            self._scratch[unit.index] = stored

            def unpack() -> None:
                _unpack_apart(form, stored, memory)
                self._scratch.pop(unit.index, None)

            return ReadThen(self._fetch_stored(unit, stored, is_demand=is_demand), unpack)
        if block is not None:
            return self._unpacker.begin((), functools.partial(_unpack_apart, form, block.tensor, memory))
        # Two reads into one flat buffer: plain weights to its beginning, where they belong, and packed ones to its end.
        # Unpacking goes from front to back and overwrites packed bytes only after they have been used.
        packed, reads = form.landing(memory), []
        for start, target in ((0, memory[: form.raw_bytes]), (form.raw_bytes, packed)):
            if target.numel():
                reads.append(self._read(unit, target, start, is_demand=is_demand))
        return self._unpacker.begin(reads, functools.partial(form.unpack, packed, memory))

    def _read(self, unit: Unit, target: torch.Tensor, offset: int, *, is_demand: bool = False) -> Handle:
        """Start to read bytes of the unit's extent, from ``offset`` on, into host memory."""
        raw = target.view(torch.uint8).numpy()  # as the swapper takes it with the fewest steps
        priority = Priority.DEMAND if is_demand else Priority.PREFETCH
        return self._swapper_of[unit.index].read(extent_of(unit), raw, offset=offset, priority=priority)

    def _write(self, unit: Unit, source: torch.Tensor, offset: int) -> Handle | None:
        """Start to write to where the unit is stored, from ``offset`` on. Returns None if it was copied at once."""
        if unit.index in self._in_host_memory:
            self._in_host_memory[unit.index].write(offset, source)
            return None
        return self._swapper_of[unit.index].write(extent_of(unit), source.view(torch.uint8).numpy(), offset=offset)

    def read_packed(self, unit: Unit, packed: PackedSlot, target: torch.Tensor) -> None:
        """Read one packed weight, still packed, into host memory (uint8). Returns when it has been read."""
        start = self._packed[unit.index].raw_bytes + packed.start
        if unit.index in self._codes:
            target.copy_(packed.of(self._codes[unit.index]))
        elif unit.index in self._in_host_memory:
            self._in_host_memory[unit.index].read(start, target)
        else:
            self._read(unit, target, start, is_demand=True).wait()

    def write_packed(self, unit: Unit, start: int, source: torch.Tensor) -> None:
        """Write packed bytes from host memory; ``start`` counts from the end of the plain weights. Returns when
        stored."""
        if unit.index in self._codes:
            self._codes[unit.index][start : start + source.numel()].copy_(source)
        else:
            _wait_for(self._write(unit, source, self._packed[unit.index].raw_bytes + start))

    # Both of these run for each chunk of each step, so they call the swapper themselves.

    def read_chunk(self, unit: Unit, chunk: Chunk, target: torch.Tensor) -> Handle | ReadThen | None:
        """Start to read a chunk's model weights: ``target`` has the compute dtype and ``chunk.numel`` elements.

        Returns None if they were copied at once.
        """
        offset = chunk.start * target.element_size()  # the trainable segment is the first one
        if unit.index in self._in_host_memory:
            self._in_host_memory[unit.index].read(offset, target)
            return None
        if unit.extent is None or not target.is_cpu:
            return self._read_landed(unit, target, offset)
        raw, swapper = target.view(torch.uint8).numpy(), self._swapper_of[unit.index]
        return swapper.read(unit.extent, raw, offset=offset, priority=Priority.PREFETCH)

    def write_chunk(self, unit: Unit, chunk: Chunk, source: torch.Tensor) -> Handle | None:
        """Start to write a chunk's new model weights. ``source`` is host memory, unchanged until the handle is done.

        Returns None if they were copied at once.
        """
        offset = chunk.start * source.element_size()
        if unit.extent is None:
            return self._write(unit, source, offset)
        return self._swapper_of[unit.index].write(unit.extent, source.view(torch.uint8).numpy(), offset=offset)

    def _read_landed(self, unit: Unit, target: torch.Tensor, offset: int) -> Handle | ReadThen:
        """Start to read into ``target``, by way of host memory (landing) if that is on a GPU."""
        if target.is_cpu:
            return self._read(unit, target, offset)
        landing = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        # Pageable memory: torch's copy to the GPU waits until it is done.
        return ReadThen(self._read(unit, landing, offset), lambda: target.copy_(landing))

    def write_all(self, unit: Unit, source: torch.Tensor, offset: int = 0) -> None:
        """Write bytes of a flat buffer, from ``offset`` on, from host memory. Returns when stored.

        Weights that are stored packed are left out: see `write_packed`.
        """
        if unit.index in self._packed:
            source = source[: max(self._packed[unit.index].raw_bytes - offset, 0)]
        if source.numel():
            _wait_for(self._write(unit, source, offset))

    def release_memory(self, put_aside: PutAside) -> None:
        """Move weights that rest in memory elsewhere until `take_memory_back`, as far as ``put_aside`` takes them."""
        for block in self._in_host_memory.values():
            block.release_memory(put_aside)
        for index, codes in self._codes.items():
            if (aside := put_aside(codes)) is not None:
                self._codes[index] = aside

    def take_memory_back(self) -> None:
        """The counterpart of `release_memory`."""
        for block in self._in_host_memory.values():
            block.take_memory_back()
        for index, codes in self._codes.items():
            self._codes[index] = codes.to(self._device.torch_device)

    def close(self) -> None:
        """Stop the threads and release memory. The swapper belongs to the caller."""
        # Threads first: they read from the blocks and from the scratch memory.
        if self._uploader is not None:
            self._uploader.close()
        self._unpacker.close()
        for block in self._in_host_memory.values():
            block.release()
        self._in_host_memory.clear()
        self._scratch.clear()
        self._codes.clear()


def _wait_for(written: Handle | None) -> None:
    if written is not None:
        written.wait()


def _unpack_apart(form: StoredForm, stored: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy the plain weights and unpack the others, from a whole stored form (uint8) into a flat buffer."""
    memory[: form.raw_bytes].copy_(stored[: form.raw_bytes])
    form.unpack(stored[form.raw_bytes :], memory)


def extent_of(unit: Unit) -> Extent:
    if unit.extent is None:
        raise RuntimeError(f"unit {unit.name} has no extent: its weights rest elsewhere, or on other ranks")
    return unit.extent


Read = Callable[..., Arrival]
"""``read(target, offset, is_demand=...)`` starts to read bytes of a unit into host memory (uint8, 1-D)."""


class _Upload(LatchedArrival):
    """One unit on its way through staging buffers to the GPU: an `Arrival`."""

    def __init__(self, name: str, target: torch.Tensor, read: Read, device: ComputeDevice, *, is_demand: bool) -> None:
        super().__init__()
        self.name = name
        self.target: torch.Tensor | None = target
        self.num_bytes = target.numel()
        self.offset = 0  # of the bytes that are read next
        self.read = read
        self.device = device
        self.is_demand = is_demand
        # Marked on the requesting thread: its earlier kernels may still read what this memory held before.
        self.after = device.mark()
        self.fence: Any = None  # of the newest copy; when it is over, of the last one

    def finish(self, error: BaseException | None) -> None:
        """All copies are launched, or the upload has failed."""
        # Before the latch: a waiter may evict the unit at once, and a view of its flat buffer would prevent that.
        self.target = None
        super().finish(error)

    def wait(self) -> None:
        super().wait()
        self.device.compute_waits_for(self.fence)  # the thread goes on; only later kernels wait for the copies

    def promote(self) -> None:
        self.is_demand = True  # a plain attribute, which the upload thread reads: late is harmless


class Uploader:
    """Moves units from drives through pinned staging buffers to the GPU, in a thread of its own.

    Reads into several staging buffers run while earlier ones are copied. A staging buffer is free when its copy has
    run. Every error reaches the threads that wait for an upload, also if the upload thread itself fails.
    """

    # Worked example: a unit of 10 MiB, three buffers of 4 MiB.
    #   read [0, 4), [4, 8) and [8, 10) into buffers 0, 1, 2    all in flight: `_reading` has three entries
    #   wait for the read of buffer 0, launch its copy           `_copying` has one
    #   wait for 1, launch; wait for 2, launch                   the last copy of the unit: its waiters are released
    #   the next unit's reads begin as soon as a copy has run and its buffer is free

    def __init__(self, device: ComputeDevice, staging_pool: StagingPool) -> None:
        self._device = device
        self._staging_pool = staging_pool
        # Requests; None ends the thread. No limit is needed, since each has a flat buffer, and those are limited.
        self._queue: queue.SimpleQueue[_Upload | None] = queue.SimpleQueue()
        # Upload, buffer, read, offset and number of bytes; then buffer and fence. Both in order of requests, and
        # limited by the number of staging buffers. Only the upload thread touches them, and `_current`.
        self._reading: deque[tuple[_Upload, StagingBuffer, Arrival, int, int]] = deque()
        self._copying: deque[tuple[StagingBuffer, Any]] = deque()
        self._current: _Upload | None = None
        """The upload whose next bytes are read."""
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        """Guards `_end`, and the queue against requests after it was set: nobody would ever answer those."""
        self._end: BaseException | None = None
        """The error for further requests; None while the thread runs."""
        self._thread = threading.Thread(target=self._run, name="infinity-upload", daemon=True)
        start_threads(self._thread)

    def fetch(self, name: str, target: torch.Tensor, read: Read, *, is_demand: bool) -> Arrival:
        """Start to upload to ``target``, by a ``read`` per staging buffer, in order of requests. ``name``: for
        errors."""
        upload = _Upload(name, target, read, self._device, is_demand=is_demand)
        with self._lock:
            if self._end is None:
                self._queue.put(upload)
            else:
                upload.finish(self._end)
        return upload

    def close(self) -> None:
        """Finish all requests and end the thread."""
        with self._lock:
            if self._end is None:
                self._end = RuntimeError("the uploader is closed")
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._device.background_thread():
                self._serve()
        except BaseException as error:
            self._fail(error)

    def _serve(self) -> None:
        # Each round does the first of these that is possible: read on, launch the oldest copy, wait for the oldest
        # copy.
        while True:
            if self._current is None:
                # Sleep only if nothing is in flight. Otherwise reads that have ended have to be copied meanwhile.
                with contextlib.suppress(queue.Empty):
                    self._current = self._queue.get(block=not self._reading and not self._copying)
                    if self._current is None:
                        self._drain()
                        return
            upload = self._current
            if upload is not None:
                if upload.target is None or upload.offset >= upload.num_bytes:
                    self._current = None  # all its staging buffers are being read, or one of them has failed
                    continue
                staging_buffer = self._next_buffer(upload.name)
                if staging_buffer is not None:
                    self._read(upload, staging_buffer)
                    continue
            if self._reading:
                self._copy_oldest()
            elif self._copying:
                self._retire_oldest()

    def _next_buffer(self, owner: str) -> StagingBuffer | None:
        # Wait for a buffer only while holding none. The pool's other buffers are this thread's own, so it would wait
        # for itself.
        if not self._reading and not self._copying:
            return self._staging_pool.lease(owner=owner)
        while self._copying and self._device.is_done(self._copying[0][1]):
            self._retire_oldest()
        return self._staging_pool.try_lease(owner=owner)

    def _read(self, upload: _Upload, staging_buffer: StagingBuffer) -> None:
        num_bytes = min(staging_buffer.num_bytes, upload.num_bytes - upload.offset)
        try:
            arrival = upload.read(staging_buffer.tensor[:num_bytes], upload.offset, is_demand=upload.is_demand)
        except BaseException as error:
            staging_buffer.release()
            upload.finish(error)
            return
        self._reading.append((upload, staging_buffer, arrival, upload.offset, num_bytes))
        upload.offset += num_bytes

    def _copy_oldest(self) -> None:
        upload, staging_buffer, arrival, offset, num_bytes = self._reading.popleft()
        try:
            if upload.is_demand:
                arrival.promote()
            arrival.wait()  # also if the upload has failed: the read uses the staging buffer until then
            target = upload.target
            if target is None:  # the upload has failed
                staging_buffer.release()
                return
            is_last = offset + num_bytes == target.numel()
            upload.fence = self._device.upload(
                target[offset : offset + num_bytes], staging_buffer.tensor[:num_bytes], upload.after
            )
            del target  # before `finish`: see there
        except BaseException as error:
            staging_buffer.release()
            upload.finish(error)
            return
        self._copying.append((staging_buffer, upload.fence))
        # Copies are launched in order of offsets on one stream, so the fence of the last one covers all.
        if is_last:
            upload.finish(None)

    def _retire_oldest(self) -> None:
        staging_buffer, fence = self._copying[0]
        self._device.synchronize(fence)  # if it raises, `_fail` finds the buffer
        self._copying.popleft()
        staging_buffer.release()

    def _drain(self) -> None:
        while self._reading:
            self._copy_oldest()
        while self._copying:
            self._retire_oldest()

    def _fail(self, error: BaseException) -> None:
        """End the thread's work: all waiting uploads get the error, and so do later requests."""
        with self._lock:
            self._end = error
            waiting = [*(upload for upload, *_ in self._reading), self._current]
            while not self._queue.empty():
                waiting.append(self._queue.get())
        # The pool may have other users, and waits for its buffers before it releases its memory.
        for _, staging_buffer, *_ in self._reading:
            staging_buffer.release()  # the pool leases it to nobody until its read has ended
        for staging_buffer, fence in self._copying:
            with contextlib.suppress(Exception):  # of a device that runs no copy any more
                self._device.synchronize(fence)
            staging_buffer.release()
        self._reading.clear()
        self._copying.clear()
        for upload in waiting:
            if upload is not None and not upload.done():  # one may be in `_reading` several times
                upload.finish(error)


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
