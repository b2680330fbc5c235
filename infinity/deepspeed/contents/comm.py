"""DeepSpeed's module ``comm``: torch's functions where several processes train together. With one, all is done.

Sums, means and largest values over one process are its own tensor; what is gathered, scattered or exchanged is copied from
input to output. With ``async_op=True`` a handle comes back whose ``wait()`` returns at once. None of it needs
`init_distributed`, but those that give a group do, and make it themselves. What DeepSpeed's functions take for its log of
exchanges (``prof``, ``log_name``, ``debug``) is without effect.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, TypeVar, cast

import torch

from infinity.distributed.process_groups import (
    P2POp,
    ReduceOp,
    batch_isend_irecv,
    call_torch,
    destroy_process_group,
    init_distributed,
    irecv,
    is_initialized,
    isend,
    local_rank,
    new_group,
    num_processes,
    world_group,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OF_THE_LOG = frozenset({"prof", "log_name", "debug"})


def _torchs(name: str | None = None, **torchs_names: str) -> Callable[[_Function], _Function]:
    """Makes a function for one process that of torch, of this or the same name, where there are several.

    ``torchs_names``: what DeepSpeed calls arguments that torch, and the function for one process, call otherwise.
    """

    def make(alone: _Function) -> _Function:
        @functools.wraps(alone)
        def function(*args: Any, **given: Any) -> Any:
            kwargs = {torchs_names.get(key, key): value for key, value in given.items() if key not in _OF_THE_LOG}
            if num_processes() == 1:
                return alone(*args, **kwargs)
            init_distributed()
            return call_torch(name or alone.__name__, *args, **kwargs)

        return cast(_Function, function)

    return make


class Done:
    """The handle of what is done."""

    def wait(self, timeout: Any = None) -> bool:
        """True."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


def _done(async_op: bool) -> Done | None:
    return Done() if async_op else None


@_torchs()
def get_rank(group: Any = None) -> int:
    """0: there is one process."""
    return 0


def get_local_rank() -> int:
    """This process's number on its machine; 0 if there is one process."""
    return local_rank()


@_torchs()
def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """0: there is one process."""
    return 0


@_torchs("get_process_group_ranks")
def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """[0]: there is one process."""
    return [0]


@_torchs()
def get_world_size(group: Any = None) -> int:
    """1: there is one process."""
    return 1


def get_world_group() -> Any:
    """The group of all processes, as ``torch.distributed`` has it."""
    return world_group()


def is_available() -> bool:
    """True: one process can always talk to itself."""
    return True


@_torchs()
def barrier(*args: Any, async_op: bool = False, **kwargs: Any) -> Done | None:
    """Nobody else has to arrive."""
    return _done(async_op)


@_torchs()
def monitored_barrier(*args: Any, **kwargs: Any) -> None:
    """As `barrier`."""


@_torchs()
def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Done | None:
    """The sum, mean, least or largest of one tensor is that tensor."""
    return _done(async_op)


inference_all_reduce = all_reduce


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], *args: Any, async_op: bool = False, **kwargs: Any
) -> Done | None:
    """As `all_reduce`, of each of them."""
    for tensor in tensors:
        all_reduce(tensor, *args, **kwargs)
    return _done(async_op)


@_torchs()
def reduce(tensor: torch.Tensor, dst: int = 0, *args: Any, async_op: bool = False, **kwargs: Any) -> Done | None:
    """As `all_reduce`."""
    return _done(async_op)


@_torchs()
def broadcast(tensor: torch.Tensor, src: int = 0, *args: Any, async_op: bool = False, **kwargs: Any) -> Done | None:
    """It is where it has to be."""
    return _done(async_op)


@_torchs()
def broadcast_object_list(object_list: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """They are where they have to be."""


@_torchs()
def all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any
) -> Done | None:
    """Copy ``tensor`` into the one tensor of ``tensor_list``.

    Raises:
        ValueError: the list has not one element.
    """
    _only(tensor_list).detach().copy_(tensor)
    return _done(async_op)


@_torchs()
def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    *args: Any,
    async_op: bool = False,
    **_: Any,
) -> Done | None:
    """As `all_gather`, where there is a list."""
    return _done(async_op) if gather_list is None else all_gather(gather_list, tensor, async_op=async_op)


@_torchs()
def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    *args: Any,
    async_op: bool = False,
    **_: Any,
) -> Done | None:
    """Copy the one tensor of ``scatter_list`` into ``tensor``.

    Raises:
        ValueError: the list has not one element.
    """
    if scatter_list is not None:
        tensor.detach().copy_(_only(scatter_list))
    return _done(async_op)


@_torchs()
def reduce_scatter(
    output: torch.Tensor, input_list: Sequence[torch.Tensor], *args: Any, async_op: bool = False, **kwargs: Any
) -> Done | None:
    """Copy the one tensor of ``input_list`` into ``output``.

    Raises:
        ValueError: the list has not one element.
    """
    return scatter(output, input_list, async_op=async_op)


@_torchs(tensor="input_tensor")
def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any
) -> Done | None:
    """Copy one tensor into the other, which has as many elements, in their order; shapes may differ.

    Raises:
        RuntimeError: it has not as many.
    """
    output_tensor.detach().copy_(input_tensor.detach().reshape(output_tensor.shape))
    return _done(async_op)


allgather_fn = all_gather_into_tensor


@_torchs(output_tensor="output", tensor="input")
def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any
) -> Done | None:
    """As `all_gather_into_tensor`."""
    return all_gather_into_tensor(output, input, async_op=async_op)


reduce_scatter_fn = reduce_scatter_tensor


@_torchs(tensor="input")
def all_to_all_single(
    output: torch.Tensor, input: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any
) -> Done | None:
    """As `all_gather_into_tensor`."""
    return all_gather_into_tensor(output, input, async_op=async_op)


@_torchs()
def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    *args: Any,
    async_op: bool = False,
    **kwargs: Any,
) -> Done | None:
    """Copy the one tensor of ``input_tensor_list`` into that of ``output_tensor_list``.

    Raises:
        ValueError: a list has not one element.
    """
    return all_gather(output_tensor_list, _only(input_tensor_list), async_op=async_op)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Done | None:
    """As `all_gather_into_tensor`, for each pair.

    Raises:
        ValueError: there are not as many outputs as inputs.
    """
    for output, tensor in zip(output_tensors, input_tensors, strict=True):
        all_gather_into_tensor(output, tensor, group=group)
    return _done(async_op)


@_torchs()
def all_gather_object(object_list: MutableSequence[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
    """Put a copy of ``obj`` into the one place of ``object_list``.

    Raises:
        ValueError: the list has not one element.
    """
    _only(object_list)
    object_list[0] = copy.deepcopy(obj)


@_torchs()
def send(tensor: torch.Tensor, dst: int, *args: Any, **kwargs: Any) -> None:
    """Another process gets ``tensor``, which asks for it by `recv`.

    Raises:
        ValueError: there is one process.
    """
    raise ValueError(_NOBODY)


@_torchs()
def recv(tensor: torch.Tensor, src: int | None = None, *args: Any, **kwargs: Any) -> int:
    """Fill ``tensor`` with what another process gives to `send`; returns which one that was.

    Raises:
        ValueError: there is one process.
    """
    raise ValueError(_NOBODY)


def _only(items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise ValueError(f"a list of {len(items)} for 1 process. Make it as long as get_world_size() says")
    return items[0]


_NOBODY = "there is one process, and nobody to send to or receive from. Start the script with torchrun"

__all__ = [
    "P2POp",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]
