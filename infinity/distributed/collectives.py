"""Everything that concerns other processes. The only place that knows ``torch.distributed``."""

from __future__ import annotations

import os
from typing import Any

import torch

from infinity.errors import ConfigError


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
