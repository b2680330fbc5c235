"""What processes that train together exchange: torch.distributed's collectives, each with a label and a place.

[Note: ranks] Every rank runs the same script on its own data, each on its own drives. From ZeRO's stage 1 on, main weights and
states are divided (`infinity.units.shards`), in stage 3 also model weights that rest on drives. All else each rank holds whole.
What they have in common:
  * When `initialize` takes the model over, all ranks take the weights and buffers of rank 0, as DDP does.
  * When a backward has ended whose gradients are to be used, ranks tell each other which parameters got gradients since the
    last time, and average those: unit by unit in the order of units, parameter by parameter. The order follows from the
    model alone. It must not follow from reads, updates or prefetches, which are early or late on each rank for itself. So no
    thread but the one that trains talks to other ranks, but for two (`infinity.distributed.collective_thread`). Where states are
    divided, one averages units beside the backward, the last one first (`infinity.gradients.gradient_exchange`). Where weights
    are, too, one gathers units in the order in which all ranks' models use them (`infinity.tiers.divided_weights`).
  * Before a step changes anything, ranks compare the norm of all gradients, bit for bit. Clipping and skipped steps (fp16)
    follow from that norm, so all ranks do the same; and where one would do something else, because its script has changed
    a gradient, all of them raise.
  * When a step ends in which each has updated its shard, the new weights of all go to all: of units that were updated in
    backward in the order of those updates, which all ranks have agreed on, then of the others in the order of units. Where
    weights are divided, that is for units that stay in memory; the others are gathered when they are used.
  * Main weights and states that are divided are put together when somebody reads them, which all ranks do together.
  * Nothing else. With equal gradients, the engine's promise (the same bits as plain torch) makes equal weights on all.

[Note: the order of sums] Each rank multiplies its gradients by 1 / number of ranks, as DDP does. The rank that is to have the
mean gets the rows of all (`all_to_all_single`) and adds them in their order, ((0 + 1) + 2) + ..., in fp32. So all have the same
bits on any device and backend, and an element's do not follow from where it lies. With two ranks DDP's sums are the same bit for
bit; with more, DDP's order is another one in each part of its buckets, and last bits differ.

[Note: the order of ranks] torch does not look whether ranks are in the same collective: two units of equal size that one rank
takes in another order are added up silently, and others abort the process. So what is exchanged begins with a *meeting*: each
rank tells its label and how many meetings it has been in. A rank that is elsewhere in its script (another number of backwards, an
exception that it caught) is found there by all, before anything is added up, and the error names both labels. The collectives
behind a meeting follow from what was agreed in it.
Meetings of another thread, in a process group of its own, could wait for a rank whose script waits in one of the first group.
So scripts count what they have asked that thread for (`Ranks.issue`), and ranks tell each other both counts
(`infinity.distributed.causes`). A rank that has come to a later meeting with fewer requests never comes to this one.

[Note: waiting] Whoever waits for others looks every two seconds why they do not come (`infinity.distributed.causes`). A rank
that has ended, or of which nothing has been heard for half a minute (stopped, or cut off), ends the waiting. One that computes
for long is waited for as long as the process group's timeout says.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from infinity.distributed.causes import Causes
from infinity.distributed.process_groups import call_torch, group_of, has_backend_for, num_processes, world_group
from infinity.errors import RankError
from infinity.numerics.raw_bytes import raw_bytes

_BLOCK_NUMEL = 1 << 20
"""Elements that are exchanged at a time. Twice as many stay in memory for it."""
_STEP_NUMEL = 2048
"""Blocks of what is gathered are multiples of so many elements, which drives can write without reading first."""
_MEETING = struct.Struct("<2q192s30q")
"""What a rank tells in a meeting: how many it has been in, the number of values, its label, and the values if they have room."""
_LABEL_BYTES, _NUM_BESIDE = 192, 30
_LOOK_SECONDS = 2.0
"""How long to wait before looking for those who do not come."""
_MEANWHILE_SECONDS = 0.005
CallCounts = tuple[int, int]
"""How many meetings a rank's script has been in, and how many exchanges of other threads it has asked for."""
_CURE = (
    "All ranks must make the same calls in the same order: the same number of backwards and steps, each on its own data"
)
_CURE_OF_CUT = (
    "Start all processes again. To save after Ctrl-C, let its handler set a flag, and act on it between two steps, on all "
    "ranks"
)


class Ranks:
    """The processes that train together; see the module's notes. Only the thread that trains calls it, but for what says else.

    Everything raises RankError if another process has ended, does not come, or comes with something else.
    """

    def __init__(
        self,
        number: int = 0,
        members: Sequence[int] = (0,),
        group: Any = None,
        causes: Causes | None = None,
        beside: Ranks | None = None,
    ) -> None:
        """
        Args:
            number: this process among all, by which messages name it.
            members: of each of these, its number among all processes.
            group: torch's process group of these, which takes tensors on the CPU; None: the default one.
            causes: know why a rank has ended; None: nothing is known of that.
            beside: the same processes, which exchange other things; what is sent is counted together.
        """
        self.number = number
        self.members = tuple(members)
        self.index = self.members.index(number)
        self.num = len(self.members)
        self.services: dict[str, Any] = {}
        """What others have made for these ranks, once for all who ask, by name."""
        # Weak: torch has the group until the script destroys it, and `has_group` finds that out.
        self._group_reference = weakref.ref(group) if group is not None else None
        self.causes = causes or Causes()
        """Know why a rank has ended: errors name the first cause."""
        self._is_beside = beside is not None
        self._place = 0
        """How many meetings this rank has been in."""
        self._label = "beginning"
        """Of the last one."""
        self._num_issued = 0
        """Exchanges of other threads that its script has asked for."""
        self._under_way: list[str] = []
        """Labels of what has begun and not ended. Left behind by an error or an interrupt: others may be in the middle of it."""
        self._staging: dict[tuple[str, torch.device], torch.Tensor] = {}
        """Memory for one block of what is sent and received, by name and device."""
        self.sent_bytes: Counter[str] = Counter() if beside is None else beside.sent_bytes
        """Bytes of tensors that this rank has sent to the others so far: "gradients", "norms" (parts of gradients for the norm of
        a whole one), "momenta", "weights" (new ones), "fetches" (of units that are gathered), "states". Each copy counts: what
        goes to three ranks counts three times."""

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

    def check_local_ranks(self) -> None:
        """Raise RankError if the process of a rank on this machine has ended."""
        why = self.causes.find_ended()
        if why is not None:
            raise RankError("looking at the others", f"another rank has ended: {why}", rank=self.number, cure=_CURE)

    # ---------------------------------------------------------------------------------------------------------- meetings

    def issue(self) -> CallCounts:
        """The script asks another thread for an exchange. Returns where in the script that is, the same on all ranks."""
        self._num_issued += 1
        self._publish_place()
        return self._place, self._num_issued

    def _publish_place(self) -> None:
        if not self._is_beside:
            self.causes.places[self.members] = self._place, self._num_issued, self._label

    def all_gather_ints(
        self,
        what: str,
        values: Sequence[int] = (),
        meanwhile: Callable[[], None] | None = None,
        issued: CallCounts | None = None,
    ) -> list[list[int]]:
        """Wait until all ranks come with the same ``what``, and as many ``values`` (of 64 bits). Returns those of each.

        Args:
            what: the label.
            values: of this rank.
            meanwhile: called often until they have come.
            issued: where the script has asked for it, in another thread.
        """
        if self.num == 1:
            return [list(values)]
        if self._under_way:  # else it would come to the others as the rest of that
            cut = f"this rank has left the exchange '{self._under_way[0]}' in the middle, by an error or an interrupt"
            raise RankError(what, cut, rank=self.number, cure=_CURE_OF_CUT)
        self._place += 1
        self._label = what
        self._publish_place()
        beside = [*values, *[0] * _NUM_BESIDE][:_NUM_BESIDE] if len(values) <= _NUM_BESIDE else [0] * _NUM_BESIDE
        own = _MEETING.pack(self._place, len(values), what.encode()[:_LABEL_BYTES], *beside)
        found = [_MEETING.unpack(row) for row in self._gathered(what, own, meanwhile, issued)]
        _, num, label, *_ = _MEETING.unpack(own)
        others = [rank for rank, other in enumerate(found) if other[1:3] != (num, label)]
        if others:
            came = "; ".join(
                f"rank {self.members[rank]} came with {_shown(found[rank], label)}, its exchange number "
                f"{found[rank][0]} (here {self._place})"
                for rank in others
            )
            raise RankError(what, came, rank=self.number, cure=_CURE)
        if len(values) > _NUM_BESIDE:
            rows = self._gathered(what, struct.pack(f"<{num}q", *values))
            return [[*struct.unpack(f"<{num}q", row)] for row in rows]
        return [[*other[3 : 3 + num]] for other in found]

    def _gathered(
        self, what: str, own: bytes, meanwhile: Callable[[], None] | None = None, issued: CallCounts | None = None
    ) -> list[bytes]:
        """What each rank comes with, as many bytes on all."""
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return [bytes(row.numpy()) for row in self._rows(what, sent, meanwhile=meanwhile, issued=issued)]

    def _rows(self, what: str, own: torch.Tensor, **options: Any) -> torch.Tensor:
        found = torch.empty((self.num, own.numel()), dtype=own.dtype, device="cpu")
        self._run(what, "all_gather_into_tensor", found.view(-1), own, **options)
        return found

    def gather(self, what: str, data: bytes) -> list[bytes]:
        """What each rank comes with, which may be of any length: on all of them, in memory."""
        if self.num == 1:
            return [data]
        sizes = [found[0] for found in self.all_gather_ints(what, [len(data)])]
        if not any(sizes):
            return [b""] * self.num
        rows = self._gathered(what, data.ljust(max(sizes), b"\0"))
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    # -------------------------------------------------------------------------------------------------- tensors, in blocks

    def average(self, what: str, values: torch.Tensor, wire: torch.dtype = torch.float32) -> None:
        """Replace ``values`` (1-D, floating) by the mean over all ranks; see `reduce`.

        All ranks must be known to come with as many values: see `all_gather_ints`.
        """
        if self.num == 1:
            return
        cuts = [values.numel() * rank // self.num for rank in range(self.num + 1)]
        parts = list(itertools.pairwise(cuts))
        self.reduce(what, values, parts, wire)
        dtype = values.dtype if wire == torch.float32 else wire
        self.all_gather_in_memory(what, values, parts, kind="gradients", dtype=dtype)

    def reduce(
        self, what: str, values: torch.Tensor, parts: Sequence[tuple[int, int]], wire: torch.dtype = torch.float32
    ) -> None:
        """Each rank gets the mean over all ranks of its part of ``values``; its other parts stay what they are.

        Args:
            what: for messages.
            values: 1-D, floating; as many on all ranks. They are added in fp32, see [Note: the order of sums].
            parts: of each rank, elements [start, stop). They are the same on all ranks.
            wire: as what they are sent, and the dtype to which the mean is rounded: so all that is sent of it is exact.
        """
        for places, sent, received in self._blocks(what, parts, wire, values.device, of_all=True):
            for row, place in zip(sent, places, strict=True):
                block = values[place.start : place.stop]
                block = block if block.dtype == wire else block.float()
                torch.mul(block, 1.0 / self.num, out=row[: block.numel()])
            self._run(what, "all_to_all_single", received.view(-1), sent.view(-1))
            self._count("gradients", sent[0])
            own = values[places[self.index].start : places[self.index].stop]
            total, *others = (row[: own.numel()].float() for row in received)
            for other in others:
                total.add_(other)
            own.copy_(total.to(wire))

    def all_gather_parts(
        self,
        what: str,
        parts: Sequence[tuple[int, int]],
        read: Callable[[int, torch.Tensor], None],
        write: Callable[[int, torch.Tensor], None],
        *,
        dtype: torch.dtype,
        kind: str = "gradients",
        device: torch.device | str = "cpu",
    ) -> None:
        """All ranks get the parts of all, block by block.

        Args:
            what: for messages.
            parts: of each rank, elements [start, stop). They are the same on all ranks.
            read: puts the elements from a start on into a tensor (1-D): some of this rank's part.
            write: takes elements from a start on, which another rank has: it reads them, and returns when it has.
            dtype: of the elements.
            kind: under which `sent_bytes` counts it.
            device: of the tensors that ``read`` and ``write`` get, if the ranks' backends take it; else the CPU.
        """
        for places, sent, received in self._blocks(what, parts, dtype, torch.device(device)):
            own = places[self.index]
            if own:
                read(own.start, sent[0][: len(own)])
            self._run(what, "all_gather_into_tensor", received.view(-1), sent[0])
            self._count(kind, sent[0])
            for rank, place in enumerate(places):
                if rank != self.index and place:
                    write(place.start, received[rank][: len(place)])

    def all_gather_in_memory(
        self,
        what: str,
        values: torch.Tensor,
        parts: Sequence[tuple[int, int]],
        *,
        kind: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        """As `all_gather_parts`, where all parts lie in ``values`` (1-D). ``dtype``: sent as; None: as it is."""

        def read(start: int, target: torch.Tensor) -> None:
            target.copy_(values[start : start + target.numel()])

        def write(start: int, found: torch.Tensor) -> None:
            values[start : start + found.numel()].copy_(found)

        self.all_gather_parts(what, parts, read, write, dtype=dtype or values.dtype, kind=kind, device=values.device)

    def collect(self, what: str, values: torch.Tensor, parts: Sequence[tuple[int, int]], to: int) -> None:
        """Rank ``to`` gets the parts of all into ``values`` (1-D); on the others nothing changes."""
        others = [(start, stop) if rank != to else (start, start) for rank, (start, stop) in enumerate(parts)]
        for places, sent, received in self._blocks(what, others, values.dtype, values.device):
            place = places[self.index]
            own = sent[0][: len(place)].copy_(values[place.start : place.stop])
            of_all = [len(place) * (self.index == to) for place in places]
            to_all = [own.numel() * (rank == to) for rank in range(self.num)]
            found = received.view(-1)[: sum(of_all)]
            self._run(what, "all_to_all_single", found, own, of_all, to_all)
            self.sent_bytes["norms"] += own.numel() * own.element_size()
            for place, row in zip(places, found.split(of_all), strict=True):
                values[place.start : place.start + row.numel()].copy_(row)

    def all_to_all(self, what: str, sent: torch.Tensor, *, kind: str) -> torch.Tensor:
        """Row r of ``sent`` (one row for each rank, on the CPU, without gaps) goes to rank r. Returns what came, by rank.

        ``kind``: under which `sent_bytes` counts it, here and in `all_gather`.
        """
        received = torch.empty_like(sent)
        self._run(what, "all_to_all_single", received.view(-1), sent.view(-1))
        self._count(kind, sent[0])
        return received

    def all_gather(self, what: str, own: torch.Tensor, *, kind: str) -> torch.Tensor:
        """All get ``own`` (1-D, on the CPU, as long on all) of each rank, as rows."""
        self._count(kind, own)
        return self._rows(what, own)

    def broadcast_from(self, what: str, source: int, tensor: torch.Tensor) -> None:
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

    def _blocks(
        self,
        what: str,
        parts: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        of_all: bool = False,
    ) -> Iterable[tuple[list[range], torch.Tensor, torch.Tensor]]:
        """Of parts that are exchanged block by block: the elements of each part in a block, and memory for it.

        That is for what is sent, one row (``of_all``: one for each rank), and for what comes, one row for each rank.
        """
        longest = max(stop - start for start, stop in parts)
        width = min(max(_BLOCK_NUMEL // self.num // _STEP_NUMEL, 1) * _STEP_NUMEL, longest)
        place = device if has_backend_for(self._group(), device) else torch.device("cpu")
        self._under_way.append(what)
        for offset in range(0, longest, max(width, 1)):
            num = min(width, longest - offset)
            sent = self._memory("sent", (self.num if of_all else 1) * num, dtype, place).view(-1, num)
            elements = [range(start, stop)[offset : offset + num] for start, stop in parts]
            yield elements, sent, self._memory("received", self.num * num, dtype, place).view(-1, num)
        self._under_way.pop()

    def _memory(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        known = self._staging.get((name, device))
        if known is None or known.numel() < num_bytes:
            known = self._staging[name, device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return known[:num_bytes].view(dtype)

    def _count(self, kind: str, row: torch.Tensor) -> None:
        self.sent_bytes[kind] += (self.num - 1) * row.numel() * row.element_size()

    # -------------------------------------------------------------------------------------------------- from rank to rank

    def send(self, what: str, tensor: torch.Tensor, to: int) -> None:
        """Another rank gets ``tensor`` (on the CPU, without gaps), which it asks for with `receive`; returns when it has."""
        with self._failing(what):
            call_torch("isend", tensor, self.members[to], group=self._group()).wait()

    def receive(self, what: str, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor`` (on the CPU, without gaps) with what another rank gives to `send`."""
        with self._failing(what):
            call_torch("irecv", tensor, self.members[source], group=self._group()).wait()

    # ------------------------------------------------------------------------------------------------------------ waiting

    def _run(
        self,
        what: str,
        name: str,
        *args: Any,
        meanwhile: Callable[[], None] | None = None,
        issued: CallCounts | None = None,
    ) -> None:
        """One of torch's collectives, until its end."""
        self._under_way.append(what)
        with self._failing(what):
            begun = call_torch(name, *args, group=self._group(), async_op=True)
        if args[0].device.type != "cpu":  # the others have come to the meeting before; the device's stream waits
            begun.wait()
            self._under_way.pop()
            return
        self.causes.on_exchange(what)
        look_at = time.monotonic() + _LOOK_SECONDS
        while True:
            with self._failing(what):
                try:
                    begun.wait(timedelta(seconds=_LOOK_SECONDS if meanwhile is None else _MEANWHILE_SECONDS))
                    self._under_way.pop()
                    return
                except RuntimeError as error:
                    if "Operation timed out" not in str(error):  # else of this wait: it goes on
                        raise
            if meanwhile is not None:
                meanwhile()
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + _LOOK_SECONDS
            why = self.causes.why_absent(self.members, issued)
            if why is not None:
                raise RankError(what, f"another rank does not reach this call: {why}", rank=self.number, cure=_CURE)

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Errors of torch say why another rank has ended. (ValueError: the default group has been destroyed.)"""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            why = self.causes.first() or str(error).splitlines()[0]
            problem = f"another rank has ended, or did not reach this call in time: {why}{self.causes.doubt}"
            raise RankError(what, problem, rank=self.number, cure=_CURE) from error


def _shown(found: Sequence[Any], label: bytes) -> str:
    """What a rank came with, that is not this label with as many values."""
    text = found[2].rstrip(b"\0").decode(errors="replace")
    return f"{found[1]} values" if found[2] == label else f"'{text}'"
