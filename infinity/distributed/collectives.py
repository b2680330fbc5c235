"""What processes that train together exchange.

Knows process groups, and memory and lines that processes of one machine have in common; must not know what is exchanged.

[Note: ranks] Every rank runs the same script on its own data, each on its own drives. From ZeRO's stage 1 on, main weights and
states are divided (`infinity.units.shares`), in stage 3 also model weights that rest on drives. All else each rank holds whole.
What they have in common:
  * When `initialize` takes the model over, all ranks take the weights and buffers of rank 0, as DDP does.
  * When a backward has ended whose gradients are to be used, ranks tell each other which parameters got gradients since the
    last time, and average those: unit by unit in the order of units, parameter by parameter. The order follows from the
    model alone. It must not follow from reads, updates or prefetches, which are early or late on each rank for itself. So no
    thread but the one that trains talks to other ranks, but for pulls, which have no order (`infinity.distributed.pulls`),
    and, where states are divided, one that averages units beside the backward, the last one first
    (`infinity.gradients.gradient_exchange`).
  * Before a step changes anything, ranks compare the norm of all gradients, bit for bit. Clipping and skipped steps (fp16)
    follow from that norm, so all ranks do the same; and where one would do something else, because its script has changed
    a gradient, all of them raise.
  * When a step ends in which each has updated its share, the new weights of all go to all: of units that were updated in
    backward in the order of those updates, which all ranks have agreed on, then of the others in the order of units. Where
    weights are divided, ranks meet instead, before and after (`infinity.tiers.weight_exchange`).
  * Main weights and states that are divided are put together when somebody reads them, which all ranks do together.
  * Nothing else. With equal gradients, the engine's promise (the same bits as plain torch) makes equal weights on all.

[Note: the order of sums] Each rank multiplies its gradients by 1 / number of ranks, as DDP does. Ranks are then added in
their order, ((0 + 1) + 2) + ..., each element on one rank, and what comes out goes to all. So all have the same bits, and an
element's do not follow from where it lies. With two ranks DDP's sums are the same bit for bit; with more, gloo's ring begins
with another rank in each part of its buckets, and last bits differ.

[Note: meeting] Each exchange begins with a few numbers that say what it is. A rank that is elsewhere in its script (another
number of backwards, an exception that it caught) is thus found by all, before gradients of two kinds are added up. One that has
ended closes its connections, which ends the waiting of the others; one that hangs is waited for as long as the group's timeout.

[Note: what is sent] Gradients and new weights lie in memory that the processes of a machine share (`infinity.distributed.
shared_blocks`), and what they tell each other goes over lines (`infinity.distributed.lines`). What goes to other machines is
gloo's, and what is rare.
"""

from __future__ import annotations

import itertools
import struct
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from infinity.distributed.causes import Causes
from infinity.distributed.lines import Lines
from infinity.distributed.process_groups import (
    call_torch,
    default_group,
    group_of,
    group_timeout,
    num_processes,
    world_group,
)
from infinity.distributed.shared_blocks import SharedBlocks
from infinity.errors import RankError
from infinity.numerics.raw_bytes import raw_bytes
from swapper.sync.lifetimes import when_gone

_BLOCK_NUMEL = 1 << 20
"""Elements that are exchanged at a time. Twice as many stay in memory for it; as many come besides from other machines."""
_MOST_ITEM_BYTES = 16
"""Of an element."""
_NUM_BESIDE = 30
"""So many numbers go with the label of a meeting; of more, all go after it."""
_STEP_NUMEL = 2048
"""Blocks of what is gathered are multiples of so many elements, which drives can write without reading first."""
_LONG = timedelta(days=3650)
_CURE = "All ranks have to make the same calls in the same order: as many backwards and steps, each on its own data"


class Ranks:
    """The processes that train together; see the module's notes. Only the thread that trains calls it, but for what says else.

    Everything raises RankError if another process has ended, does not come, or comes with something else.
    """

    def __init__(
        self,
        index: int = 0,
        num: int = 1,
        group: Any = None,
        causes: Causes | None = None,
        members: Sequence[int] | None = None,
        beside: Ranks | None = None,
    ) -> None:
        """
        Args:
            index: this process.
            num: how many there are.
            group: torch's process group of all of them, which takes tensors on the CPU; None: the default one.
            causes: know why a rank has ended.
            members: of each, its number among all processes; None: these are all.
            beside: the same processes, which exchange other things; what is sent is counted together.
        """
        self.index = index
        self.num = num
        self.members = tuple(range(num) if members is None else members)
        self.services: dict[str, Any] = {}
        """What others have made for these ranks, once for all who ask, by name."""
        self._group_reference = weakref.ref(group) if group is not None else None
        self.causes = causes
        """Know why a rank has ended: errors name the first cause."""
        self._lines: Lines | None = None
        self._are_neighbours = False
        """Whether each has a line to each other one."""
        self._blocks: SharedBlocks | None = None
        self.sent_bytes: Counter[str] = Counter() if beside is None else beside.sent_bytes
        """Bytes of tensors that this rank has sent to the others so far: "gradients", "norms" (parts of gradients for the norm of
        a whole one), "momenta", "weights" (new ones), "fetches" (weights that others asked for), "states". Each copy counts: what
        goes to three ranks counts three times."""

    @property
    def number(self) -> int:
        """This process among all, by which messages name it."""
        return self.members[self.index]

    def names(self, indices: Iterable[int]) -> str:
        """The numbers of some of them, for messages."""
        return ", ".join(str(self.members[index]) for index in indices)

    def _group(self) -> Any:
        if self._group_reference is None:
            return None
        group = self._group_reference()
        if group is None:  # torch would take the default group
            raise RuntimeError("the process group has been destroyed")
        return group

    @property
    def torch_group(self) -> Any:
        """As ``torch.distributed`` has it, for scripts; made if there is none."""
        if self._group_reference is None and self.num == 1 < num_processes():
            group = group_of(self.members, use_local_synchronization=True)  # of one, who knows its name
            self._group_reference = weakref.ref(group)
        return world_group() if self._group_reference is None else self._group()

    @property
    def has_group(self) -> bool:
        """Whether what they exchange goes through has not been destroyed."""
        return self._group_reference is None or self._group_reference() is not None

    @property
    def has_failed(self) -> bool:
        """Whether an error ends this process."""
        return self.causes is not None and self.causes.has_told

    def ask(self, causes: Causes) -> None:
        """Errors name the first cause from now on."""
        self.causes = causes

    def check_neighbours(self) -> None:
        """Raise RankError if the process of a rank on this machine has ended."""
        why = self.causes.gone() if self.causes is not None else None
        if why is not None:
            raise RankError("looking at the others", f"another rank has ended: {why}", rank=self.number, cure=_CURE)

    def meet(
        self, what: str, values: Sequence[int] = (), meanwhile: Callable[[], None] | None = None
    ) -> list[list[int]]:
        """Wait until all ranks come with the same ``what``, and as many ``values`` (of 64 bits). Returns those of each.

        ``meanwhile``: called often until they have, where all are of this machine.
        """
        if self.num == 1:
            return [list(values)]
        label = [zlib.crc32(what.encode()), len(values)]
        beside = [*values, *[0] * _NUM_BESIDE][:_NUM_BESIDE]
        found = self._gathered(what, label + beside, meanwhile)
        others = self.names(rank for rank, other in enumerate(found) if list(other[:2]) != label)
        if others:
            raise RankError(what, f"rank {others} came with something else", rank=self.number, cure=_CURE)
        if len(values) > _NUM_BESIDE:
            return self._gathered(what, values)
        return [other[2 : 2 + len(values)] for other in found]

    def _gathered(
        self, what: str, values: Sequence[int], meanwhile: Callable[[], None] | None = None
    ) -> list[list[int]]:
        lines = self._neighbours(what)
        if not self._are_neighbours:
            return self._gathered_by_gloo(what, values)
        own = struct.pack(f"{len(values)}q", *values)
        try:
            found = lines.tell_all(own, meanwhile) | {self.index: own}
        except OSError as error:
            raise self._failed(what, error) from error
        # Of another length is what is no meeting.
        return [
            [*struct.unpack(f"{len(values)}q", found[rank])] if len(found[rank]) == len(own) else []
            for rank in range(self.num)
        ]

    def _gathered_by_gloo(self, what: str, values: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(values, dtype=torch.int64, device="cpu")
        found = torch.empty(self.num * len(values), dtype=torch.int64, device="cpu")
        self._run(what, "all_gather_into_tensor", found, own)
        return found.view(self.num, -1).tolist()

    def _neighbours(self, what: str) -> Lines:
        """To those of this machine. Made by the first meeting or exchange, in which all ranks are at the same point."""
        if self._lines is None:
            lines = Lines(group_timeout())
            try:
                reached = lines.connect(self.index, self._gathered_by_gloo(what, lines.listen()))
                of_all = self._gathered_by_gloo(what, reached)
                lines.accept([rank for rank, of_rank in enumerate(of_all) if of_rank[self.index]])
                of_all = self._gathered_by_gloo(what, [len(lines)])
            except BaseException:
                lines.close()
                raise
            when_gone(self._group() or default_group(), lines.close)
            self._are_neighbours = all(found == [self.num - 1] for found in of_all)
            self._lines = lines
        return self._lines

    def gather(self, what: str, data: bytes) -> list[bytes]:
        """What each rank comes with, which may be of any length: on all of them, in memory."""
        if self.num == 1:
            return [data]
        sizes = [found[0] for found in self.meet(what, [len(data)])]
        own = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = torch.empty((self.num, len(own)), dtype=torch.uint8, device="cpu")
        if len(own):
            self._run(what, "all_gather_into_tensor", found.view(-1), own)
        return [bytes(row[:size].numpy()) for row, size in zip(found, sizes, strict=True)]

    def average(self, what: str, values: torch.Tensor, wire: torch.dtype = torch.float32) -> None:
        """Replace ``values`` (1-D, on the CPU, floating) by the mean over all ranks; see `reduce`.

        All ranks must be known to come with as many values: see `meet`.
        """
        if self.num == 1:
            return
        gathered = values.dtype if wire == torch.float32 else wire
        for start in range(0, values.numel(), _BLOCK_NUMEL):
            block = values[start : start + _BLOCK_NUMEL]
            cuts = [block.numel() * rank // self.num for rank in range(self.num + 1)]
            parts = list(itertools.pairwise(cuts))
            self.reduce(what, block, parts, wire)
            self.gather_in_memory(what, block, parts, kind="gradients", dtype=gathered)

    def reduce(
        self, what: str, values: torch.Tensor, parts: Sequence[tuple[int, int]], wire: torch.dtype = torch.float32
    ) -> None:
        """Each rank gets the mean over all ranks of its part of ``values``; its other parts stay what they are.

        Args:
            what: for messages.
            values: 1-D, on the CPU, floating; as many on all ranks. They are added in fp32.
            parts: of each rank, elements [start, stop). They are the same on all ranks.
            wire: as what they are sent, and the dtype to which the mean is rounded: so all that is sent of it is exact.
        """
        longest = max(stop - start for start, stop in parts)
        width = min(-(-_BLOCK_NUMEL // self.num), longest)
        received = torch.empty(self.num * width, dtype=wire, device="cpu")
        blocks = self._shared_blocks()
        first, last = parts[self.index]
        for offset in range(0, longest, max(width, 1)):
            num = min(width, longest - offset)
            to = blocks.begin(self.num * num, wire).view(self.num, num)
            own = values[min(first + offset, last) : min(first + offset + num, last)]
            is_in_place = own.dtype == wire == torch.float32 and self.num > 1
            for rank, (start, stop) in enumerate(parts):
                block = values[min(start + offset, stop) : min(start + offset + num, stop)]
                block = block if block.dtype == wire else block.float()
                row = own if is_in_place and rank == self.index else to[rank, : block.numel()]
                torch.mul(block, 1.0 / self.num, out=row)
            rows = self._swap_rows(what, to.unbind(), received[: to.numel()].view_as(to).unbind(), blocks)
            self.sent_bytes["gradients"] += (self.num - 1) * num * to.element_size()
            rows = [row[: own.numel()] for row in rows]
            if is_in_place:
                # Where this rank comes first or second, sums need no other memory than its own; later, they take its row.
                total = own if self.index < 2 else rows[self.index]
                rows[self.index] = own
                torch.add(rows[0], rows[1], out=total)
                left = rows[2:]
            else:
                total, left = rows[0].to(torch.float32, copy=True), rows[1:]
            for row in left:
                total.add_(row)
            if total is not own:
                own.copy_(total.to(wire))

    def gather_parts(
        self,
        what: str,
        parts: Sequence[tuple[int, int]],
        read: Callable[[int, torch.Tensor], None],
        write: Callable[[int, torch.Tensor], None],
        *,
        dtype: torch.dtype,
        kind: str = "gradients",
    ) -> None:
        """All ranks get the parts of all, block by block.

        Args:
            what: for messages.
            parts: of each rank, elements [start, stop). They are the same on all ranks.
            read: puts the elements from a start on into a tensor (1-D, on the CPU): some of this rank's part.
            write: takes elements from a start on, which another rank has: it reads them, and returns when it has.
            dtype: of the elements.
            kind: under which `sent_bytes` counts it.
        """
        longest = max(stop - start for start, stop in parts)
        width = min(max(_BLOCK_NUMEL // self.num // _STEP_NUMEL, 1) * _STEP_NUMEL, longest)
        received = torch.empty((self.num, width), dtype=dtype, device="cpu")
        blocks = self._shared_blocks()
        first, last = parts[self.index]
        for offset in range(0, longest, max(width, 1)):
            num = min(width, longest - offset)
            sent = blocks.begin(num, dtype)
            own = sent[: max(min(num, last - first - offset), 0)]
            if own.numel():
                read(first + offset, own)
            rows = self._swap_rows(what, [sent] * self.num, received[:, :num].unbind(), blocks)
            self.sent_bytes[kind] += (self.num - 1) * num * sent.element_size()
            for rank, (start, stop) in enumerate(parts):
                count = min(num, stop - start - offset)
                if rank != self.index and count > 0:
                    write(start + offset, rows[rank][:count])

    def gather_in_memory(
        self,
        what: str,
        values: torch.Tensor,
        parts: Sequence[tuple[int, int]],
        *,
        kind: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        """As `gather_parts`, where all parts lie in ``values`` (1-D, on the CPU). ``dtype``: sent as; None: as it is."""

        def read(start: int, target: torch.Tensor) -> None:
            target.copy_(values[start : start + target.numel()])

        def write(start: int, found: torch.Tensor) -> None:
            values[start : start + found.numel()].copy_(found)

        self.gather_parts(what, parts, read, write, dtype=dtype or values.dtype, kind=kind)

    def swap(self, what: str, sent: torch.Tensor, *, kind: str) -> torch.Tensor:
        """Row r of ``sent`` (one row for each rank, on the CPU, without gaps) goes to rank r. Returns what came, by rank.

        ``kind``: under which `sent_bytes` counts it, here and in `share`.
        """
        received = torch.empty_like(sent)
        received[self.index] = sent[self.index]
        self._swap_rows(what, sent.unbind(), received.unbind())
        self.sent_bytes[kind] += (self.num - 1) * sent[0].numel() * sent.element_size()
        return received

    def share(self, what: str, own: torch.Tensor, *, kind: str) -> torch.Tensor:
        """All get ``own`` (1-D, on the CPU, as long on all) of each rank, as rows."""
        found = torch.empty((self.num, own.numel()), dtype=own.dtype, device="cpu")
        self._run(what, "all_gather_into_tensor", found.view(-1), own)
        self.sent_bytes[kind] += (self.num - 1) * own.numel() * own.element_size()
        return found

    def collect(self, what: str, values: torch.Tensor, parts: Sequence[tuple[int, int]], to: int) -> None:
        """Rank ``to`` gets the parts of all into ``values`` (1-D, on the CPU); on the others nothing changes."""
        longest = max((stop - start for rank, (start, stop) in enumerate(parts) if rank != to), default=0)
        for offset in range(0, longest, _BLOCK_NUMEL):
            here = [
                values[min(start + offset, stop) : min(start + offset + _BLOCK_NUMEL, stop)] for start, stop in parts
            ]
            own = values[:0] if self.index == to else here[self.index]
            blocks = self._shared_blocks()
            sent = blocks.begin(own.numel(), own.dtype).copy_(own)
            nothing = sent[:0]
            wanted = here if self.index == to else [nothing] * self.num
            self.sent_bytes["norms"] += sent.numel() * sent.element_size()
            rows = self._swap_rows(what, [sent if rank == to else nothing for rank in range(self.num)], wanted, blocks)
            for rank, target in enumerate(wanted):
                if rank != self.index and rows[rank] is not target:
                    target.copy_(rows[rank])

    def send(self, what: str, tensor: torch.Tensor, to: int) -> None:
        """Another rank gets ``tensor`` (on the CPU, without gaps), which it asks for with `receive`; returns when it has."""
        self._run(what, "send", tensor, self.members[to])

    def receive(self, what: str, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor`` (on the CPU, without gaps) with what another rank gives to `send`."""
        self._run(what, "recv", tensor, self.members[source])

    def begin_send(self, what: str, tensor: torch.Tensor, to: int, tag: int) -> Any:
        """As `send`, from any thread; `finish` waits for its end. The other rank asks for it with the same ``tag``."""
        return self._begin(what, "isend", tensor, to, tag)

    def begin_receive(self, what: str, tensor: torch.Tensor, source: int | None, tag: int) -> Any:
        """As `receive`, from any thread; ``source`` None: from whichever rank comes next."""
        return self._begin(what, "irecv", tensor, source, tag)

    def _begin(self, what: str, name: str, tensor: torch.Tensor, other: int | None, tag: int) -> Any:
        try:
            member = None if other is None else self.members[other]
            return call_torch(name, tensor, member, group=self._group(), tag=tag)
        except (RuntimeError, ValueError) as error:  # as in `_run`
            raise self._failed(what, error) from error

    def finish(self, what: str, begun: Any, *, is_patient: bool = False) -> None:
        """Return when what was begun is over. ``is_patient``: however long that takes."""
        try:
            begun.wait(*([_LONG] if is_patient else []))
        except (RuntimeError, ValueError) as error:
            raise self._failed(what, error) from error

    def source_of(self, received: Any) -> int:
        """The rank from which what `begin_receive` began has come."""
        return int(received._source_rank())

    def _swap_rows(
        self,
        what: str,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        blocks: SharedBlocks | None = None,
    ) -> list[torch.Tensor]:
        """Row r of ``sent`` goes to rank r. Returns the rows that came, by rank; this rank's own is that of ``sent``.

        gloo's own exchanges of many go through memory of theirs, which takes processors' time.

        Args:
            what: for messages.
            sent: by rank, without gaps, or empty.
            received: memory for what comes, as long as that is.
            blocks: in which ``sent`` lies. Who shares them is told, and reads it where this rank's own row lies here.
        """
        rows = [sent[rank] if rank == self.index else received[rank] for rank in range(self.num)]
        begun, told = [], []
        for rank in (rank for rank in range(self.num) if rank != self.index):
            there = None if blocks is None else blocks.theirs(rank, rows[self.index], received[rank].numel())
            if there is not None:
                rows[rank] = there
                told.append(rank)
                continue
            if received[rank].numel():
                begun.append(self.begin_receive(what, received[rank], rank, 0))
            if sent[rank].numel():
                begun.append(self.begin_send(what, sent[rank], rank, 0))
        if blocks is not None and told:
            self._tell_rows(what, blocks, {rank: sent[rank] for rank in told}, rows)
        for each in begun:
            self.finish(what, each)
        return rows

    def _tell_rows(
        self, what: str, blocks: SharedBlocks, sent: Mapping[int, torch.Tensor], rows: Sequence[torch.Tensor]
    ) -> None:
        """Say what lies in this rank's block for others, by rank, and return when they have said so of theirs."""
        try:
            for rank, row in sent.items():
                blocks.tell(rank, what, row)
            wrong = blocks.hear(what, {rank: rows[rank] for rank in sent})
        except OSError as error:
            raise self._failed(what, error) from error
        if wrong:
            raise RankError(what, f"rank {self.names(wrong)} came with something else", rank=self.number, cure=_CURE)

    def _shared_blocks(self) -> SharedBlocks:
        """Made by the first exchange, in which all ranks are at the same point."""
        if self._blocks is None:
            num_bytes = _MOST_ITEM_BYTES * max(_BLOCK_NUMEL + self.num, _STEP_NUMEL)
            try:
                self._blocks = SharedBlocks(num_bytes, self._neighbours("sharing memory") if self.num > 1 else Lines())
            except OSError as error:
                raise self._failed("sharing memory", error) from error
        return self._blocks

    def take_from(self, what: str, source: int, tensor: torch.Tensor) -> None:
        """``tensor``, of any dtype, strides and device, becomes that of rank ``source``; written to only where it differs."""
        if self.num == 1:
            return
        if not 0 <= source < self.num:
            raise ValueError(f"{what}: rank {source}, and there are {self.num}. Take one from 0 to {self.num - 1}")
        flat = tensor.detach().cpu().reshape(-1)
        found = flat.clone() if self.index != source else flat.contiguous()
        raw = raw_bytes(found)
        for start in range(0, raw.numel(), 4 * _BLOCK_NUMEL):
            self._run(what, "broadcast", raw[start : start + 4 * _BLOCK_NUMEL], self.members[source])
        if self.index != source and not torch.equal(raw, raw_bytes(flat)):
            with torch.no_grad():
                tensor.copy_(found.view(tensor.shape))

    def _run(self, what: str, name: str, *args: Any) -> None:
        try:
            call_torch(name, *args, group=self._group())
        except (RuntimeError, ValueError) as error:  # the second where the default group has been destroyed
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> RankError:
        why = (self.causes.first() if self.causes is not None else None) or str(error).splitlines()[0]
        doubt = self.causes.doubt if self.causes is not None else ""
        problem = f"another rank has ended, or did not come in time: {why}{doubt}"
        return RankError(what, problem, rank=self.number, cure=_CURE)
