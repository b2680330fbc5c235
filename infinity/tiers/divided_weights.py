"""Weights of which each rank keeps its shard alone (ZeRO's stage 3): a unit that is fetched is put together from all ranks.

Knows where shards lie and in which memory they may be found; must not know when anything is needed.

    extent of a unit, on rank r:  the bytes `Shards.weight_spans(unit, r)` of its flat buffer, one after the other

A fetch reads this rank's shard into its place in the flat buffer, and asks the others for theirs
(`infinity.distributed.pulls`). For a device with a memory of its own, a unit is put together in a staging buffer of host memory
as large as the largest one, and goes to its flat buffer from there, in a thread apart (`Uploader`). What others ask for comes
from memory where it can: from where a unit is put together, until all of that has come; from one of a few copies of shards that
went to others, or have not yet; from where the shard rests.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from infinity.device.compute import ComputeDevice
from infinity.distributed.pulls import Pull, Pulls
from infinity.tiers.extent_labels import weight_contents
from infinity.tiers.weight_store import LandedRead, WeightStore, Written, chunk_offset, extent_of, landed
from infinity.units.layout import Chunk
from infinity.units.shards import NUM_SERVED, Shards
from infinity.units.unit import Arrival, Unit
from swapper import AlignedRegion, Handle, NameOf, Priority, ReentryError, StagingPool, Swapper


class _Reading:
    """This rank's shard of a unit on its way to where that is put together."""

    def __init__(self, address: int, handles: list[Handle]) -> None:
        self.address = address
        self.handles = handles
        self.num_served = 0
        """To how many ranks it has gone."""


class _Copy:
    """Memory for one shard."""

    def __init__(self, num_bytes: int) -> None:
        self._region = AlignedRegion(num_bytes)
        self.memory = torch.from_numpy(self._region.array())


class DividedArrival:
    """A unit's weights on their way: this rank's shard from its drive, the others from other ranks."""

    def __init__(self, store: DividedWeights, unit: Unit, handles: Sequence[Handle], pull: Pull) -> None:
        self._store = store
        self._unit = unit
        self._handles = list(handles)
        self._pull = pull
        self._error: Exception | None = None
        self._is_over = False

    def wait(self) -> None:
        while self._handles:
            try:
                self._handles[0].wait()
            except ReentryError:
                raise  # it is still on its way
            except Exception as error:
                self._error = self._error or error
            self._handles.pop(0)
        if not self._is_over:  # whatever became of this rank's shard: the others come
            try:
                self._pull.wait()
            except Exception as error:
                self._error = self._error or error
            self._is_over = True
            self._store.on_unit_complete(self._unit)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether somebody has waited for it: nothing else tells what has come from other ranks."""
        return self._is_over

    def promote(self) -> None:
        for handle in self._handles:
            handle.promote(Priority.DEMAND)
        self._pull.promote()


class DividedWeights(WeightStore):
    """A `WeightStore` that has this rank's shards."""

    def __init__(
        self,
        swapper: Swapper | None,
        in_memory: Swapper | None,
        device: ComputeDevice,
        shards: Shards,
        pulls: Pulls,
        staging_pool: StagingPool | None = None,
    ) -> None:
        """
        Args:
            swapper: of the shards on NVMe; None if none are there.
            in_memory: of those in host memory; None if none are there.
            device: where units are needed.
            shards: which rank keeps what.
            pulls: brings what others keep. All ranks make this at the same point.
            staging_pool: staging buffers as large as the largest unit, for a device that does not share host memory.
        """
        super().__init__(swapper, device, staging_pool)
        self._in_memory = in_memory
        self._shards = shards
        self._pulls = pulls
        self._units: dict[int, Unit] = {}
        self._swapper_of: dict[int, Swapper] = {}
        """By unit."""
        self._lock = threading.Lock()
        """Held for a moment, by the threads that fetch, those that update and the one that gives; for what follows."""
        self._readings: dict[int, _Reading] = {}
        """By unit, from its fetch until that is over."""
        self._copies: dict[int, _Copy] = {}
        """By unit, the oldest first."""
        self._spare: deque[_Copy] = deque()
        self._being_served: _Copy | None = None
        self._number = pulls.register(self)

    def allocate(self, unit: Unit, *, in_host_memory: bool = False) -> None:
        if unit.is_persistent:
            return
        self._units[unit.index] = unit
        swapper = self._in_memory if in_host_memory else self._swapper
        if swapper is None:
            raise RuntimeError(f"there is nowhere for the weights of {unit.name}")
        self._swapper_of[unit.index] = swapper
        num_bytes = self._num_bytes(unit)
        if num_bytes:
            name = f"this rank's shard of the weights of {unit.name}"
            unit.extent = swapper.allocate(num_bytes, name, name_of=self._contents(unit))

    def holds(self, unit: Unit) -> bool:
        """Whether this rank keeps its shard of the unit and no more."""
        return unit.index in self._units

    # ----------------------------------------------------------------------------------------------------- where it lies

    def _num_bytes(self, unit: Unit) -> int:
        return sum(stop - start for start, stop in self._shards.weight_spans(unit))

    def _places(self, unit: Unit, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Of the bytes [start, stop) of the flat buffer, those that this rank keeps: from, to, and where in the extent."""
        offset = 0
        for first, last in self._shards.weight_spans(unit):
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield low, high, offset + low - first
            offset += last - first

    def _contents(self, unit: Unit) -> NameOf:
        names = weight_contents(unit.layout)

        def name_of(start: int, stop: int) -> str:
            found, offset = [], 0
            for first, last in self._shards.weight_spans(unit):
                low, high = max(start, offset), min(stop, offset + last - first)
                if low < high:
                    found.append(names(first + low - offset, first + high - offset))
                offset += last - first
            return ", ".join(filter(None, found))

        return name_of

    def _place_of(self, unit: Unit, chunk: Chunk, num_bytes: int) -> int:
        """Where in the extent a chunk's weights begin."""
        start = chunk_offset(unit, chunk)
        found = list(self._places(unit, start, start + num_bytes))
        if [place[:2] for place in found] != [(start, start + num_bytes)]:
            raise RuntimeError(f"another rank keeps elements {chunk.start} to {chunk.stop} of {unit.name}")
        return found[0][2]

    # ---------------------------------------------------------------------------------------------------------- fetching

    def _read(self, unit: Unit, target: torch.Tensor, offset: int, *, is_demand: bool) -> Arrival:
        """Begin to put the unit together in ``target``, which has room for all of it."""
        priority = Priority.DEMAND if is_demand else Priority.PREFETCH
        handles = []
        with self._lock:
            copy = self._copies.get(unit.index)
            if copy is not None:
                for start, stop, place in self._places(unit, 0, unit.num_bytes):
                    target[start:stop].copy_(copy.memory[place : place + stop - start])
        if copy is None:
            for start, stop, place in self._places(unit, 0, unit.num_bytes):
                handles.append(self._begin_read(unit, place, target[start:stop], priority))
            if handles:
                with self._lock:
                    self._readings[unit.index] = _Reading(target.data_ptr(), handles)
        self._pulls.release(self._number, unit.index)
        others = {
            rank: [target[start:stop] for start, stop in self._shards.weight_spans(unit, rank)]
            for rank in range(self._shards.num)
            if rank != self._shards.index
        }
        targets = {rank: pieces for rank, pieces in others.items() if pieces}
        what = f"fetching the weights of {unit.name}"
        pull = self._pulls.pull(what, self._number, unit.index, targets, is_demand=is_demand)
        return DividedArrival(self, unit, handles, pull)

    def _begin_read(
        self, unit: Unit, offset: int, target: torch.Tensor, priority: Priority = Priority.DEMAND
    ) -> Handle:
        return self._swapper_of[unit.index].read(extent_of(unit), target, offset=offset, priority=priority)

    def on_unit_complete(self, unit: Unit) -> None:
        """All of the unit has come: where it was put together is somebody else's from now on."""
        with self._lock:
            reading = self._readings.pop(unit.index, None)
            if reading is not None and reading.num_served < self._shards.num - 1 and unit.index not in self._copies:
                self._copy(unit, reading, self._next_copy(unit))

    def _copy(self, unit: Unit, reading: _Reading, copy: _Copy) -> None:
        for start, stop, place in self._places(unit, 0, unit.num_bytes):
            ctypes.memmove(copy.memory.data_ptr() + place, reading.address + start, stop - start)
        self._copies[unit.index] = copy

    def _next_copy(self, unit: Unit) -> _Copy:
        """Memory for a shard: that of the oldest, but not of the one that is being given."""
        if self._spare:
            return self._spare.popleft()
        if len(self._copies) + (self._being_served not in (None, *self._copies.values())) < NUM_SERVED:
            return _Copy(max(self._num_bytes(each) for each in self._units.values()))
        oldest = next(index for index, copy in self._copies.items() if copy is not self._being_served)
        return self._copies.pop(oldest)

    # ------------------------------------------------------------------------------------------- giving, in a thread apart

    def is_available(self, index: int) -> bool:
        with self._lock:
            return index in self._readings or index in self._copies

    def serve(self, index: int) -> Sequence[torch.Tensor]:
        unit = self._units[index]
        with self._lock:
            reading = self._readings.get(index)
            self._being_served = self._copies.get(index)
        if self._being_served is None and reading is not None:
            for handle in reading.handles:
                handle.wait()
            with self._lock:
                if self._readings.get(index) is reading:
                    self._copy(unit, reading, self._next_copy(unit))
                self._being_served = self._copies.get(index)
        with self._lock:
            copy = self._being_served or self._next_copy(unit)
            is_there = self._being_served is not None
            self._being_served = copy
            if reading is not None:
                reading.num_served += 1
        if not is_there and unit.extent is not None:
            self._begin_read(unit, 0, copy.memory[: self._num_bytes(unit)]).wait()
            with self._lock:
                self._copies[index] = copy
        return [
            copy.memory[place : place + stop - start] for start, stop, place in self._places(unit, 0, unit.num_bytes)
        ]

    # ----------------------------------------------------------------------------------------------------------- changing

    def _outdate(self, unit: Unit) -> None:
        """The shard is another one from now on. Nobody asks for it meanwhile."""
        with self._lock:
            copy = self._copies.pop(unit.index, None)
            if copy is not None and copy is not self._being_served:
                self._spare.append(copy)

    def drop_copies(self) -> None:
        """All shards are other ones from now on. Nobody asks for any meanwhile."""
        for unit in self._units.values():
            self._outdate(unit)

    def read_chunk(self, unit: Unit, chunk: Chunk, target: torch.Tensor) -> Handle | LandedRead:
        place = self._place_of(unit, chunk, target.numel() * target.element_size())
        return landed(lambda memory: self._begin_read(unit, place, memory, Priority.PREFETCH), target)

    def write_chunk(self, unit: Unit, chunk: Chunk, source: torch.Tensor) -> Handle:
        self._outdate(unit)
        place = self._place_of(unit, chunk, source.numel() * source.element_size())
        return self._swapper_of[unit.index].write(extent_of(unit), source, offset=place)

    def write_all(self, unit: Unit, source: torch.Tensor, offset: int = 0) -> Written:
        self._outdate(unit)
        return Written(
            [
                self._swapper_of[unit.index].write(
                    extent_of(unit), source[start - offset : stop - offset], offset=place
                )
                for start, stop, place in self._places(unit, offset, offset + source.numel())
            ]
        )

    def stop(self) -> None:
        """Give nothing any more, and look at no flat buffer or staging buffer: those go."""
        self._pulls.unregister(self._number)
        with self._lock:
            self._readings.clear()

    def close(self) -> None:
        self.stop()
        super().close()
