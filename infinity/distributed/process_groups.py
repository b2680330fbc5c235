"""How the processes of a run find each other, and part. The only place that knows ``torch.distributed``.

[Note: how a group ends] gloo's threads release tensors some time after what they carried is over, which takes Python's lock:
once the interpreter has begun to end, that aborts the process. A group joins its threads when nothing refers to it any more. So
nothing here keeps one alive that a script has destroyed, and one that nobody has destroyed is before the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from infinity.distributed.bounded import within
from infinity.errors import ConfigError, RankError
from infinity.torch_internals import names
from infinity.torch_internals.names import forget_default_groups, set_default_gpu

ReduceOp: Any = getattr(torch.distributed, "ReduceOp", None)
"""torch's names of what is done with several tensors."""
P2POp: Any = getattr(torch.distributed, "P2POp", None)
batch_isend_irecv: Any = getattr(torch.distributed, "batch_isend_irecv", None)
isend: Any = getattr(torch.distributed, "isend", None)
irecv: Any = getattr(torch.distributed, "irecv", None)
"""torch's own: its `P2POp` takes no other `isend` and `irecv`."""

T = TypeVar("T")
_DistError: Any = getattr(torch.distributed, "DistError", ())
"""What torch raises where processes do not find each other."""
_DEFAULT_TIMEOUT = timedelta(minutes=30)
"""torch's own."""
_GRACE_SECONDS = 10.0
"""How much longer than torch to wait for processes that do not come: its own error says more."""
_EXIT_SECONDS = 5.0
"""How long a group may take to end with the interpreter."""
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
    return number_of_launcher("WORLD_SIZE", "1")


def number_of_launcher(name: str, default: str) -> int:
    """A whole number that a launcher has put into the environment; ``default`` if the variable is not set or empty.

    Raises:
        ConfigError: it is none.
    """
    value = os.environ.get(name) or default
    try:
        return int(value)
    except ValueError:
        cure = "Start the script with torchrun, or correct the variable"
        raise ConfigError(f"environment variable {name} = {value!r}: must be a whole number. {cure}") from None


def untold_size() -> str | None:
    """The variable by which mpirun or srun tells that it has started several, where WORLD_SIZE does not say so."""
    names = (name for name in _LAUNCHERS_SIZES if number_of_launcher(name, "1") > 1)
    return None if "WORLD_SIZE" in os.environ else next(names, None)


def process_rank() -> int:
    """This process among all: of ``torch.distributed``'s group, or as a launcher says; 0 without both."""
    return int(torch.distributed.get_rank()) if is_initialized() else number_of_launcher("RANK", "0")


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
    """Make the process group if there is none: as the arguments say, as torchrun has described it, or for this process alone.

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
    rank = rank if rank >= 0 else number_of_launcher("RANK", "-1")
    if init_method not in (None, "env://"):
        num = world_size if world_size > 0 else number_of_launcher("WORLD_SIZE", "-1")
        _begin_group(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=num)
        return
    num = world_size if world_size > 0 else num_processes()
    if num > 1:
        missing = ["RANK"] if rank < 0 else []
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {num}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. Start the "
                "script with torchrun, or unset WORLD_SIZE for one process; or give init_distributed init_method, rank and "
                "world_size"
            )
        port = number_of_launcher("MASTER_PORT", "")
        if rank >= num or not 0 <= port < 1 << 16:
            raise ConfigError(
                f"RANK is {rank}, WORLD_SIZE is {num} and MASTER_PORT is {port}: ranks count from 0 to WORLD_SIZE - 1, and "
                "ports end at 65535. Correct the variables, or start the script with torchrun"
            )
        _begin_group(backend, timeout=timeout, store=_store_of_this_start(timeout), rank=rank, world_size=num)
        return
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    if torch.distributed.is_available():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's list
        _begin_group(backend, timeout=timeout, store=store, rank=0, world_size=1)


def _begin_group(backend: str, **options: Any) -> None:
    if "nccl" in backend:
        set_default_gpu(local_rank())  # nccl would take that of the first for all
    begin = functools.partial(torch.distributed.init_process_group, backend, **options)
    _find_each_other(begin, options.get("timeout"), rank=options["rank"])


def _find_each_other(
    function: Callable[[], T],
    timeout: timedelta | None,
    look: Callable[[], None] = lambda: None,
    rank: int | None = None,
) -> T:
    """Call what waits until the other processes have come, for as long as ``timeout`` (None: torch's) and a little more.

    torch keeps the time itself where the network works, and its error says more. Where a link is cut while it asks its store,
    it would wait as long as TCP does.

    Raises:
        RankError: they do not find each other; or as ``look``, which is called now and then, has raised.
    """
    seconds = (timeout or _DEFAULT_TIMEOUT).total_seconds() + _GRACE_SECONDS
    try:
        return within(seconds, function, look)
    except RankError:
        raise
    except (RuntimeError, TimeoutError) as error:
        text = str(error).splitlines()[0]
        is_about_others = isinstance(error, (TimeoutError, _DistError)) or re.search("gloo|timeout", text.lower())
        if not is_about_others:
            raise
        raise RankError(
            "making a process group",
            f"the processes do not reach each other: {text}",
            rank=process_rank() if rank is None else rank,
            cure="Look at the output of the other processes: one may have ended or not been started. gloo takes the network "
            "interface of this machine's name, which the others may not reach: set GLOO_SOCKET_IFNAME on all machines to the "
            "one that they share (`ip -br addr` names them; lo for one machine). init_distributed(timeout=...) says how long "
            "to wait",
        ) from error


def _store_of_this_start(timeout: timedelta | None) -> Any:
    """A part of torchrun's store for what it has started again; None if it is not known to hold an earlier start.

    Its store is still that of the start before (torch 2.13), and gloo would look for processes that have ended. Machines that
    find each other dynamically count restarts each for itself: there, no part of the store would be the same for all.
    """
    told = {name: os.environ.get(f"TORCHELASTIC_{name}") for name in ("USE_AGENT_STORE", "RUN_ID", "RESTART_COUNT")}
    is_counted_by_all = told["RUN_ID"] == "none" or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if told["USE_AGENT_STORE"] != "True" or told["RESTART_COUNT"] in (None, "0") or not is_counted_by_all:
        return None
    address, port = os.environ["MASTER_ADDR"], number_of_launcher("MASTER_PORT", "")
    wait = timeout or _DEFAULT_TIMEOUT
    store = torch.distributed.TCPStore(address, port, is_master=False, timeout=wait)  # type: ignore[attr-defined]
    return torch.distributed.PrefixStore(f"start {told['RESTART_COUNT']}", store)  # type: ignore[attr-defined]


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

    if met:
        with contextlib.suppress(RuntimeError, TimeoutError):  # then it is left as it is
            within(_EXIT_SECONDS, end)


met: list[int] = []
"""Sizes of the default groups that this process has used. They are destroyed when it ends."""
atexit.register(destroy_at_exit)  # from the import on, so that it comes after the engines' own hook


_NEW_NAMES = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""Old name -> name since torch 2.13, which warns about the old ones."""


def call_torch(name: str, *args: Any, **kwargs: Any) -> Any:
    """A function of ``torch.distributed``, by its name, or the one that it is called since."""
    newer = _NEW_NAMES.get(name, name)
    return getattr(torch.distributed, newer if hasattr(torch.distributed, newer) else name)(*args, **kwargs)


def local_rank() -> int:
    """This process's number on its machine, as its launcher says; 0 without one."""
    return number_of_launcher("LOCAL_RANK", "0")


def default_group() -> Any:
    """The process group of all; None if there is none."""
    return torch.distributed.group.WORLD


def default_store() -> Any:
    """See `infinity.torch_internals.names`."""
    return names.default_store(torch.distributed)


def group_of(members: Sequence[int] | None, look: Callable[[], None] = lambda: None, **kwargs: Any) -> Any:
    """A group that takes tensors on the CPU and on the default one's devices, and waits as long as that.

    ``look``: called now and then meanwhile.
    """
    ranks, timeout = None if members is None else list(members), names.group_timeout(torch.distributed)
    backend = ",".join(["cpu:gloo", *_backends_of_devices(None)])
    make = functools.partial(torch.distributed.new_group, ranks, backend=backend, timeout=timeout, **kwargs)
    return _find_each_other(make, timeout, look)


def has_backend_for(group: Any, device: torch.device) -> bool:
    """Whether a group (None: the default one) exchanges tensors on the device as they are, not by way of host memory."""
    return device.type == "cpu" or any(each.split(":")[0] == device.type for each in _backends_of_devices(group))


def _backends_of_devices(group: Any) -> list[str]:
    """As "cuda:nccl", those that a group has of devices with a memory of their own. gloo's go through host memory."""
    config = str(call_torch("get_backend_config", *([] if group is None else [group])))
    return [each for each in config.split(",") if not each.startswith("cpu:") and not each.endswith(":gloo")]
