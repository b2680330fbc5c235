"""Puts large results of torch's operations into memory from a given allocator, such as mapped files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_aten: Any = torch.ops.aten
_CPU = torch.device("cpu")
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


_BLANK = ("empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "zeros", "zeros_like")


def _leave(out: torch.Tensor, *args: Any, **options: Any) -> None:
    """Do nothing: the memory is zeros, and either zeros or any values were asked for."""


# Operations whose result can be written straight to given memory, and how. `empty` and `zeros` are what
# `nn.Module.__init__` calls for its parameters. Results of all other operations exist in ordinary memory first, and are
# copied (`_moved`).
_FILLS: dict[Any, Callable[..., object]] = {
    _aten._to_copy.default: lambda out, source, **options: out.copy_(source),
    _aten.clone.default: lambda out, source, **options: out.copy_(source),
    _aten.cat.default: lambda out, tensors, dim=0: torch.cat(tensors, dim, out=out),
    _aten.stack.default: lambda out, tensors, dim=0: torch.stack(tensors, dim, out=out),
    **dict.fromkeys((_aten.empty.memory_format, *(getattr(_aten, name).default for name in _BLANK)), _leave),
}


class LargeResults(TorchDispatchMode):
    """Inside a ``with`` block, large results that this thread computes on the CPU are in given memory, with the same
    bits."""

    def __init__(self, least_bytes: int, new: Callable[[int], torch.Tensor]) -> None:
        """
        Args:
            least_bytes: bytes of the smallest storage that is large.
            new: returns so many bytes of zeros, uint8, 1-D.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._least_bytes = least_bytes
        self._new = new

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fill = _FILLS.get(func)
        if fill is None:
            return self._moved(func(*args, **kwargs), func, args, kwargs)
        # The size of the result is found out on the meta device, before anything is allocated.
        result = _described(func, args, kwargs)
        if result is None or result.untyped_storage().nbytes() < self._least_bytes:
            return func(*args, **kwargs)
        out = self._place(result)
        fill(out, *args, **kwargs)
        return out

    def _place(self, like: torch.Tensor) -> torch.Tensor:
        # The whole storage, and not numel * itemsize: strides with gaps need more bytes than elements.
        memory = self._new(like.untyped_storage().nbytes())
        return memory.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    def _moved(self, results: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an operation's results, with those that are large and new copied to given memory."""
        # An alias annotation in the schema means a view of an argument, or an argument that was written in place. Its
        # memory belongs to the argument.
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return results
        # Some operations without annotations return an argument's memory all the same (`contiguous`, `reshape`):
        # compared by address.
        known = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}

        def move(result: torch.Tensor) -> torch.Tensor:
            if not _is_plain(result) or _address(result) in known:
                return result
            if result.untyped_storage().nbytes() < self._least_bytes:
                return result
            return self._place(result).copy_(result)

        return tree_map_only(torch.Tensor, move, results)


def _described(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The result as a meta tensor; None if it is not a plain tensor on the CPU, or cannot be found out."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    device = kwargs.get("device") or (tensors[0].device if tensors else _CPU)
    # `zeros_like` of a tensor on another device is fine, as only its shape is used. `clone` needs values that the CPU
    # can read.
    needs_values = _FILLS[func] is not _leave
    if torch.device(device) != _CPU or kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory"):
        return None
    # A subclass may have another meaning of the operation, and has a dispatch of its own.
    if any(type(each) not in _PLAIN_TYPES or (needs_values and not _is_plain(each)) for each in tensors):
        return None
    if any(each.layout is not torch.strided for each in tensors):
        return None
    args, kwargs = tree_map_only(torch.Tensor, _without_values, (args, kwargs))
    # Factory functions have no tensor argument that would put their result on the meta device.
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": "meta"}
    result: torch.Tensor = func(*args, **kwargs)
    return result


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device == _CPU and not tensor.is_quantized


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _is_plain(tensor) else 0
