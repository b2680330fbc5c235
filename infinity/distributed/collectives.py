"""Everything that concerns other processes. The only place that knows ``torch.distributed``."""

from __future__ import annotations

import os
from typing import Any

import torch

from infinity.errors import ConfigError

ReduceOp: Any = getattr(torch.distributed, "ReduceOp", None)
"""torch's names of what is done with several tensors."""


def check_single_process() -> None:
    """Refuse to start in a group of several processes.

    Raises:
        ConfigError: ``torch.distributed`` runs with more than one process.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ConfigError(
            f"torch.distributed runs with {distributed.get_world_size()} processes: training on several is not "
            "supported yet. Start one process"
        )


def is_initialized() -> bool:
    """Whether ``torch.distributed`` has a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Make a process group of this one process, unless there is one, for scripts that ask it for their rank.

    RANK, LOCAL_RANK and WORLD_SIZE are set if they are not. The engine needs none of this. Arguments are taken as
    DeepSpeed takes them, and mean nothing with one process.

    Raises:
        ConfigError: a launcher has started several processes.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes > 1:
        raise ConfigError(f"WORLD_SIZE is {num_processes}: training on several is not supported yet. Start one process")
    check_single_process()
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    if torch.distributed.is_available() and not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "gloo"
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's list
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


def world_group() -> Any:
    """The process group of this one process; made if there is none."""
    init_distributed()
    return torch.distributed.group.WORLD


def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A further process group of this one process, for scripts that pass groups around.

    Args:
        ranks: [0], or None.
        args, kwargs: as of ``torch.distributed.new_group``.

    Raises:
        ConfigError: ``ranks`` names another process.
    """
    if ranks is not None and list(ranks) != [0]:
        raise ConfigError(f"a group of the ranks {list(ranks)}, but there is one process, 0. Make it of [0]")
    init_distributed()
    return torch.distributed.new_group(ranks, *args, **kwargs)


def destroy_process_group(group: Any = None) -> None:
    """Take a group down, as ``torch.distributed`` does; nothing if there is none."""
    if is_initialized():
        torch.distributed.destroy_process_group(group)
