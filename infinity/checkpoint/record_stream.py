"""All main weights and states of a unit in one pass over its records: out to a checkpoint, or in from one.

Memory: buffers of the staging pool, two at least. Knows records and weights at rest; must not be used while updates are
pending.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from infinity.checkpoint.arrays import ElementsInOrder
from infinity.distributed.agreement import pulse
from infinity.distributed.collectives import Ranks
from infinity.errors import RankError
from infinity.numerics.chunk_format import WEIGHT, ChunkBuffer
from infinity.tiers.state_store import Lease, StateStore, clear
from infinity.tiers.weight_store import LandedRead, WeightStore
from infinity.units.layout import Chunk, ParameterSlice, Slot
from infinity.units.shards import Shards
from infinity.units.unit import Unit
from infinity.updates.job import ParameterState
from swapper import Handle

_SHARING = "reading all shards of the states"
_OVER, _FAILED, _WAIT = -1, -2, -3
_CURE = "See the output of that rank"
_PART_NUMEL = 1 << 19
AHEAD_BYTES = 32 << 20
"""Of records that are read ahead, where as many staging buffers are free."""


class Part(NamedTuple):
    """Some elements of a parameter's main weight or of a state, in the order in which they lie in memory."""

    unit: Unit
    slot: Slot
    kind: str
    values: torch.Tensor
    """fp32, 1-D, on the CPU; valid until the next part is asked for."""


class _Opened(NamedTuple):
    unit: Unit
    chunk: Chunk
    lease: Lease
    weights: Handle | LandedRead | None


@dataclass(eq=False)
class RecordStream:
    """Reads and writes whole units, chunk by chunk."""

    _records: StateStore
    _weights: WeightStore | None
    """Where model weights rest; None if they rest in flat buffers alone."""
    _states: Mapping[tuple[int, int], ParameterState]
    """(unit index, slot index) -> what a parameter's records hold."""
    _chunks: Sequence[Sequence[Chunk]]
    """Of each unit, those whose records this process keeps."""

    def names_of(self, unit: Unit, slot: Slot) -> Sequence[str]:
        """The element-wise states that a parameter has now; none before its first update."""
        state = self._states.get((unit.index, slot.index))
        if state is None or state.is_fresh:
            return ()
        return [name for name in self._records.names_of(unit) if state.names is None or name in state.names]

    def kinds_of(self, unit: Unit) -> list[str]:
        """What a unit's records may hold of a parameter."""
        return [WEIGHT, *self._records.names_of(unit)]

    def parts(self, units: Iterable[Unit], ahead_bytes: int = AHEAD_BYTES) -> Iterator[Part]:
        """Everything that is trained in these units, each kind of each parameter in order.

        ``ahead_bytes``: of records that are read ahead, where as many staging buffers are free; one is in any case.
        """
        waiting = ((unit, chunk) for unit in units for chunk in self._chunks[unit.index])
        opened: deque[_Opened] = deque()
        try:
            for unit, chunk in waiting:
                ahead = self._open(unit, chunk, is_blocking=not opened)
                while ahead is None:
                    yield from self._parts_of(opened.popleft())
                    ahead = self._open(unit, chunk, is_blocking=not opened)
                opened.append(ahead)
                if sum(each.lease.workspace.record.nbytes for each in opened) > ahead_bytes and len(opened) > 1:
                    yield from self._parts_of(opened.popleft())
            while opened:
                yield from self._parts_of(opened.popleft())
        finally:
            for left in opened:
                left.lease.discard()

    def _open(self, unit: Unit, chunk: Chunk, *, is_blocking: bool) -> _Opened | None:
        in_place = _weights_in_place(unit, chunk)
        lease = self._records.open(unit, chunk, is_blocking=is_blocking, weight=in_place, needs_scratch=False)
        if lease is None:
            return None
        weights: Handle | LandedRead | None = None
        try:
            if lease.workspace.needs_weight and in_place is None:
                weights = self.bring_weights(unit, chunk, lease.workspace.weight)
        except BaseException:
            lease.discard()
            raise
        return _Opened(unit, chunk, lease, weights)

    def bring_weights(self, unit: Unit, chunk: Chunk, target: torch.Tensor) -> Handle | LandedRead | None:
        """The chunk's model weights, as they rest, into ``target``; returns what has to be waited for, if anything."""
        if self._weights is not None and not unit.is_persistent:
            return self._weights.read_chunk(unit, chunk, target)
        target.copy_(unit.weights_of(chunk))
        return None

    def write_weights(self, unit: Unit, chunk: Chunk, weights: torch.Tensor) -> Handle | None:
        """The chunk's model weights to where they rest, if that is not the unit; returns what has to be waited for."""
        if self._weights is None or unit.is_persistent:
            return None
        return self._weights.write_chunk(unit, chunk, weights.cpu())

    @contextlib.contextmanager
    def opened(
        self, unit: Unit, chunk: Chunk, *, stores: bool = False, main_only: bool = False
    ) -> Iterator[ChunkBuffer]:
        """A chunk in working memory; what ``stores`` is stored at the end of the ``with`` block, unless that raises."""
        lease, is_stored = self.lease(unit, chunk), False
        try:
            lease.wait()
            yield lease.workspace
            if stores:
                lease.write_back([], main_only=main_only)
                is_stored = True
        finally:
            if not is_stored:
                lease.discard()

    def lease(self, unit: Unit, chunk: Chunk, *, reads: bool = True) -> Lease:
        """The chunk's record in working memory, when there is a staging buffer for it. See `StateStore.open`."""
        lease = self._records.open(unit, chunk, is_blocking=True, reads=reads)
        if lease is None:
            raise RuntimeError("a blocking lease gave nothing")
        return lease

    def _parts_of(self, opened: _Opened) -> Iterator[Part]:
        unit, chunk, lease, weights = opened
        workspace = lease.workspace
        try:
            lease.wait()
            if weights is not None:
                weights.wait()
            for param_slice in chunk.slices:
                for kind in (WEIGHT, *self.names_of(unit, param_slice.slot)):
                    plain = _plain(workspace, kind)
                    for span in _spans(param_slice):
                        if plain is not None:
                            yield Part(unit, param_slice.slot, kind, plain[span])
                            continue
                        values = torch.empty(span.stop - span.start, dtype=torch.float32, device="cpu")
                        workspace.read(kind, span, values)
                        yield Part(unit, param_slice.slot, kind, values)
        finally:
            lease.discard()

    def fill(self, unit: Unit, sources: Mapping[tuple[int, str], ElementsInOrder]) -> None:
        """Replace main weights and states of a unit, and its model weights by their casts.

        Where ranks keep shards, those of this one's: the other weights come by `WeightExchange.gather`.

        Args:
            unit: holds no other flat buffer than that of a unit that stays, or one that is open.
            sources: (slot index, kind) -> elements in the order of memory. What is not among them stays.
        """
        begun: dict[tuple[int, str], int] = {}
        for chunk in self._chunks[unit.index]:
            wanted = [
                (param_slice, kind)
                for param_slice in chunk.slices
                for kind in self._kinds(unit, param_slice.slot, sources)
            ]
            if not wanted:
                continue
            is_whole = all(
                (param_slice.slot.index, kind) in sources
                for param_slice in chunk.slices
                for kind in (WEIGHT, *self.names_of(unit, param_slice.slot))
            )
            for param_slice, kind in wanted:  # what lies before is kept by other ranks, if by anybody
                key = param_slice.slot.index, kind
                _skip(sources[key], param_slice.start - begun.get(key, 0))
                begun[key] = param_slice.stop
            self._fill_chunk(unit, chunk, wanted, sources, is_whole=is_whole)
        for (index, kind), source in sources.items():
            _skip(source, unit.layout.slots[index].numel - begun.get((index, kind), 0))

    def _kinds(self, unit: Unit, slot: Slot, sources: Mapping[tuple[int, str], ElementsInOrder]) -> list[str]:
        return [kind for kind in (WEIGHT, *self.names_of(unit, slot)) if (slot.index, kind) in sources]

    def _fill_chunk(
        self,
        unit: Unit,
        chunk: Chunk,
        wanted: Sequence[tuple[ParameterSlice, str]],
        sources: Mapping[tuple[int, str], ElementsInOrder],
        *,
        is_whole: bool,
    ) -> None:
        lease = self.lease(unit, chunk, reads=not is_whole)
        workspace = lease.workspace
        try:
            if is_whole:
                clear(workspace.weight)
            else:
                weights = self.bring_weights(unit, chunk, workspace.weight) if workspace.needs_weight else None
                lease.wait()
                if weights is not None:
                    weights.wait()
            for param_slice, kind in wanted:
                source, plain = sources[param_slice.slot.index, kind], _plain(workspace, kind)
                for span in _spans(param_slice):
                    if plain is not None:
                        _take(source, plain[span])
                        continue
                    values = torch.empty(span.stop - span.start, dtype=torch.float32, device="cpu")
                    _take(source, values)
                    workspace.write(kind, span, values)
            written: Handle | None = None
            if any(kind == WEIGHT for _, kind in wanted):
                workspace.cast_main()
                if unit.flat is not None:
                    unit.weights_of(chunk).copy_(workspace.weight)
                written = self.write_weights(unit, chunk, workspace.weight)
            lease.write_back([] if written is None else [written])
        except BaseException:
            lease.discard()
            raise


def _weights_in_place(unit: Unit, chunk: Chunk) -> torch.Tensor | None:
    """The chunk's model weights where they rest, if that is host memory that a workspace can have."""
    if not unit.is_persistent or unit.flat is None or unit.flat.tensor().device.type != "cpu":
        return None
    return unit.weights_of(chunk)


def _plain(workspace: ChunkBuffer, kind: str) -> torch.Tensor | None:
    """Where the workspace has these numbers as they are, in host memory; None if they have to be computed."""
    found = workspace.main if kind == WEIGHT else workspace.states[kind]
    is_plain = found is not None and found.dtype == torch.float32 and found.device.type == "cpu"
    return found if is_plain else None


def _take(source: ElementsInOrder, target: torch.Tensor) -> None:
    # By NumPy: torch would copy with all its threads, which wait for each other where something else computes.
    filled = 0
    into = target.numpy()
    while filled < into.size:
        part = source.some(into.size - filled)
        into[filled : filled + part.numel()] = part.to(torch.float32).numpy()
        filled += part.numel()


def _skip(source: ElementsInOrder, numel: int) -> None:
    while numel > 0:
        numel -= source.some(numel).numel()


def _spans(param_slice: ParameterSlice) -> Iterator[slice]:
    for start in range(0, param_slice.numel, _PART_NUMEL):
        yield slice(param_slice.offset + start, param_slice.offset + min(start + _PART_NUMEL, param_slice.numel))


@dataclass(eq=False)
class GatheredStream:
    """`RecordStream.parts` of what all ranks keep, for the first one inside `leading`, while the others are in `follow`.

    Each unit comes shard by shard, in the order of memory. Nothing else may be exchanged meanwhile. Between units the others
    hear that the first rank is still there: it may write for longer than the process group's timeout.
    """

    _own: RecordStream
    _shards: Shards
    _ranks: Ranks
    _units: Sequence[Unit]
    """All units, by index."""
    _turn: threading.Lock = field(default_factory=threading.Lock)
    """Of the first rank's threads: who talks to the others."""
    _failed: int | None = None
    """A rank that could not read its shard."""

    def parts(self, units: Iterable[Unit], ahead_bytes: int = AHEAD_BYTES) -> Iterator[Part]:
        """See `RecordStream.parts`. The generator must be closed before anything else is exchanged.

        Raises:
            RankError: another rank could not read its shard, or has ended.
        """
        for unit in units:
            with self._turn:
                self._ranks.all_gather_ints(_SHARING, [unit.index])
                yield from self._of(unit, ahead_bytes)

    def _of(self, unit: Unit, ahead_bytes: int) -> Iterator[Part]:
        order = sorted(range(self._shards.num), key=lambda shard: self._shards.span(unit, shard))
        left = deque(order)
        try:
            while left:
                if left[0] == self._ranks.index:
                    yield from self._own.parts([unit], ahead_bytes)
                    left.popleft()
                    continue
                part = self._receive(unit, left[0])
                if part is None:
                    left.popleft()
                else:
                    yield part
        finally:  # nobody is left waiting to send
            for rank in left:
                while rank != self._ranks.index and self._receive(unit, rank) is not None:
                    pass
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise RankError(
                _SHARING,
                f"rank {self._ranks.members[failed]} cannot read its shard of {unit.name}",
                rank=self._ranks.number,
                cure=_CURE,
            )

    def _receive(self, unit: Unit, rank: int) -> Part | None:
        head = torch.empty(3, dtype=torch.int64, device="cpu")
        self._ranks.receive(_SHARING, head, rank)
        slot, kind, numel = head.tolist()
        if slot < 0:
            self._failed = rank if slot == _FAILED else self._failed
            return None
        values = torch.empty(numel, dtype=torch.float32, device="cpu")
        self._ranks.receive(_SHARING, values, rank)
        return Part(unit, unit.layout.slots[slot], self._own.kinds_of(unit)[kind], values)

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Inside the ``with`` block the others are in `follow`, however long it takes."""
        try:
            with pulse(self._beat):
                yield
        finally:
            self._ranks.all_gather_ints(_SHARING, [_OVER])

    def _beat(self) -> None:
        with self._turn:
            self._ranks.all_gather_ints(_SHARING, [_WAIT])

    def follow(self) -> None:
        """Send what the first rank asks for, until it leaves `leading`. What goes wrong here is raised then."""
        error: Exception | None = None
        while (index := self._ranks.all_gather_ints(_SHARING, [_OVER])[0][0]) != _OVER:
            if index == _WAIT:
                continue
            unit = self._units[index]
            last = _OVER
            try:
                kinds = self._own.kinds_of(unit)
                for part in self._own.parts([unit]):
                    self._send(part.slot.index, kinds.index(part.kind), part.values.numel())
                    self._ranks.send(_SHARING, part.values.contiguous(), 0)
            except RankError:
                raise
            except Exception as problem:
                error, last = error or problem, _FAILED
            self._send(last, 0, 0)
        if error is not None:
            raise error

    def _send(self, *head: int) -> None:
        self._ranks.send(_SHARING, torch.tensor(head, dtype=torch.int64, device="cpu"), 0)
