"""Where model weights rest, and how they come into flat buffers. Those that are packed: see `infinity.tiers.packed_weights`.

Knows extents of weights and flat buffers; must not know when anything is needed.
"""

from __future__ import annotations

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
from infinity.tiers.packed_weights import Unpacker, UploadedUnpacking, scratch_for
from infinity.units.layout import Chunk
from infinity.units.unit import Arrival, Unit
from swapper import AlignedRegion, Extent, Handle, Latch, Priority, StagingBuffer, StagingPool, Swapper
from swapper.sync.limits import start_threads


class ReadArrival:
    """Weights that are read straight into a flat buffer of host memory."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def wait(self) -> None:
        self._handle.wait()

    def done(self) -> bool:
        return self._handle.done()

    def promote(self) -> None:
        self._handle.promote(Priority.DEMAND)


class LandedRead:
    """A read into host memory whose result belongs elsewhere."""

    def __init__(self, handle: Handle, landing: torch.Tensor, target: torch.Tensor) -> None:
        self._handle = handle
        self._landing = landing
        self._target = target

    def wait(self) -> None:
        """Return when the target has the data."""
        self._handle.wait()
        self._target.copy_(self._landing)


def landed(read: Callable[[torch.Tensor], Handle], target: torch.Tensor) -> Handle | LandedRead:
    """Call ``read`` with ``target``, or with host memory that is copied there."""
    if target.device.type == "cpu":
        return read(target)
    landing = torch.empty(target.shape, dtype=target.dtype, device="cpu")
    return LandedRead(read(landing), landing, target)


class Written:
    """Several writes, each of a part."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        """Return when all of them are done."""
        for handle in self._handles:
            handle.wait()


class HostWeights:
    """One unit's weights at rest in host memory, laid out like its flat buffer, for a device with a memory of its own."""

    def __init__(self, num_bytes: int, device: ComputeDevice) -> None:
        self._device = device
        self._region = AlignedRegion(num_bytes)
        self._unpin = device.pin(self._region.address, self._region.num_bytes) if device.pin is not None else None
        self.tensor: torch.Tensor | None = torch.from_numpy(self._region.array())
        self._fence: Fence = None

    def fetch(self, target: torch.Tensor) -> Arrival:
        """Start the copy into ``target``, a flat buffer."""
        self._fence = self._device.upload(target, self.present, self._device.mark())
        return _Copied(self._device, self._fence)

    @property
    def present(self) -> torch.Tensor:
        """uint8, the whole block."""
        if self.tensor is None:
            raise RuntimeError("the memory of the weights has been released")
        return self.tensor

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Replace bytes from ``offset`` on by those of ``source`` (host memory), when no copy reads them any more."""
        self._device.synchronize(self._fence)
        raw = source.view(torch.uint8)
        self.present[offset : offset + raw.numel()].copy_(raw)

    def release(self) -> None:
        """Give the memory back, when no copy reads it any more."""
        self._device.synchronize(self._fence)
        if self._unpin is not None:
            self._unpin()
        self.tensor = None
        self._region.release()


class _Copied:
    """Weights that a copy brings, in the order of the device's streams."""

    def __init__(self, device: ComputeDevice, fence: Fence) -> None:
        self._device = device
        self._fence = fence

    def wait(self) -> None:
        self._device.compute_waits_for(self._fence)

    def done(self) -> bool:
        return True

    def promote(self) -> None: ...


class WeightStore:
    """Where the model weights of units rest that do not stay resident, laid out byte for byte like their flat buffers."""

    def __init__(self, swapper: Swapper | None, device: ComputeDevice, staging_pool: StagingPool | None = None) -> None:
        """
        Args:
            swapper: for those that rest on NVMe; None if none does.
            device: where they are needed.
            staging_pool: staging buffers for the way from the swapper to a device that does not share host memory, if it needs
                any.
        """
        self._swapper = swapper
        self._device = device
        self._uploader = None if staging_pool is None else Uploader(device, staging_pool)
        self._blocks: dict[int, HostWeights] = {}
        self._packed: dict[int, StoredForm] = {}
        """Unit index -> how it rests, of those with packed weights."""
        self._unpacker = Unpacker(device)
        self._scratch: dict[int, torch.Tensor] = {}
        """Unit index -> memory of the device for its packed bytes: held until they are unpacked, or no copy brings them."""

    def allocate(self, unit: Unit, *, in_host_memory: bool = False) -> None:
        """Give ``unit`` its place, unless its flat buffer is that."""
        if unit.is_persistent:
            return
        form = StoredForm(unit.layout)
        if form.slots:
            self._packed[unit.index] = form
        if in_host_memory:
            self._blocks[unit.index] = HostWeights(form.num_bytes, self._device)
        else:
            unit.extent = self.swapper.allocate(
                form.num_bytes, f"weights of {unit.name}", name_of=weight_contents(unit.layout, form)
            )

    @property
    def swapper(self) -> Swapper:
        """Of the weights on NVMe."""
        if self._swapper is None:
            raise RuntimeError("no weights rest on NVMe")
        return self._swapper

    def fetch(self, unit: Unit, *, is_demand: bool) -> Arrival:
        """Start bringing the unit's weights into ``unit.flat``."""
        if unit.index in self._packed:
            return self._fetch_packed(unit, self._packed[unit.index], is_demand=is_demand)
        if unit.index in self._blocks:
            return self._blocks[unit.index].fetch(unit.memory)
        if self._uploader is not None:
            read = functools.partial(self._read, unit)
            return self._uploader.fetch(f"weights of {unit.name}", unit.memory, read, is_demand=is_demand)
        return self._read(unit, unit.memory, 0, is_demand=is_demand)

    def _fetch_packed(self, unit: Unit, form: StoredForm, *, is_demand: bool) -> Arrival:
        block, memory = self._blocks.get(unit.index), unit.memory
        if not self._device.uses_host_memory:
            return self._upload_packed(unit, form, is_demand=is_demand)
        if block is not None:
            return self._unpacker.begin((), functools.partial(_unpack_apart, form, block.present, memory))
        priority = Priority.DEMAND if is_demand else Priority.PREFETCH
        packed, reads = form.landing(memory), []
        for start, target in ((0, memory[: form.raw_bytes]), (form.raw_bytes, packed)):
            if target.numel():
                reads.append(self.swapper.read(extent_of(unit), target, offset=start, priority=priority))
        return self._unpacker.begin(reads, functools.partial(form.unpack, packed, memory))

    def _upload_packed(self, unit: Unit, form: StoredForm, *, is_demand: bool) -> Arrival:
        block, memory = self._blocks.get(unit.index), unit.memory
        stored = self._scratch[unit.index] = scratch_for(form.num_bytes, memory.device)
        if block is not None:
            upload = block.fetch(stored)
        elif self._uploader is not None:
            read = functools.partial(self._read, unit)
            upload = self._uploader.fetch(f"weights of {unit.name}", stored, read, is_demand=is_demand)
        else:
            raise RuntimeError("no staging buffers for the way to the device")

        def unpack() -> None:
            _unpack_apart(form, stored, memory)
            self._scratch.pop(unit.index, None)

        return UploadedUnpacking(upload, unpack)

    def read_packed(self, unit: Unit, packed: PackedSlot, target: torch.Tensor) -> None:
        """Bring the bytes of one packed weight, as they rest, into host memory; return when they are there."""
        start = self._packed[unit.index].raw_bytes + packed.start
        if unit.index in self._blocks:
            target.copy_(self._blocks[unit.index].present[start : start + packed.num_bytes])
            return
        self.swapper.read(extent_of(unit), target, offset=start).wait()

    def write_packed(self, unit: Unit, start: int, source: torch.Tensor) -> None:
        """Store packed bytes from host memory, from ``start`` behind the plain weights on; return when they are stored."""
        place = self._packed[unit.index].raw_bytes + start
        if unit.index in self._blocks:
            self._blocks[unit.index].write(place, source)
            return
        self.swapper.write(extent_of(unit), source, offset=place).wait()

    def _read(self, unit: Unit, target: torch.Tensor, offset: int, *, is_demand: bool) -> Arrival:
        """Begin to read bytes of the unit's flat buffer, from ``offset`` on, into host memory."""
        priority = Priority.DEMAND if is_demand else Priority.PREFETCH
        return ReadArrival(self.swapper.read(extent_of(unit), target, offset=offset, priority=priority))

    def read_chunk(self, unit: Unit, chunk: Chunk, target: torch.Tensor) -> Handle | LandedRead | None:
        """Read a chunk's model weights: ``target`` has the compute dtype and ``chunk.numel`` elements, on any device.

        Returns None if they are there already.
        """
        if unit.index in self._blocks:
            offset = chunk_offset(unit, chunk)
            source = self._blocks[unit.index].present[offset : offset + target.numel() * target.element_size()]
            target.copy_(source.view(target.dtype))
            return None
        read = functools.partial(self.swapper.read, extent_of(unit), offset=chunk_offset(unit, chunk))
        return landed(lambda memory: read(memory, priority=Priority.PREFETCH), target)

    def write_chunk(self, unit: Unit, chunk: Chunk, source: torch.Tensor) -> Handle | None:
        """Write a chunk's new model weights; ``source`` is host memory and must stay untouched until the handle is done.

        Returns None if they are written already.
        """
        offset = chunk_offset(unit, chunk)
        if unit.index in self._blocks:
            self._blocks[unit.index].write(offset, source)
            return None
        if unit.extent is None or self._swapper is None:
            raise RuntimeError(f"the weights of unit {unit.name} rest elsewhere")
        return self._swapper.write(unit.extent, source, offset=offset)

    def write_all(self, unit: Unit, source: torch.Tensor, offset: int = 0) -> Handle | Written | None:
        """Write a flat buffer's bytes, from ``offset`` on, from host memory. Returns None if they are written already.

        Those that are to be packed are left out: see `write_packed`.
        """
        if unit.index in self._packed:
            source = source[: max(self._packed[unit.index].raw_bytes - offset, 0)]
            if not source.numel():
                return None
        if unit.index in self._blocks:
            self._blocks[unit.index].write(offset, source)
            return None
        return self.swapper.write(extent_of(unit), source, offset=offset)

    def close(self) -> None:
        """Stop the upload thread, if there is one, and release memory. The swapper belongs to somebody else."""
        if self._uploader is not None:
            self._uploader.close()
        self._unpacker.close()
        for block in self._blocks.values():
            block.release()
        self._blocks.clear()
        self._scratch.clear()


def _unpack_apart(form: StoredForm, stored: torch.Tensor, memory: torch.Tensor) -> None:
    """From a whole stored form into a flat buffer."""
    memory[: form.raw_bytes].copy_(stored[: form.raw_bytes])
    form.unpack(stored[form.raw_bytes :], memory)


def extent_of(unit: Unit) -> Extent:
    if unit.extent is None:
        raise RuntimeError(f"unit {unit.name} has no extent: its weights rest elsewhere, or on other ranks")
    return unit.extent


def chunk_offset(unit: Unit, chunk: Chunk) -> int:
    segment = unit.layout.trainable
    if segment is None:
        raise RuntimeError(f"unit {unit.name} is frozen")
    return segment.start_bytes + chunk.start * segment.dtype.itemsize


Read = Callable[..., Arrival]
"""``read(target, offset, is_demand=...)`` begins to bring bytes of a unit's flat buffer into host memory (uint8, 1-D)."""


class _Upload:
    """One unit on its way through staging buffers to the device."""

    def __init__(self, name: str, target: torch.Tensor, read: Read, device: ComputeDevice, *, is_demand: bool) -> None:
        self.name = name
        self.target: torch.Tensor | None = target
        self.read = read
        self.device = device
        self.is_demand = is_demand
        self.after = device.mark()  # earlier kernels may still read what lay in this memory before
        self.fence: Any = None
        self.error: BaseException | None = None
        self.issued = Latch()

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self.target = None
        self.issued.set()

    def wait(self) -> None:
        self.issued.wait()
        if self.error is not None:
            raise self.error
        self.device.compute_waits_for(self.fence)

    def done(self) -> bool:
        return self.issued.is_set()

    def promote(self) -> None:
        self.is_demand = True


class Uploader:
    """Moves units from where they rest through pinned staging buffers to the device, in a thread of its own.

    Reads of several staging buffers are in flight while earlier staging buffers are copied; a staging buffer is free again when
    its copy has run. Whatever goes wrong reaches those who wait: nobody waits for a thread that has died.
    """

    def __init__(self, device: ComputeDevice, staging_pool: StagingPool) -> None:
        self._device = device
        self._staging_pool = staging_pool
        self._queue: queue.SimpleQueue[_Upload | None] = queue.SimpleQueue()
        self._reading: deque[tuple[_Upload, StagingBuffer, Arrival, int, int]] = deque()
        self._copying: deque[tuple[StagingBuffer, Any]] = deque()
        self._current: _Upload | None = None
        """The upload of which the next staging buffer is to be read."""
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        self._end: BaseException | None = None
        """Why nothing is served any more."""
        self._thread = threading.Thread(target=self._run, name="infinity-upload", daemon=True)
        start_threads(self._thread)

    def fetch(self, name: str, target: torch.Tensor, read: Read, *, is_demand: bool) -> Arrival:
        """Start to bring what is called ``name`` into ``target``, with ``read`` for each staging buffer. In the order of the
        requests."""
        upload = _Upload(name, target, read, self._device, is_demand=is_demand)
        with self._lock:
            if self._end is None:
                self._queue.put(upload)
            else:
                upload.finish(self._end)
        return upload

    def close(self) -> None:
        """Finish what was requested and end the thread."""
        with self._lock:
            if self._end is None:
                self._end = RuntimeError("the uploader is closed")
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._device.background():
                self._serve()
        except BaseException as error:
            self._fail(error)

    def _serve(self) -> None:
        offset = 0
        while True:
            if self._current is None:
                is_idle = not self._reading and not self._copying
                try:
                    self._current = self._queue.get(block=is_idle)
                except queue.Empty:
                    pass
                else:
                    offset = 0
                    if self._current is None:
                        self._drain()
                        return
            upload = self._current
            if upload is not None:
                if upload.target is None or offset >= upload.target.numel():
                    self._current = None  # all its staging buffers are being read, or one of them has failed
                    continue
                staging_buffer = self._next_buffer(upload.name)
                if staging_buffer is not None:
                    offset = self._read(upload, staging_buffer, offset)
                    continue
            if self._reading:
                self._copy_oldest()
            elif self._copying:
                self._retire_oldest()

    def _next_buffer(self, owner: str) -> StagingBuffer | None:
        if not self._reading and not self._copying:
            return self._staging_pool.lease(owner=owner)
        while self._copying and self._device.is_done(self._copying[0][1]):
            self._retire_oldest()
        return self._staging_pool.try_lease(owner=owner)

    def _read(self, upload: _Upload, staging_buffer: StagingBuffer, offset: int) -> int:
        num_bytes = min(staging_buffer.num_bytes, _target_of(upload).numel() - offset)
        try:
            arrival = upload.read(staging_buffer.tensor[:num_bytes], offset, is_demand=upload.is_demand)
        except BaseException as error:
            staging_buffer.release()
            upload.finish(error)
            return offset
        self._reading.append((upload, staging_buffer, arrival, offset, num_bytes))
        return offset + num_bytes

    def _copy_oldest(self) -> None:
        upload, staging_buffer, arrival, offset, num_bytes = self._reading.popleft()
        try:
            if upload.is_demand:
                arrival.promote()
            arrival.wait()  # also for an upload that has failed: the staging buffer is in use until then
            if upload.error is not None:
                staging_buffer.release()
                return
            target = _target_of(upload)
            is_last = offset + num_bytes == target.numel()
            upload.fence = self._device.upload(
                target[offset : offset + num_bytes], staging_buffer.tensor[:num_bytes], upload.after
            )
            del target  # who waits for the upload may evict the unit at once, unless there is a view of its buffer
        except BaseException as error:
            staging_buffer.release()
            upload.finish(error)
            return
        self._copying.append((staging_buffer, upload.fence))
        if is_last:
            upload.finish(None)

    def _retire_oldest(self) -> None:
        staging_buffer, fence = self._copying.popleft()
        self._device.synchronize(fence)
        staging_buffer.release()

    def _drain(self) -> None:
        while self._reading:
            self._copy_oldest()
        while self._copying:
            self._retire_oldest()

    def _fail(self, error: BaseException) -> None:
        """The thread ends: everybody who waits gets the error, and so does everybody who comes later."""
        with self._lock:
            self._end = error
            waiting = [upload for upload, *_ in self._reading]
            if self._current is not None:
                waiting.append(self._current)
            while not self._queue.empty():
                upload = self._queue.get()
                if upload is not None:
                    waiting.append(upload)
        for upload in waiting:
            if not upload.issued.is_set():
                upload.finish(error)


def _target_of(upload: _Upload) -> torch.Tensor:
    if upload.target is None:
        raise RuntimeError("the upload has already ended")
    return upload.target
