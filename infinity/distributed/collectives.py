"""The collectives of ranks that train together: torch.distributed's, each with a label that all ranks compare first.

[Note: ranks] Every rank runs the same script on its own data and its own drives. From ZeRO stage 1 on, main weights and states
are sharded (`infinity.units.shards`), in stage 3 also the model weights that are stored on drives. All else is replicated.
Ranks exchange:
  * In `initialize`: all ranks take the weights and buffers of rank 0, as in DDP.
  * After each backward whose gradients are used: which parameters have new gradients, then the means of these gradients, unit
    by unit in the order of the model. That order is the same on all ranks; the order of reads, updates and prefetches is not.
    So only the training thread calls collectives, except for two threads (`infinity.distributed.collective_thread`) with
    process groups of their own. One averages units during backward, the last unit first, if states are sharded
    (`infinity.gradients.gradient_exchange`). The other gathers units, in the order in which the model uses them on all ranks,
    if weights are sharded (`infinity.tiers.divided_weights`).
  * Before a step changes anything: the norm of all gradients, which must be equal bit for bit. Clipping and skipped steps
    (fp16) follow from it. If it differs, because a script has changed a gradient on one rank, all ranks raise.
  * At the end of a step, if states are sharded: each rank's new weights. First those of units that were updated in backward,
    in the order on which the ranks agreed, then the others in the order of the model. In stage 3 this is done for resident
    units only; the others are gathered at their next use.
  * When main weights or states are read: their shards. Reading them is a collective call.
With equal gradients, the engine's promise (the same bits as plain torch) makes equal weights on all ranks.

[Note: the order of sums] Each rank multiplies its gradients by 1 / number of ranks, as DDP does. The rank that needs a mean
receives the rows of all ranks (`all_to_all_single`) and adds them in fp32 in the order of ranks: ((0 + 1) + 2) + ... So the
bits are the same on any device and backend, and for an element at any position. With two ranks they are DDP's. With more, DDP
adds in another order in each part of its buckets, and last bits differ.

[Note: the order of ranks] torch does not check that all ranks call the same collective. Two units of equal size in a different
order would be added up silently; other mismatches abort the process. So each exchange begins with a *meeting*, an all-gather of
each rank's label and number of meetings so far. If a rank is elsewhere in its script (another number of backwards, an exception
that it caught), all ranks raise before anything is added up, and the error names both labels. The collectives after a meeting
follow from what was agreed in it.
A meeting in another thread's process group could wait for a rank whose script waits in the first group. So scripts count their
requests to that thread (`Ranks.issue`), and ranks publish both counts (`infinity.distributed.causes`). A rank that is in a
later meeting with fewer requests never comes to this one.

[Note: waiting] A rank that waits looks every two seconds why the others do not come (`infinity.distributed.causes`). It raises
if one has ended, or has sent no sign of life for half a minute (stopped, or cut off). It waits for a rank that computes for as
long as the process group's timeout.
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
"""Elements of one exchange. Its buffers hold twice as many, to send and to receive."""
_STEP_NUMEL = 2048
"""Blocks of gathered tensors are multiples of this, so that writing one to a drive needs no read-modify-write."""
_MEETING = struct.Struct("<2q192s30q")
"""A rank's message in a meeting: number of its meetings, number of values, label, and the values if there are few."""
_LABEL_BYTES, _NUM_BESIDE = 192, 30
_LOOK_SECONDS = 2.0
"""How long to wait for the others before looking why they do not come."""
_MEANWHILE_SECONDS = 0.005
CallCounts = tuple[int, int]
"""A script's number of meetings, and of its requests to other threads."""
_CURE = (
    "All ranks must make the same calls in the same order: the same number of backwards and steps, each on its own data. In "
    "stage 3, they must use the same modules: if each uses others of a list, name the list in infinity.units"
)
_CURE_OF_CUT = (
    "Start all processes again. To save after Ctrl-C, let its handler set a flag, and act on it between two steps, on all "
    "ranks"
)


class Ranks:
    """The processes that train together; see the module's notes. For the training thread, unless a method says otherwise.

    All methods raise RankError if another process has ended, does not come, or comes with another label.
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
            number: this process's global rank, for messages.
            members: the global ranks of these processes.
            group: torch's process group of them, which supports tensors on the CPU; None: the default one.
            causes: finds out why a rank has ended; None: nothing does.
            beside: the same processes with another group; both count the bytes that they send together.
        """
        self.number = number
        self.members = tuple(members)
        self.index = self.members.index(number)
        self.num = len(self.members)
        self.services: dict[str, Any] = {}
        """Objects that other modules keep once per set of ranks, by name."""
        # Weak: torch has the group until the script destroys it, and `has_group` finds that out.
        self._group_reference = weakref.ref(group) if group is not None else None
        self.causes = causes or Causes()
        """Finds out why a rank has ended: errors name the first cause."""
        self._is_beside = beside is not None
        self._place = 0
        """Number of meetings of this rank."""
        self._label = "beginning"
        """Label of the last meeting."""
        self._num_issued = 0
        """Number of exchanges that the script has requested from other threads."""
        self._under_way: list[str] = []
        """Labels of exchanges that have begun and not ended. An error or an interrupt leaves them here: others may still wait."""
        self._staging: dict[tuple[str, torch.device], torch.Tensor] = {}
        """Buffers for one block, by name ("sent", "received") and device."""
        self.sent_bytes: Counter[str] = Counter() if beside is None else beside.sent_bytes
        """Bytes of tensors that this rank has sent: "gradients", "norms" (shards of gradients, for the norm of a whole one),
        "momenta", "weights" (new ones), "fetches" (gathered units), "states". A tensor for three ranks counts three times."""

    def names(self, indices: Iterable[int]) -> str:
        """The global ranks of some members, for messages."""
        return ", ".join(str(self.members[index]) for index in indices)

    def _group(self) -> Any:
        if self._group_reference is None:
            return None
        group = self._group_reference()
        if group is None:  # torch would use the default group
            raise RuntimeError("the process group has been destroyed")
        return group

    @property
    def torch_group(self) -> Any:
        """The group as ``torch.distributed`` knows it, for scripts; made if it is missing."""
        if self._group_reference is None and self.num == 1 < num_processes():
            # Local: by default `new_group` is a collective call of all processes, also of those outside the group.
            group = group_of(self.members, use_local_synchronization=True)
            self._group_reference = weakref.ref(group)
        return world_group() if self._group_reference is None else self._group()

    @property
    def has_group(self) -> bool:
        """Whether the process group has not been destroyed."""
        return self._group_reference is None or self._group_reference() is not None

    def check_local_ranks(self) -> None:
        """Raise RankError if the process of a rank on this machine has ended."""
        why = self.causes.find_ended()
        if why is not None:
            raise RankError("looking at the others", f"another rank has ended: {why}", rank=self.number, cure=_CURE)

    # ---------------------------------------------------------------------------------------------------------- meetings

    def issue(self) -> CallCounts:
        """Count a request of the script to another thread. Returns its place in the script, the same on all ranks."""
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
        """Hold a meeting: all ranks must come with the same ``what`` and as many ``values`` (64 bits). Returns all values.

        Args:
            what: the label.
            values: of this rank.
            meanwhile: called repeatedly until all have come.
            issued: place in the script that requested this from another thread.
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
        """All-gather bytes, equally many on all ranks."""
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return [bytes(row.numpy()) for row in self._rows(what, sent, meanwhile=meanwhile, issued=issued)]

    def _rows(self, what: str, own: torch.Tensor, **options: Any) -> torch.Tensor:
        found = torch.empty((self.num, own.numel()), dtype=own.dtype, device="cpu")
        self._run(what, "all_gather_into_tensor", found.view(-1), own, **options)
        return found

    def gather(self, what: str, data: bytes) -> list[bytes]:
        """All-gather bytes of any length."""
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
        """Reduce-scatter in place: each rank gets the mean of its part of ``values``; its other parts are unchanged.

        Args:
            what: for messages.
            values: 1-D, floating; as many on all ranks. They are added in fp32, see [Note: the order of sums].
            parts: of each rank, elements [start, stop). They are the same on all ranks.
            wire: dtype in which gradients are sent, and to which the mean is rounded, so that sending it is exact.
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
        """All-gather parts, block by block.

        Args:
            what: for messages.
            parts: of each rank, elements [start, stop). They are the same on all ranks.
            read: fills a tensor (1-D) with elements of this rank's part, from a start on.
            write: copies a tensor with another rank's elements from a start on. The tensor is reused afterwards.
            dtype: of the elements.
            kind: key in `sent_bytes`.
            device: of the tensors that ``read`` and ``write`` get, if the backend supports it; else the CPU.
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
        put: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    ) -> None:
        """As `all_gather_parts`, with all parts in ``values`` (1-D). ``dtype``: in which it is sent; None: its own.

        ``put``: copies to a place in ``values``, its first argument, what has come.
        """

        def read(start: int, target: torch.Tensor) -> None:
            target.copy_(values[start : start + target.numel()])

        def write(start: int, found: torch.Tensor) -> None:
            put(values[start : start + found.numel()], found)

        self.all_gather_parts(what, parts, read, write, dtype=dtype or values.dtype, kind=kind, device=values.device)

    def collect(self, what: str, values: torch.Tensor, parts: Sequence[tuple[int, int]], to: int) -> None:
        """Gather the parts of all ranks into ``values`` (1-D) on rank ``to``; on the others nothing changes."""
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
        """Send row r of ``sent`` (one row per rank, contiguous, on the CPU) to rank r. Returns the received rows, by rank.

        ``kind``: key in `sent_bytes`, here and in `all_gather`.
        """
        received = torch.empty_like(sent)
        self._run(what, "all_to_all_single", received.view(-1), sent.view(-1))
        self._count(kind, sent[0])
        return received

    def all_gather(self, what: str, own: torch.Tensor, *, kind: str) -> torch.Tensor:
        """Return ``own`` (1-D, on the CPU, of equal length) of all ranks, as rows."""
        self._count(kind, own)
        return self._rows(what, own)

    def broadcast_from(self, what: str, source: int, tensor: torch.Tensor) -> None:
        """Copy rank ``source``'s ``tensor`` (any dtype, strides, device) to all ranks. One that is equal is not written to."""
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
        """Yield for each block: its elements of each part, a buffer to send, and one to receive.

        The buffer to send has one row (``of_all``: one per rank), the other one row per rank.
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
        """Send ``tensor`` (contiguous, on the CPU) to a rank that calls `receive`. Returns when it has been sent."""
        with self._failing(what):
            call_torch("isend", tensor, self.members[to], group=self._group()).wait()

    def receive(self, what: str, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor`` (contiguous, on the CPU) with the tensor that another rank passes to `send`."""
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
        """Run one of torch's collectives, and wait for it."""
        self._under_way.append(what)
        with self._failing(what):
            begun = call_torch(name, *args, group=self._group(), async_op=True)
        # On a device, only its stream waits. All ranks come here, because they were in the meeting before.
        if args[0].device.type != "cpu":
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
                    if "Operation timed out" not in str(error):  # only this wait did, the collective still runs
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
        """Convert torch's errors, with the cause of another rank's end. (ValueError: the default group was destroyed.)"""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            why = self.causes.first() or str(error).splitlines()[0]
            problem = f"another rank has ended, or did not reach this call in time: {why}{self.causes.doubt}"
            raise RankError(what, problem, rank=self.number, cure=_CURE) from error


def _shown(found: Sequence[Any], label: bytes) -> str:
    """Describe the label or number of values in which a rank differs."""
    text = found[2].rstrip(b"\0").decode(errors="replace")
    return f"{found[1]} values" if found[2] == label else f"'{text}'"
