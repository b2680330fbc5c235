"""Reads or replaces all main weights and states of a unit in one pass over its records, for checkpoints.

Working memory is buffers of the staging pool. The caller has flushed pending updates of the unit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from infinity.checkpoint.arrays import ElementsInOrder
from infinity.distributed.agreement import Leader
from infinity.distributed.collectives import Ranks
from infinity.errors import RankError
from infinity.numerics.chunk_format import WEIGHT, ChunkBuffer
from infinity.paging.parameter_cache import ParameterCache
from infinity.paging.rank_weights import align_ranks
from infinity.tiers.state_store import Lease, StateStore, clear
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import Chunk, ParameterSlice, Slot
from infinity.units.shards import Shards
from infinity.units.unit import Unit
from infinity.updates.job import ParameterState
from swapper import Handle

_SHARING = "reading all shards of the states"
_PARTS, _FETCH, _MAIN_WEIGHT = range(3)
"""What rank 0 announces."""
_OVER, _FAILED = -1, -2
"""What ends a unit's shard, in place of a slot's index."""
_CURE = "See the output of that rank"
# Elements of a part: 2 MiB of fp32, as much as a chunk of an array's file. A multiple of the block in which states are
# stored rounded, so that a part never begins inside of one.
_PART_NUMEL = 1 << 19
AHEAD_BYTES = 32 << 20
"""Bytes of records that are read ahead while one is being used, if as many staging buffers are free."""


class Part(NamedTuple):
    """Consecutive elements of a parameter's main weight or state, in the order of memory."""

    unit: Unit
    slot: Slot
    kind: str
    start: int
    """Number of the first element."""
    values: torch.Tensor
    """fp32, 1-D, on the CPU. May be a view of a staging buffer: valid until you ask for the next part."""


class _Content(NamedTuple):
    """A part of a chunk's record."""

    param_slice: ParameterSlice
    kind: str

    @property
    def key(self) -> tuple[int, str]:
        return self.param_slice.slot.index, self.kind


class _Opened(NamedTuple):
    unit: Unit
    lease: Lease
    await_weights: Callable[[], None]
    wanted: Sequence[_Content]


@dataclass(eq=False)
class RecordStream:
    """Reads and writes records of whole units, chunk by chunk."""

    records: StateStore
    weights: WeightStore | None
    """Model weights outside of flat buffers; None if all units are resident."""
    states: Mapping[tuple[int, int], ParameterState]
    """(unit index, slot index) -> which states a parameter has."""
    chunks: Sequence[Sequence[Chunk]]
    """Per unit, the chunks whose records this process keeps: its shard."""

    def names_of(self, unit: Unit, slot: Slot) -> Sequence[str]:
        """The names of a parameter's element-wise states; none before its first update."""
        state = self.states.get((unit.index, slot.index))
        if state is None or state.is_fresh:
            return ()
        return [name for name in self.records.names_of(unit) if state.names is None or name in state.names]

    def kinds_of(self, unit: Unit) -> list[str]:
        """`WEIGHT` and all names of states in the unit's records, whether a parameter has them yet or not."""
        return [WEIGHT, *self.records.names_of(unit)]

    def parts(
        self, units: Iterable[Unit], ahead_bytes: int = AHEAD_BYTES, only: Collection[tuple[int, str]] | None = None
    ) -> Generator[Part, None, None]:
        """Yield main weights and states of these units. Each kind of each parameter comes in the order of memory.

        Args:
            units: whose.
            ahead_bytes: of records that are read ahead, if staging buffers are free. The next record always is.
            only: the wanted ones, as (slot index, kind); None: all.
        """
        waiting = ((unit, chunk) for unit in units for chunk in self.chunks[unit.index])
        slots = None if only is None else {index for index, _ in only}
        opened: deque[_Opened] = deque()
        try:
            for unit, chunk in waiting:
                # By parameter first: reading one of a unit with many, such as experts, must not ask for states of all.
                slices = [each for each in chunk.slices if slots is None or each.slot.index in slots]
                wanted = [each for each in self._contents(unit, slices) if only is None or each.key in only]
                if not wanted:
                    continue
                # Updates take buffers of the same pool. Whoever holds some and waits for more may wait forever. So this
                # blocks only while it holds none, and otherwise uses up its oldest record to free one.
                while (ahead := self._open(unit, chunk, wanted, is_blocking=not opened)) is None:
                    yield from self._parts_of(opened.popleft())
                opened.append(ahead)
                if sum(each.lease.workspace.record.nbytes for each in opened) > ahead_bytes and len(opened) > 1:
                    yield from self._parts_of(opened.popleft())
            while opened:
                yield from self._parts_of(opened.popleft())
        finally:
            # The caller has closed the generator before its end, or a read has failed.
            for left in opened:
                left.lease.discard()

    def _contents(self, unit: Unit, slices: Iterable[ParameterSlice]) -> Iterator[_Content]:
        """What a chunk's record holds of these slices."""
        for param_slice in slices:
            yield from (_Content(param_slice, kind) for kind in (WEIGHT, *self.names_of(unit, param_slice.slot)))

    def _open(self, unit: Unit, chunk: Chunk, wanted: Sequence[_Content], *, is_blocking: bool) -> _Opened | None:
        # If the main weight is split (bf16 weight and remainder), the record alone is half of it. The model weight is
        # then read beside it, or used where it rests in host memory.
        is_in_place = unit.is_persistent and unit.flat is not None and unit.flat.tensor().device.type == "cpu"
        in_place = unit.weights_of(chunk) if is_in_place else None
        lease = self.records.open(unit, chunk, is_blocking=is_blocking, weight=in_place, needs_scratch=False)
        if lease is None:
            return None
        await_weights = _nothing
        try:
            if in_place is None and any(kind == WEIGHT for _, kind in wanted):
                await_weights = self._bring_weights(unit, chunk, lease.workspace)
        except BaseException:
            lease.discard()
            raise
        return _Opened(unit, lease, await_weights, wanted)

    def _bring_weights(self, unit: Unit, chunk: Chunk, workspace: ChunkBuffer) -> Callable[[], None]:
        """Begin to read the chunk's model weights, if they are a part of the main weights. Returns what waits for that."""
        if workspace.needs_weight and self.weights is not None and not unit.is_persistent:
            read = self.weights.read_chunk(unit, chunk, workspace.weight)
            return _nothing if read is None else read.wait
        if workspace.needs_weight:
            workspace.weight.copy_(unit.weights_of(chunk))
        return _nothing

    def _parts_of(self, opened: _Opened) -> Iterator[Part]:
        unit, lease, await_weights, wanted = opened
        workspace = lease.workspace
        try:
            lease.wait()
            await_weights()
            for param_slice, kind in wanted:
                plain = _plain(workspace, kind)
                for span in _spans(param_slice):
                    # fp32 in host memory: the part is a view of the record. Else it is decoded (rounded states, split
                    # main weights) or copied from the GPU.
                    values = _part_of(plain, span)
                    if plain is None:
                        workspace.read(kind, span, values)
                    start = param_slice.start + span.start - param_slice.offset
                    yield Part(unit, param_slice.slot, kind, start, values)
        finally:
            lease.discard()

    @contextlib.contextmanager
    def changing(
        self, unit: Unit, chunk: Chunk, *, reads: bool = True, brings_weights: bool = False, main_only: bool = False
    ) -> Iterator[tuple[ChunkBuffer, list[Handle]]]:
        """A chunk in working memory. It is stored at the end of the ``with`` block, unless that raises.

        Args:
            unit, chunk: which one.
            reads: False: the record begins as zeros.
            brings_weights: also read model weights that are a part of the main weights.
            main_only: the states are blank, and are not stored.

        Yields:
            The working memory, and a list that takes other writes from it.
        """
        lease = self.records.open(unit, chunk, is_blocking=True, reads=reads)
        if lease is None:
            raise RuntimeError("a blocking lease gave nothing")
        writes: list[Handle] = []
        try:
            await_weights = self._bring_weights(unit, chunk, lease.workspace) if brings_weights else _nothing
            lease.wait()
            await_weights()
            yield lease.workspace, writes
            lease.write_back(writes, main_only=main_only)
        except BaseException:
            lease.discard()
            raise

    def fill(self, unit: Unit, sources: Mapping[tuple[int, str], ElementsInOrder]) -> None:
        """Replace main weights and states of a unit, and its model weights by their casts.

        If ranks keep shards, only this rank's is replaced: `gather_weights` brings the other weights.

        Args:
            unit: is paged out, resident, or open.
            sources: (slot index, kind) -> elements in the order of memory. Other slots and kinds keep their values.
        """
        # A source is read from front to back and has the whole parameter. For a parameter of 10 elements, of which this
        # rank's chunks have [2, 6) and [6, 8): skip 2, read 4, read 2, and skip 2 at the end. So a tile's source, which
        # goes on with the next tile, is left where that begins.
        begun = dict.fromkeys(sources, 0)
        for chunk in self.chunks[unit.index]:
            contents = list(self._contents(unit, chunk.slices))
            wanted = [each for each in contents if each.key in sources]
            for each in wanted:
                _skip(sources[each.key], each.param_slice.start - begun[each.key])
                begun[each.key] = each.param_slice.stop
            if wanted:
                self._fill_chunk(unit, chunk, wanted, sources, is_whole=len(wanted) == len(contents))
        for (index, kind), source in sources.items():
            _skip(source, unit.layout.slots[index].numel - begun[index, kind])

    def _fill_chunk(
        self,
        unit: Unit,
        chunk: Chunk,
        wanted: Sequence[_Content],
        sources: Mapping[tuple[int, str], ElementsInOrder],
        *,
        is_whole: bool,
    ) -> None:
        """``is_whole``: everything that the chunk holds is replaced, so its record need not be read."""
        with self.changing(unit, chunk, reads=not is_whole, brings_weights=not is_whole) as (workspace, writes):
            if is_whole:
                # The padding between parameters is zeros; a staging buffer holds what was in it before.
                clear(workspace.weight)
            for each in wanted:
                plain = _plain(workspace, each.kind)
                for span in _spans(each.param_slice):
                    values = _part_of(plain, span)
                    _fill(sources[each.key], values)
                    if plain is None:
                        workspace.write(each.kind, span, values)
            if any(kind == WEIGHT for _, kind in wanted):
                # Where main weights are split, `write` has written the model weights already.
                workspace.cast_main()
                if unit.flat is not None:
                    # An open unit computes with its flat buffer: it must have the same weights as the store.
                    unit.weights_of(chunk).copy_(workspace.weight)
                if self.weights is not None and not unit.is_persistent:
                    written = self.weights.write_chunk(unit, chunk, workspace.weight.cpu())
                    writes += [] if written is None else [written]


def _nothing() -> None: ...


def _plain(workspace: ChunkBuffer, kind: str) -> torch.Tensor | None:
    """The tensor of the workspace with these values, if it is fp32 in host memory; None if they have to be decoded."""
    found = workspace.main if kind == WEIGHT else workspace.states[kind]
    is_plain = found is not None and found.dtype == torch.float32 and found.device.type == "cpu"
    return found if is_plain else None


def _part_of(plain: torch.Tensor | None, span: slice) -> torch.Tensor:
    """A view of ``plain``, or new memory for as many elements."""
    return torch.empty(span.stop - span.start, dtype=torch.float32, device="cpu") if plain is None else plain[span]


def _fill(source: ElementsInOrder, target: torch.Tensor) -> None:
    # NumPy copies with one thread. torch would use all its OpenMP threads, which wait for each other if something else
    # computes at the same time.
    filled, into = 0, target.numpy()
    for part in source.take(into.size):
        into[filled : filled + part.numel()] = part.to(torch.float32).numpy()
        filled += part.numel()


def _skip(source: ElementsInOrder, numel: int) -> None:
    for _ in source.take(numel):
        pass


def _spans(param_slice: ParameterSlice) -> Iterator[slice]:
    for start in range(0, param_slice.numel, _PART_NUMEL):
        yield slice(param_slice.offset + start, param_slice.offset + min(start + _PART_NUMEL, param_slice.numel))


@dataclass(eq=False)
class GatheredStream:
    """Reads for rank 0 what all ranks keep, while rank 0 leads the others (`Leader`).

    `parts` are `RecordStream.parts` over the shards of all ranks. Whatever rank 0 fetches of the weights, and main weights
    (`reading`), all ranks read as well, and only rank 0 keeps it. Nothing else may be exchanged meanwhile.
    """

    # What goes between ranks, while rank 0 reads unit 7 with two ranks:
    #   all ranks: all_gather of integers, of which rank 0's count: (_PARTS, 7, 0)
    #   rank 1 -> 0, per part: (slot index, index of the kind, first element, number of elements), then these in fp32
    #   rank 1 -> 0, at the end of its shard: (-1, 0, 0, 0), or (-2, 0, 0, 0) if it could not read it
    # Rank 0 takes shards in the order in which they lie in the unit, its own included.

    _own: RecordStream
    _shards: Shards
    _ranks: Ranks
    _parameter_cache: ParameterCache
    _read_main_weight: Callable[[Unit, Slot], object]
    """All ranks call it, and each gets all of the weight."""
    _failed: int | None = None
    """A rank that could not read its shard of the present unit."""

    def __post_init__(self) -> None:
        self._leader = Leader(self._ranks, _SHARING)

    def parts(self, units: Iterable[Unit], ahead_bytes: int = AHEAD_BYTES) -> Generator[Part, None, None]:
        """See `RecordStream.parts`. Close the generator before anything else is exchanged.

        Raises:
            RankError: another rank could not read its shard, or has ended.
        """
        for unit in units:
            with self._leader.announced(_PARTS, unit.index):
                yield from self._parts_of_unit(unit, ahead_bytes)

    def _parts_of_unit(self, unit: Unit, ahead_bytes: int) -> Iterator[Part]:
        order = sorted(range(self._shards.num), key=lambda shard: self._shards.span(unit, shard))
        received = {rank: iter(functools.partial(self._receive, unit, rank), None) for rank in order}
        received.pop(self._ranks.index)
        try:
            for rank in order:
                yield from received[rank] if rank in received else self._own.parts([unit], ahead_bytes)
        finally:
            # If the caller stops here, the other ranks still send the rest of this unit, and would wait forever. So it
            # is received and dropped.
            for _ in itertools.chain.from_iterable(received.values()):
                pass
        if self._failed is not None:
            failed, self._failed = self._failed, None
            problem = f"rank {self._ranks.members[failed]} cannot read its shard of {unit.name}"
            raise RankError(_SHARING, problem, rank=self._ranks.number, cure=_CURE)

    def _receive(self, unit: Unit, rank: int) -> Part | None:
        head = torch.empty(4, dtype=torch.int64, device="cpu")
        self._ranks.receive(_SHARING, head, rank)
        slot, kind, start, numel = head.tolist()
        if slot < 0:
            self._failed = rank if slot == _FAILED else self._failed
            return None
        values = torch.empty(numel, dtype=torch.float32, device="cpu")
        self._ranks.receive(_SHARING, values, rank)
        return Part(unit, unit.layout.slots[slot], self._own.kinds_of(unit)[kind], start, values)

    def run(self, what: str, function: Callable[[], None]) -> None:
        """Call ``function`` on the first rank, while the others do what it announces. What goes wrong is raised on all."""

        def lead() -> None:
            with self._parameter_cache.announcing(lambda unit: self._leader.announced(_FETCH, unit.index)):
                function()

        self._leader.run(what, lead, self._do)
        align_ranks(self._parameter_cache)

    def reading(self, unit: Unit, slots: Sequence[Slot]) -> contextlib.AbstractContextManager[None]:
        """Inside the ``with`` block all ranks read main weights: of one parameter, if the first one leads the others."""
        if not self._leader.is_leading:
            return contextlib.nullcontext()
        (slot,) = slots
        return self._leader.announced(_MAIN_WEIGHT, unit.index, slot.index)

    def _do(self, kind: int, index: int, slot: int) -> None:
        """What rank 0 has announced."""
        unit = self._parameter_cache.units[index]
        if kind == _FETCH:
            self._parameter_cache.fetch_anew(unit)
        elif kind == _MAIN_WEIGHT:
            self._read_main_weight(unit, unit.layout.slots[slot])
        else:
            self._send_parts(unit)

    def _send_parts(self, unit: Unit) -> None:
        try:
            kinds = self._own.kinds_of(unit)
            for part in self._own.parts([unit]):
                self._send(part.slot.index, kinds.index(part.kind), part.start, part.values.numel())
                self._ranks.send(_SHARING, part.values.contiguous(), 0)
        except RankError:  # the process group has failed, so rank 0 cannot be told
            raise
        except Exception:  # rank 0 waits for the end of this shard, and raises then
            self._send(_FAILED, 0, 0, 0)
            raise
        self._send(_OVER, 0, 0, 0)

    def _send(self, *head: int) -> None:
        self._ranks.send(_SHARING, torch.tensor(head, dtype=torch.int64, device="cpu"), 0)
