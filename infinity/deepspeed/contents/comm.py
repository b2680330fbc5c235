"""DeepSpeed's module ``comm``: functions of ``torch.distributed``. The first exchange makes a process group if needed.

DeepSpeed's arguments ``prof``, ``log_name`` and ``debug`` have no effect. `barrier`, `get_rank` and `get_world_size`
make no group: a script may call them before `init_distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.distributed.process_groups import P2POp as P2POp
from infinity.distributed.process_groups import ReduceOp as ReduceOp
from infinity.distributed.process_groups import batch_isend_irecv as batch_isend_irecv
from infinity.distributed.process_groups import (
    call_torch,
    init_distributed,
    local_rank,
    num_processes,
    process_rank,
    world_group,
)
from infinity.distributed.process_groups import destroy_process_group as destroy_process_group
from infinity.distributed.process_groups import irecv as irecv
from infinity.distributed.process_groups import is_initialized as is_initialized
from infinity.distributed.process_groups import isend as isend
from infinity.distributed.process_groups import new_group as new_group

get_local_rank, get_world_group = local_rank, world_group
_OF_THE_LOG = frozenset({"prof", "log_name", "debug"})


def _torchs(name: str, **torchs_names: str) -> Callable[..., Any]:
    """A function of ``torch.distributed``. ``torchs_names``: what DeepSpeed calls arguments that torch calls otherwise."""

    def function(*args: Any, **given: Any) -> Any:
        kwargs = {torchs_names.get(key, key): value for key, value in given.items() if key not in _OF_THE_LOG}
        init_distributed()
        if name == "all_gather_into_tensor":  # gloo refuses 0-d tensors, NCCL does not
            args, kwargs = tuple(map(_in_one_dimension, args)), {key: _in_one_dimension(v) for key, v in kwargs.items()}
        return call_torch(name, *args, **kwargs)

    function.__doc__ = f"``torch.distributed.{name}``."
    return function


def _in_one_dimension(value: Any) -> Any:
    return value.reshape(1) if isinstance(value, torch.Tensor) and value.dim() == 0 else value


all_gather = _torchs("all_gather")
# DeepSpeed's own names beside torch's: `allgather_fn`, `inference_all_reduce`, `reduce_scatter_fn`.
all_gather_into_tensor = allgather_fn = _torchs("all_gather_into_tensor", tensor="input_tensor")
all_gather_object = _torchs("all_gather_object")
all_reduce = inference_all_reduce = _torchs("all_reduce")
all_to_all = _torchs("all_to_all")
all_to_all_single = _torchs("all_to_all_single", tensor="input")
broadcast = _torchs("broadcast")
broadcast_object_list = _torchs("broadcast_object_list")
gather = _torchs("gather")
monitored_barrier = _torchs("monitored_barrier")
recv = _torchs("recv")
reduce = _torchs("reduce")
reduce_scatter = _torchs("reduce_scatter")
reduce_scatter_tensor = reduce_scatter_fn = _torchs("reduce_scatter_tensor", output_tensor="output", tensor="input")
scatter = _torchs("scatter")
send = _torchs("send")


def get_rank(group: Any = None) -> int:
    """This process's number in the group; in that of all without one."""
    return process_rank() if group is None else int(call_torch("get_rank", group))


def get_world_size(group: Any = None) -> int:
    """How many processes are in the group; in that of all without one."""
    return num_processes() if group is None else int(call_torch("get_world_size", group))


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The numbers among all of the processes in the group."""
    return list(call_torch("get_process_group_ranks", get_world_group() if group is None else group))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The number among all of a process of the group."""
    return group_rank if group is None else int(call_torch("get_global_rank", group, group_rank))


def is_available() -> bool:
    """True: one process can always talk to itself."""
    return True


def barrier(*args: Any, **kwargs: Any) -> Any:
    """``torch.distributed.barrier``, where there are several processes."""
    return _barrier(*args, **kwargs) if num_processes() > 1 else None


_barrier = _torchs("barrier")


def all_reduce_coalesced(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """`all_reduce` of each tensor. With ``async_op`` the handle is the last one's: a group does one after the other."""
    return ([all_reduce(tensor, *args, **kwargs) for tensor in tensors] or [None])[-1]


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """`all_gather_into_tensor` for each pair; the handle as of `all_reduce_coalesced`."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    handles = [all_gather_into_tensor(output, tensor, group=group, async_op=async_op) for output, tensor in pairs]
    return (handles or [None])[-1]
