"""Everything that concerns other processes. The only place that knows ``torch.distributed``.

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

[Note: how a group ends] gloo's threads let go of tensors some time after what they carried is over, which takes Python's lock:
once the interpreter has begun to end, that aborts the process. A group joins its threads when nothing refers to it any more. So
nothing here keeps one alive that a script has destroyed, and one that nobody has destroyed is before the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import secrets
import socket
import struct
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from infinity.distributed.causes import Causes
from infinity.distributed.lines import Lines
from infinity.distributed.shared_blocks import SharedBlocks
from infinity.errors import ConfigError, RankError
from infinity.numerics.raw_bytes import raw_bytes
from infinity.torch_internals.current_gpu import take_gpu
from infinity.torch_internals.default_groups import forget_default_groups
from infinity.torch_internals.group_store import default_store, group_timeout
from swapper.sync.lifetimes import when_gone
from swapper.sync.limits import start_threads

ReduceOp: Any = getattr(torch.distributed, "ReduceOp", None)
"""torch's names of what is done with several tensors."""
P2POp: Any = getattr(torch.distributed, "P2POp", None)
batch_isend_irecv: Any = getattr(torch.distributed, "batch_isend_irecv", None)
isend: Any = getattr(torch.distributed, "isend", None)
irecv: Any = getattr(torch.distributed, "irecv", None)
"""torch's own: its `P2POp` takes no other `isend` and `irecv`."""

_LAUNCHERS_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""What tells how many processes others than torchrun have started: Open MPI, MPICH and its kin, MVAPICH2, and Slurm."""


def num_processes() -> int:
    """How many train together: of ``torch.distributed``'s group, or as a launcher says that there will be.

    Raises:
        ConfigError: mpirun or srun has started several, and nothing says how they find each other.
    """
    if is_initialized():
        return int(torch.distributed.get_world_size())
    name = untold_size()
    if name is not None:
        raise ConfigError(
            f"{_LAUNCHERS_SIZES[name]} has started {os.environ[name]} processes ({name}), and WORLD_SIZE is not set, so each "
            "would train alone. Start the script with torchrun; or set WORLD_SIZE to 1 if each is to train alone"
        )
    return int(os.environ.get("WORLD_SIZE", "1"))


def untold_size() -> str | None:
    """The variable by which mpirun or srun tells that it has started several, where WORLD_SIZE does not say so."""
    names = (name for name in _LAUNCHERS_SIZES if int(os.environ.get(name, "1")) > 1)
    return None if "WORLD_SIZE" in os.environ else next(names, None)


def process_rank() -> int:
    """This process among all: of ``torch.distributed``'s group, or as a launcher says; 0 without both."""
    return int(torch.distributed.get_rank() if is_initialized() else os.environ.get("RANK", "0"))


def is_initialized() -> bool:
    """Whether ``torch.distributed`` has a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make the process group, unless there is one: as the script says, that of a launcher (torchrun), or of this one process.

    `initialize` does this where a launcher has started several. With one process, RANK, LOCAL_RANK and WORLD_SIZE are set
    if they are not.

    Args:
        dist_backend: as torch names it; None: nccl where there are GPUs, else gloo. "nccl" is gloo where there are none.
        auto_mpi_discovery, distributed_port, verbose, dist_init_required, config: taken as DeepSpeed takes them, without effect.
        timeout: how long a process waits for the others. None: torch's, half an hour.
        init_method: where processes find each other that the script has started ("tcp://...", "file://..."). None: as
            the launcher says.
        rank, world_size: this process, and how many there are; -1: as the launcher says.

    Raises:
        ConfigError: several processes are to train together, and their launcher has not told how they find each other.
        RankError: they do not reach each other.
    """
    if is_initialized():
        return
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    backend = dist_backend or "nccl"
    if backend == "nccl" and not has_nccl:  # DeepSpeed's scripts name it also where there is nothing for it to do
        backend = "gloo"
    rank = rank if rank >= 0 else int(os.environ.get("RANK", "-1"))
    if init_method not in (None, "env://"):
        num = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "-1"))
        _begin_group(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=num)
        return
    num = world_size if world_size > 0 else num_processes()
    if num > 1:
        missing = ["RANK"] if rank < 0 else []
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {num}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. Start the "
                "script with torchrun, or unset WORLD_SIZE for one process; or give init_distributed init_method, rank and "
                "world_size"
            )
        _begin_group(backend, timeout=timeout, store=_store_of_this_start(), rank=rank, world_size=num)
        return
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    if torch.distributed.is_available():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's list
        _begin_group(backend, timeout=timeout, store=store, rank=0, world_size=1)


def _begin_group(backend: str, **options: Any) -> None:
    if "nccl" in backend:
        take_gpu(local_rank())  # nccl would take that of the first for all
    with _finding_each_other():
        torch.distributed.init_process_group(backend, **options)


@contextlib.contextmanager
def _finding_each_other() -> Iterator[None]:
    """What gloo raises where processes do not find each other becomes an error with its cure."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        raise RankError(
            "making a process group",
            f"the processes do not reach each other: {str(error).splitlines()[0]}",
            rank=process_rank(),
            cure="gloo takes the network interface of this machine's name, which the others may not reach: set "
            "GLOO_SOCKET_IFNAME on all machines to the one that they share (`ip -br addr` names them; lo for one machine)",
        ) from error


def _store_of_this_start() -> Any:
    """A part of torchrun's store for what it has started again with its static rendezvous; None where torch finds one.

    There the store is still that of the start before (torch 2.13), and gloo would look for processes that have ended. Other
    rendezvous have an id, and a new store for each start.
    """
    settings = [os.environ.get(f"TORCHELASTIC_{name}") for name in ("USE_AGENT_STORE", "RUN_ID", "RESTART_COUNT")]
    if settings[:2] != ["True", "none"] or settings[2] in (None, "0"):
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    return torch.distributed.PrefixStore(f"start {settings[2]}", store)  # type: ignore[attr-defined]


def world_group() -> Any:
    """The process group of all; made if there is none."""
    init_distributed()
    return torch.distributed.group.WORLD


def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A further process group, for scripts that pass groups around.

    Args:
        ranks: who is in it; None: all.
        args, kwargs: as of ``torch.distributed.new_group``.

    Raises:
        ConfigError: there is one process, and ``ranks`` names another.
    """
    if ranks is not None and list(ranks) != [0] and num_processes() == 1:
        raise ConfigError(f"a group of the ranks {list(ranks)}, but there is one process, 0. Make it of [0]")
    init_distributed()
    return torch.distributed.new_group(ranks, *args, **kwargs)


def destroy_process_group(group: Any = None) -> None:
    """Take a group down, as ``torch.distributed`` does; nothing if there is none."""
    if is_initialized():
        torch.distributed.destroy_process_group(group)


def destroy_at_exit() -> None:
    """See [Note: how a group ends]. One that still waits for other processes is left as it is."""

    def end() -> None:
        destroy_process_group()
        forget_default_groups()

    if not _met:
        return
    thread = threading.Thread(target=end, name="infinity-group-end", daemon=True)
    with contextlib.suppress(RuntimeError):  # then it is left as it is
        start_threads(thread)
        thread.join(_EXIT_SECONDS)


_met: list[int] = []
"""Of how many processes the default groups were that this one made of its own accord, or found."""
atexit.register(destroy_at_exit)  # from the import on, so that it comes after the engines' own hook


_NEW_NAMES = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""Since torch 2.13, which warns of the others."""


def call_torch(name: str, *args: Any, **kwargs: Any) -> Any:
    """A function of ``torch.distributed``, by its name, or the one that it is called since."""
    return getattr(torch.distributed, _named(name))(*args, **kwargs)


def _named(name: str) -> str:
    newer = _NEW_NAMES.get(name, name)
    return newer if hasattr(torch.distributed, newer) else name


def local_rank() -> int:
    """This process's number on its machine, as its launcher says; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_local_processes() -> int:
    """How many of those that train together are on this machine. All processes call it at the same point."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    hosts = world().gather("counting the processes of each machine", socket.gethostname().encode())
    return int(told) if told and len(hosts) > 1 else hosts.count(hosts[world().index])


_BLOCK_NUMEL = 1 << 20
"""Elements that are exchanged at a time. Twice as many stay in memory for it; as many come besides from other machines."""
_MOST_ITEM_BYTES = 16
"""Of an element."""
_NUM_BESIDE = 30
"""So many numbers go with the label of a meeting; of more, all go after it."""
_STEP_NUMEL = 2048
"""Blocks of what is gathered are multiples of so many elements, which drives can write without reading first."""
_ALL_GATHER = _named("all_gather_into_tensor")
_LONG = timedelta(days=3650)
_EXIT_SECONDS = 5.0
"""How long a group may take to end with the interpreter."""
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
    ) -> None:
        """
        Args:
            index: this process.
            num: how many there are.
            group: torch's process group of all of them, which takes tensors on the CPU; None: the default one.
            causes: know why a rank has ended.
            members: of each, its number among all processes; None: these are all.
        """
        self.index = index
        self.num = num
        self.members = tuple(range(num) if members is None else members)
        self.services: dict[str, Any] = {}
        """What others have made for these ranks, once for all who ask, by name."""
        self._group_reference = weakref.ref(group) if group is not None else None
        self.causes = causes
        self._lines: Lines | None = None
        self._are_neighbours = False
        """Whether each has a line to each other one."""
        self._blocks: SharedBlocks | None = None
        self.sent_bytes: Counter[str] = Counter()
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
            group = _group_of(self.members, use_local_synchronization=True)  # of one, who knows its name
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
        self._run(what, _ALL_GATHER, found, own)
        return found.view(self.num, -1).tolist()

    def _neighbours(self, what: str) -> Lines:
        """To those of this machine. Made by the first meeting or exchange, in which all ranks are at the same point."""
        if self._lines is None:
            lines = Lines(group_timeout(torch.distributed))
            when_gone(self._group() or torch.distributed.group.WORLD, lines.close)
            reached = lines.connect(self.index, self._gathered_by_gloo(what, lines.listen()))
            of_all = self._gathered_by_gloo(what, reached)
            lines.accept([rank for rank, of_rank in enumerate(of_all) if of_rank[self.index]])
            of_all = self._gathered_by_gloo(what, [len(lines)])
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
            self._run(what, _ALL_GATHER, found.view(-1), own)
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
        self._run(what, _ALL_GATHER, found.view(-1), own)
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
            return getattr(torch.distributed, name)(tensor, member, group=self._group(), tag=tag)
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
            getattr(torch.distributed, name)(*args, group=self._group())
        except (RuntimeError, ValueError) as error:  # the second where the default group has been destroyed
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> RankError:
        why = self.causes.first() if self.causes is not None else None
        problem = f"another rank has ended, or did not come in time: {why or str(error).splitlines()[0]}"
        return RankError(what, problem, rank=self.number, cure=_CURE)


_ALONE = Ranks()
_worlds: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
"""By torch's default group, what `world` made of it: see [Note: how a group ends]."""


def world() -> Ranks:
    """All processes of ``torch.distributed``'s default group; this one alone without. The first call is made by all of them."""
    if not is_initialized() or torch.distributed.get_world_size() == 1:
        return _ALONE
    default = torch.distributed.group.WORLD
    if default not in _worlds:
        takes_host_memory = "gloo" in torch.distributed.get_backend_config()
        group = None if takes_host_memory else _group_of(None)
        index, num = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # A launcher's store outlives what it starts again, so each group has a part of its own.
        ranks = Ranks(index, num, group)
        number = ranks.meet("beginning", [secrets.randbits(62)])[0][0]
        store = default_store(torch.distributed)
        if store is not None:
            ranks.causes = Causes(store, f"infinity/{number}", index, num)
            ranks.causes.listen()
        _met.append(num)
        _worlds[default] = ranks
    return _worlds[default]


_subsets: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], Ranks]] = weakref.WeakKeyDictionary()
"""By torch's default group, purpose and numbers, what `subsets` made of those that this process is in."""


def subsets(wanted: Iterable[Sequence[int]], purpose: str = "") -> dict[tuple[int, ...], Ranks]:
    """Some of all processes, by their numbers: those of ``wanted`` that this one is in. All processes come with the same.

    ``purpose``: another one has other process groups, of all processes too, for whatever is exchanged beside the rest. What is
    sent through them counts as sent by the same processes.

    Each gets a process group of its own, whatever the script has: what it destroys, or exchanges, is no concern of theirs.

    [Note: names of groups] Members of a group find each other under its name. torch's new_group gives it a number that is the
    same on all ranks if all of them make all groups in the same order; with use_local_synchronization the name follows
    from how many groups a rank is in, which differs where a script has given some ranks more of them than others.
    """
    everyone = world()
    known = _subsets.setdefault(torch.distributed.group.WORLD, {})
    most = everyone.num if purpose else everyone.num - 1
    several = sorted({each for members in wanted if 0 < len(each := tuple(sorted(members))) <= most})
    mine = [everyone.number in members for members in several]
    lacking = [
        is_mine and not ((purpose, members) in known and known[purpose, members].has_group)
        for members, is_mine in zip(several, mine, strict=True)
    ]
    for members, is_mine, *lack in zip(several, mine, *everyone.meet("making process groups", lacking), strict=True):
        if not any(lack):
            continue
        group = _group_of(members) if len(members) > 1 else None
        if is_mine:
            made = Ranks(members.index(everyone.number), len(members), group, everyone.causes, members)
            same = everyone if members == everyone.members else known.get(("", members), made)
            made.sent_bytes = same.sent_bytes
            known[purpose, members] = made
    everyone.meet("having made process groups")  # or one that ends at once ends the joining of others
    of_all = {everyone.members: everyone}
    return of_all | {
        members: known[purpose, members] for members, is_mine in zip(several, mine, strict=True) if is_mine
    }


class Numbered:
    """A number that no other one in use has, on any process: for what is exchanged beside the rest, by one of several engines.

    All processes make it at the same point; each ends its use when nothing of it is under way any more.
    """

    def __init__(self) -> None:
        everyone = world()
        self._used: set[int] = everyone.services.setdefault("numbers", set())
        free = max(self._used, default=-1) + 1
        self.number = max(found for (found,) in everyone.meet("numbering process groups", [free]))
        self._used.add(self.number)

    def end(self) -> None:
        """It may be another one's from now on. From any thread; doing so again does nothing."""
        used, self._used = self._used, set()
        used.discard(self.number)


def _group_of(members: Sequence[int] | None, **kwargs: Any) -> Any:
    """A group that takes tensors on the CPU, and waits as long as the default one."""
    ranks = None if members is None else list(members)
    with _finding_each_other():
        return torch.distributed.new_group(ranks, backend="gloo", timeout=group_timeout(torch.distributed), **kwargs)


def members_of(group: Any) -> tuple[int, ...]:
    """The numbers of the processes of one of torch's groups; of None, as in torch, all."""
    return tuple(torch.distributed.get_process_group_ranks(group))
