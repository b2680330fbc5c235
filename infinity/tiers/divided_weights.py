"""Weights of which each rank keeps its shard alone (ZeRO's stage 3): a unit that is fetched is gathered from all ranks.

    extent of a unit, on rank r:  the bytes `Shards.weight_spans(unit, r)` of its flat buffer, one after the other

[Note: gathers] A fetch reads this rank's shard into a staging buffer. Then a thread gathers the unit from all ranks in its flat
buffer: on a device by the device's backend, if the process group has one. All ranks fetch the same units in the same order, as
with FSDP. That order follows from the order in which the script uses units: see [Note: the same units on all ranks] in
``infinity.paging.parameter_cache``. Each gather begins with a meeting, so all ranks find a rank that fetches another unit. A
rank that cannot read its shard says so in the meeting, and the order goes on. Only the thread looks at the flat buffer, so the
buffer has no views when the unit has come.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from traceback import clear_frames

import torch

from infinity.device.compute import ComputeDevice, Fence
from infinity.distributed.collective_thread import CollectiveThread
from infinity.distributed.collectives import CallCounts, Ranks
from infinity.errors import RankError
from infinity.tiers.extent_labels import weight_contents
from infinity.tiers.weight_store import ReadThen, WeightStore, extent_of
from infinity.units.layout import Chunk
from infinity.units.shards import Shards, clipped
from infinity.units.unit import Arrival, LatchedArrival, Unit
from swapper import Handle, NameOf, Priority, StagingBuffer, StagingPool, Swapper, SwapperError

_ON_THE_WIRE = torch.int32
"""Weights are gathered as numbers of this dtype, whatever theirs is."""


class Gather(LatchedArrival):
    """A unit's weights on their way: this rank's shard from where it is stored, then those of all ranks."""

    def __init__(self, store: DividedWeights, unit: Unit, issued: CallCounts, after: Fence, *, is_demand: bool) -> None:
        super().__init__()
        self.unit = unit
        self.is_demand = is_demand
        self.landing: StagingBuffer | None = None
        """The buffer into which this rank's shard is read, once it is leased."""
        self.handle: Handle | None = None
        """Handle of that read; None if this rank has no shard of the unit."""
        self._store = store
        self._issued = issued
        self._after = after  # earlier kernels may still read what was in this memory before
        self._target: torch.Tensor | None = unit.memory
        self._fence: Fence = None
        self._failure: Exception | None = None
        """Why it has failed on this rank alone, or is known to have on all."""

    def wait(self) -> None:
        super().wait()
        self._store.device.compute_waits_for(self._fence)

    def promote(self) -> None:
        self.is_demand = True
        if self.handle is not None:
            self.handle.promote(Priority.DEMAND)

    # ------------------------------------------------------------------------------------------------- for the thread

    def run(self, ranks: Ranks) -> None:
        """Gather it. Raises only what parts the ranks."""
        try:
            self._store.begin(self)
            if self.handle is not None:
                self.handle.wait()
        except Exception as error:
            self._failure = error
        what = f"gathering the weights of {self.unit.name}"
        told = ranks.all_gather_ints(what, [self._failure is not None], issued=self._issued)
        failed = [rank for rank, (has_failed,) in enumerate(told) if has_failed]
        if failed:
            problem = f"rank {ranks.names(failed)} cannot read its shard"
            self._failure = self._failure or RankError(what, problem, rank=ranks.number, cure=_CURE)
            return
        device, target, landing = self._store.device, self._target, self.landing
        if target is None or landing is None:
            raise RuntimeError("the gather is over")

        def put(place: torch.Tensor, found: torch.Tensor) -> None:
            if found.device.type != "cpu":
                place.copy_(found)
            else:
                device.synchronize(device.upload(place, found, self._after))  # its memory is used again at once

        device.compute_waits_for(self._after)
        whole, shard = target.view(_ON_THE_WIRE), landing.tensor.view(_ON_THE_WIRE)
        for of_ranks in self._store.shards.weight_parts(self.unit):
            parts = [(start // whole.itemsize, stop // whole.itemsize) for start, stop in of_ranks]
            own = whole[slice(*parts[ranks.index])]
            if own.numel():
                put(own, shard[: own.numel()])
            shard = shard[own.numel() :]
            ranks.all_gather_in_memory(what, whole, parts, kind="fetches", put=put)
        self._fence = device.mark()

    def finish(self, error: BaseException | None) -> None:
        """It is over."""
        self._target = None
        error = error or self._failure
        if error is not None:
            clear_frames(error.__traceback__)  # they look at the flat buffer
        self._store.on_end(self)
        super().finish(error)


_CURE = "See the output of that rank"


class DividedWeights(WeightStore):
    """A `WeightStore` that has this rank's shards."""

    def __init__(
        self,
        swapper: Swapper | None,
        in_memory: Swapper | None,
        device: ComputeDevice,
        shards: Shards,
        gathers: CollectiveThread,
        staging_pool: StagingPool,
    ) -> None:
        """
        Args:
            swapper: of the shards on NVMe; None if none are there.
            in_memory: of those in host memory; None if none are there.
            device: where units are needed.
            shards: which rank keeps what.
            gathers: of those ranks, for this alone.
            staging_pool: staging buffers as large as this rank's largest shard.
        """
        super().__init__(swapper, device)
        self.device = device
        self._in_memory = in_memory
        self.shards = shards
        self._gathers = gathers
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        """Held for a moment, by the threads that fetch and the one that gathers; for what follows."""
        self._unread: deque[Gather] = deque()
        """Those whose shards are not being read yet, in their order."""
        self._staging_pool = staging_pool

    def allocate(self, unit: Unit, *, in_host_memory: bool = False, keeps_codes: bool = False) -> None:
        if unit.is_persistent:
            return
        swapper = self._in_memory if in_host_memory else self._swapper
        name = f"this rank's shard of the weights of {unit.name}"
        self._allocate(unit, swapper, self._num_bytes(unit), name, self._contents(unit))

    def holds(self, unit: Unit) -> bool:
        """Whether this rank keeps its shard of the unit and no more."""
        return unit.index in self._swapper_of

    # ----------------------------------------------------------------------------------------------------- where it lies

    def _num_bytes(self, unit: Unit) -> int:
        return sum(stop - start for start, stop in self.shards.weight_spans(unit))

    def _places(self, unit: Unit, start: int = 0, stop: int = sys.maxsize) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, offset in the extent) of the bytes in [start, stop) of the flat buffer that this rank keeps."""
        offset = 0
        for first, last in self.shards.weight_spans(unit):
            low, high = clipped((first, last), start, stop)
            if low < high:
                yield low, high, offset + low - first
            offset += last - first

    def _contents(self, unit: Unit) -> NameOf:
        names, places = weight_contents(unit.layout), [*self._places(unit)]

        def name_of(start: int, stop: int) -> str:
            found = [
                names(*clipped((first, last), first + start - offset, first + stop - offset))
                for first, last, offset in places
                if start < offset + last - first and offset < stop
            ]
            return ", ".join(filter(None, found))

        return name_of

    def _place_of(self, unit: Unit, chunk: Chunk, weights: torch.Tensor) -> int:
        """Where in the extent a chunk's weights begin."""
        start = chunk.start * weights.element_size()  # the trainable segment is the first one
        found = list(self._places(unit, start, start + weights.nbytes))
        if [place[:2] for place in found] != [(start, start + weights.nbytes)]:
            raise RuntimeError(f"another rank keeps elements {chunk.start} to {chunk.stop} of {unit.name}")
        return found[0][2]

    # ---------------------------------------------------------------------------------------------------------- fetching

    def fetch(self, unit: Unit, *, is_demand: bool) -> Arrival:
        """Start to gather the unit in ``unit.flat``. All ranks do so, in the same order."""
        gather = Gather(self, unit, self._gathers.main.issue(), self.device.mark(), is_demand=is_demand)
        with self._lock:
            self._unread.append(gather)
            self._read_ahead()
        self._gathers.put(gather)
        return gather

    def _read_ahead(self) -> None:
        while self._unread and (landing := self._staging_pool.try_lease(owner=self._unread[0].unit.name)) is not None:
            self._begin(self._unread.popleft(), landing)

    def begin(self, gather: Gather) -> None:
        """It is the first of those that are not over: its shard is being read, or begins to be."""
        with self._lock:
            if gather in self._unread:
                self._unread.remove(gather)
                self._begin(gather, self._staging_pool.lease(owner=gather.unit.name))

    def _begin(self, gather: Gather, landing: StagingBuffer) -> None:
        gather.landing = landing
        num_bytes = self._num_bytes(gather.unit)
        if num_bytes:
            gather.handle = self._read(gather.unit, landing.tensor[:num_bytes], 0, is_demand=gather.is_demand)

    def on_end(self, gather: Gather) -> None:
        """Its memory is free."""
        with self._lock:
            if gather.landing is not None:
                gather.landing.release()
                gather.landing = None
            with contextlib.suppress(SwapperError):  # it is told by those that are not read
                self._read_ahead()

    def read_chunk(self, unit: Unit, chunk: Chunk, target: torch.Tensor) -> Handle | ReadThen:
        return self._read_landed(unit, target, self._place_of(unit, chunk, target))

    def write_chunk(self, unit: Unit, chunk: Chunk, source: torch.Tensor) -> Handle | None:
        return self._write(unit, source, self._place_of(unit, chunk, source))

    def write_all(self, unit: Unit, source: torch.Tensor, offset: int = 0) -> None:
        swapper, places = self._swapper_of[unit.index], self._places(unit, offset, offset + source.numel())
        writes = [
            swapper.write(extent_of(unit), source[a - offset : b - offset], offset=place) for a, b, place in places
        ]
        for write in writes:
            write.wait()

    def close(self) -> None:
        """What all ranks have asked for is gathered before."""
        self._gathers.end()
        super().close()


_MOST_PENDING = 4
"""Writes under way, each of one block of one rank."""


@dataclass(eq=False)
class WeightExchange:
    """Each rank's shard of a unit's trainable weights goes to all. Memory: two blocks, see `Ranks.all_gather_parts`.

    New model weights of the shards that other ranks update come to where this rank keeps its copy. Only the thread that
    trains calls it, in an order that follows from model and script alone: see [Note: ranks] in
    ``infinity.distributed.collectives``.

    Attributes:
        ranks: those that divide states.
        shards: which of them has the weights of which elements.
    """

    ranks: Ranks = field(default_factory=Ranks)
    shards: Shards = field(default_factory=Shards)
    _weights: WeightStore | None = None
    """Where weights are stored that do not stay in flat buffers; None if all stay there."""
    _device: ComputeDevice = field(default_factory=ComputeDevice)
    """Where flat buffers are."""

    @property
    def is_divided(self) -> bool:
        """Whether this rank keeps no more of some units' weights than its shards."""
        return isinstance(self._weights, DividedWeights)

    def divides(self, unit: Unit) -> bool:
        """Whether this rank keeps no more of the unit's weights than its shard."""
        return isinstance(self._weights, DividedWeights) and self._weights.holds(unit)

    def before(self, unit: Unit) -> None:
        """Weights of the unit are about to be written to by the script. All ranks come here, where it is divided.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        if self.divides(unit):
            self.ranks.all_gather_ints(f"writing to the weights of {unit.name}")

    def gather(self, unit: Unit) -> None:
        """The unit's trainable weights in memory, and where they rest, become what the rank has that updates them.

        Where they are divided, those in memory do: of units that all ranks have there. No update of it may be pending. All
        ranks call it at the same point of their scripts.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        if not self.shards.is_divided or unit.layout.trainable is None:
            return
        if unit.arrival is not None:
            unit.arrival.wait()  # what it brings was read before the others' shards are written
        what = f"gathering the weights of {unit.name}"
        self.ranks.all_gather_ints(what)
        flat = None if unit.flat is None else unit.trainable_view(unit.flat.tensor())
        rests = self._weights if not unit.is_persistent else None
        is_written = rests is not None and not self.divides(unit)
        pending: deque[tuple[Handle, torch.Tensor]] = deque()

        def read(start: int, target: torch.Tensor) -> None:
            if flat is not None:
                self._copy(target, flat[start : start + target.numel()])
            elif rests is not None:
                handle = rests.read_chunk(unit, _chunk(start, target), target)
                if handle is not None:
                    handle.wait()

        def write(start: int, found: torch.Tensor) -> None:
            if flat is not None:
                self._copy(flat[start : start + found.numel()], found)
            if is_written and rests is not None:
                copy = found.to("cpu", copy=True)  # the memory it came in is used again
                handle = rests.write_chunk(unit, _chunk(start, copy), copy)
                if handle is not None:
                    pending.append((handle, copy))
            while len(pending) > _MOST_PENDING:
                pending.popleft()[0].wait()

        place = "cpu" if flat is None else flat.device
        dtype = unit.layout.trainable.dtype
        self.ranks.all_gather_parts(
            what, self.shards.spans(unit), read, write, dtype=dtype, kind="weights", device=place
        )
        for handle, _ in pending:
            handle.wait()
        if flat is not None:
            unit.outdate()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the device where both are there, else between it and host memory."""
        if target.device == source.device and target.device.type != "cpu":
            target.copy_(source)
        else:
            copy = self._device.download if target.device.type == "cpu" else self._device.upload
            self._device.synchronize(copy(target, source, self._device.mark()))


def _chunk(start: int, values: torch.Tensor) -> Chunk:
    return Chunk(0, start, start + values.numel(), ())
