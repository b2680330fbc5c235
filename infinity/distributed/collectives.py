"""Everything that concerns other processes. The only place that knows ``torch.distributed``.

[Note: ranks] Every rank runs the same script on its own data, and holds all weights and states, each on its own drives.
What they have in common:
  * When `initialize` takes the model over, all ranks take the weights and buffers of rank 0, as DDP does.
  * When a backward has ended whose gradients are to be used, ranks tell each other which parameters got gradients since the
    last time, and average those: unit by unit in the order of units, parameter by parameter. The order follows from the
    model alone. It must not follow from reads, updates or prefetches, which are early or late on each rank for itself; so no
    thread but the one that trains talks to other ranks.
  * Before a step changes anything, ranks compare the norm of all gradients, bit for bit. Clipping and skipped steps (fp16)
    follow from that norm, so all ranks do the same; and where one would do something else, because its script has changed
    a gradient, all of them raise.
  * Nothing else. With equal gradients, the engine's promise (the same bits as plain torch) makes equal weights on all.

[Note: the order of sums] Each rank multiplies its gradients by 1 / number of ranks, as DDP does. Ranks are then added in
their order, ((0 + 1) + 2) + ..., each element on one rank, and what comes out goes to all. So all have the same bits, and an
element's do not follow from where it lies. With two ranks DDP's sums are the same bit for bit; with more, gloo's ring begins
with another rank in each part of its buckets, and last bits differ.

[Note: meeting] Each exchange begins with a few numbers that say what it is. A rank that is elsewhere in its script (another
number of backwards, an exception that it caught) is thus found by all, before gradients of two kinds are added up. One that has
ended closes its connections, which ends the waiting of the others; one that hangs is waited for as long as the group's timeout.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from infinity.errors import ConfigError, RankError

ReduceOp: Any = getattr(torch.distributed, "ReduceOp", None)
"""torch's names of what is done with several tensors."""


def check_single_process(what: str) -> None:
    """Refuse ``what`` where several processes train together.

    Raises:
        ConfigError: they do.
    """
    if num_processes() > 1:
        raise ConfigError(
            f"{what} works in one process only, and {num_processes()} train together. Start one process, or use "
            "infinity.initialize with a loop of your own"
        )


def num_processes() -> int:
    """How many train together: of ``torch.distributed``'s group, or as a launcher says that there will be."""
    if is_initialized():
        return int(torch.distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_initialized() -> bool:
    """Whether ``torch.distributed`` has a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def init_distributed(dist_backend: str | None = None, *args: Any, timeout: Any = None, **kwargs: Any) -> None:
    """Make the process group, unless there is one: that of a launcher (torchrun), or of this one process.

    `initialize` does this where a launcher has started several. With one process, RANK, LOCAL_RANK and WORLD_SIZE are set
    if they are not.

    Args:
        dist_backend: as torch names it; None: nccl where there are GPUs, else gloo.
        args, kwargs: taken as DeepSpeed takes them, without effect.
        timeout: a `datetime.timedelta`: how long a process waits for the others. None: torch's, half an hour.

    Raises:
        ConfigError: several processes are to train together, and their launcher has not told how they find each other.
    """
    if is_initialized():
        return
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    num = num_processes()
    if num > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {num}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. Start the "
                "script with torchrun, or unset WORLD_SIZE for one process"
            )
        torch.distributed.init_process_group(dist_backend or ("nccl" if has_nccl else "gloo"), timeout=timeout)
        return
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    if torch.distributed.is_available():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's list
        torch.distributed.init_process_group("nccl" if has_nccl else "gloo", store=store, rank=0, world_size=1)


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


def call_torch(name: str, *args: Any, **kwargs: Any) -> Any:
    """A function of ``torch.distributed``, by its name."""
    return getattr(torch.distributed, name)(*args, **kwargs)


def local_rank() -> int:
    """This process's number on its machine, as its launcher says; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_local_processes() -> int:
    """How many of those that train together are on this machine, as their launcher says; else all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(num_processes()))) if num_processes() > 1 else 1


_BLOCK_NUMEL = 1 << 20
"""Elements that are exchanged at a time. Twice as many are in memory for it."""
_ALL_GATHER = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "all_gather_into_tensor"
"""Since torch 2.13, and before."""
_CURE = (
    "The first rank to fail says why in its own output. All ranks have to make the same calls in the same order: as many "
    "backwards and steps, each on its own data"
)


class Ranks:
    """The processes that train together; see the module's notes. Only the thread that trains calls it.

    Everything raises RankError if another process has ended, does not come, or comes with something else.
    """

    def __init__(self, index: int = 0, num: int = 1, group: Any = None) -> None:
        """
        Args:
            index: this process.
            num: how many there are.
            group: torch's process group of all of them, which takes tensors on the CPU; None: the default one.
        """
        self.index = index
        self.num = num
        self._group = group

    def meet(self, what: str, values: Sequence[int] = ()) -> list[list[int]]:
        """Wait until all ranks come with the same ``what``, and as many ``values`` (of 64 bits). Returns those of each."""
        if self.num == 1:
            return [list(values)]
        label = [zlib.crc32(what.encode()), len(values)]
        labels = self._gathered(what, label)
        if any(other != label for other in labels):
            others = ", ".join(str(rank) for rank, other in enumerate(labels) if other != label)
            raise RankError(what, f"rank {others} came with something else", rank=self.index, cure=_CURE)
        return self._gathered(what, values) if values else [[] for _ in labels]

    def _gathered(self, what: str, values: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(values, dtype=torch.int64, device="cpu")
        found = torch.empty(self.num * len(values), dtype=torch.int64, device="cpu")
        self._run(what, _ALL_GATHER, found, own)
        return found.view(self.num, -1).tolist()

    def average(self, what: str, values: torch.Tensor) -> None:
        """Replace ``values`` (1-D, on the CPU, floating) by the mean over all ranks, which is computed in fp32.

        All ranks must be known to come with as many values: see `meet`.
        """
        if self.num == 1:
            return
        most = min(_BLOCK_NUMEL, values.numel())
        parts = torch.zeros((self.num, -(-most // self.num)), dtype=torch.float32, device="cpu")
        received = torch.empty_like(parts)
        for start in range(0, values.numel(), _BLOCK_NUMEL):
            block = values[start : start + _BLOCK_NUMEL]
            sent = parts.view(-1)[: block.numel()]
            sent.copy_(block).mul_(1.0 / self.num)
            self._run(what, "all_to_all_single", received, parts)
            for part in received[1:]:
                received[0].add_(part)
            self._run(what, _ALL_GATHER, parts, received[:1])
            block.copy_(sent)

    def take_from(self, what: str, source: int, tensor: torch.Tensor) -> None:
        """``tensor``, of any dtype, strides and device, becomes that of rank ``source``; written to only where it differs."""
        if self.num == 1:
            return
        if not 0 <= source < self.num:
            raise ValueError(f"{what}: rank {source}, and there are {self.num}. Take one from 0 to {self.num - 1}")
        flat = tensor.detach().cpu().reshape(-1)
        found = flat.clone() if self.index != source else flat.contiguous()
        raw = found.view(torch.uint8) if found.numel() else found
        for start in range(0, raw.numel(), 4 * _BLOCK_NUMEL):
            self._run(what, "broadcast", raw[start : start + 4 * _BLOCK_NUMEL], source)
        if self.index != source and not torch.equal(raw, flat.view(torch.uint8) if flat.numel() else flat):
            with torch.no_grad():
                tensor.copy_(found.view(tensor.shape))

    def _run(self, what: str, name: str, *args: Any) -> None:
        try:
            getattr(torch.distributed, name)(*args, group=self._group)
        except RuntimeError as error:
            problem = f"another rank has ended, or did not come in time ({str(error).splitlines()[0]})"
            raise RankError(what, problem, rank=self.index, cure=_CURE) from error


_ALONE = Ranks()
_worlds: list[tuple[Any, Ranks]] = []
"""torch's default group, and what `world` made of it: none, or one."""


def world() -> Ranks:
    """All processes of ``torch.distributed``'s default group; this one alone without. The first call is made by all of them."""
    if not is_initialized() or torch.distributed.get_world_size() == 1:
        return _ALONE
    default = torch.distributed.group.WORLD
    if not _worlds or _worlds[0][0] is not default:
        takes_host_memory = "gloo" in torch.distributed.get_backend_config()
        group = None if takes_host_memory else torch.distributed.new_group(backend="gloo")
        _worlds[:] = [(default, Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), group))]
    return _worlds[0][1]
