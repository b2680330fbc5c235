"""What is known of torch's operations by themselves: which only look at metadata, which write, which can be taken apart.

Knows functions and their arguments; must not know parameters or where anything is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists, dicts and their subclasses."""
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree


def replaced(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """A tree like ``tree`` with ``replace(leaf)`` for each leaf; the very ``tree`` if all leaves stay the same objects."""
    if not isinstance(tree, tuple | list | dict):
        return replace(tree)
    before = list(tree.values()) if isinstance(tree, dict) else list(tree)
    after = [replaced(item, replace) for item in before]
    if all(a is b for a, b in zip(before, after, strict=True)):
        return tree
    if isinstance(tree, dict):
        return dict(zip(tree, after, strict=True))
    kind: Any = type(tree)
    return kind(*after) if hasattr(tree, "_fields") else kind(after)


def name_of(function: Callable[..., Any]) -> str:
    """What a user would call the operation; of a property, the property's name."""
    name = getattr(function, "__name__", None) or str(function)
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(function, "__self__", None)
        attribute = getattr(owner, "__name__", name)
        return f"assigning .{attribute}" if name == "__set__" else f".{attribute}"
    return str(name)


_READ = """
    shape dtype device requires_grad is_leaf ndim layout grad_fn names itemsize nbytes is_cuda is_cpu is_meta
    is_sparse is_quantized is_mps is_xpu is_nested is_mkldnn is_sparse_csr is_vulkan is_ipu is_maia is_mtia is_xla
    retains_grad output_nr _version _backward_hooks _post_accumulate_grad_hooks name _base _grad
"""
_SET = "requires_grad _backward_hooks _post_accumulate_grad_hooks"
_CALLED = """
    numel nelement dim ndimension size element_size is_floating_point is_complex is_signed get_device
    requires_grad_ register_hook register_post_accumulate_grad_hook __hash__ __len__ _is_view is_inference
    has_names is_neg is_conj is_set_to is_same_size
"""


def _of_tensors(names: str) -> list[Any]:
    return [getattr(torch.Tensor, name) for name in names.split() if hasattr(torch.Tensor, name)]


METADATA: frozenset[Any] = frozenset(
    [
        *(attribute.__get__ for attribute in _of_tensors(_READ)),
        *(attribute.__set__ for attribute in _of_tensors(_SET)),
        *_of_tensors(_CALLED),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.result_type),
        torch._has_compatible_shallow_copy_type,
    ]
)
"""Operations that look at the metadata only, which a placeholder answers truthfully."""

REBINDING: frozenset[Any] = frozenset({torch.Tensor.set_, torch.Tensor.resize_, torch.Tensor.resize_as_})
"""Operations that give a tensor other memory, which the engine would not see."""

EXPOSING = frozenset({"data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_"})
"""Names of operations whose results look at the memory without being tensors."""

JOINING = frozenset(
    {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack"}
)
"""Names of operations whose results are all their arguments, copied one after the other."""

AS_ARRAY = frozenset({"numpy", "__array__"})
"""Names of those that give a NumPy array over the memory."""

_DUNDER_WRITES = ("__setitem__", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")

WRITING_METHODS: tuple[str, ...] = tuple(
    name
    for name in dir(torch.Tensor)
    if (name.endswith("_") and not name.startswith("_") and name not in ("requires_grad_", "share_memory_"))
    or name.strip("_") in _DUNDER_WRITES
    or name == "__setitem__"
)
"""Methods of a tensor that write to it."""


def writes_unseen(function: Callable[..., Any]) -> bool:
    """Whether the operation writes to the tensors of its first argument without counting that in their versions."""
    return name_of(function).startswith(("_fused_", "_amp_"))


def may_write(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether the operation may write to one of its arguments; False only if it is certain not to."""
    name = name_of(function).partition(".")[0]
    if kwargs.get("out") is not None or name in WRITING_METHODS or name.endswith("_"):
        return True
    module = getattr(function, "__module__", None)
    is_builtin = type(function).__name__ in ("builtin_function_or_method", "method_descriptor", "method-wrapper")
    return not is_builtin and module not in ("torch", "torch._tensor", "torch.functional", "torch._C._nn")


_CASTS: dict[Any, torch.dtype] = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.double: torch.float64,
}


def is_conversion_to_the_same(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensor: torch.Tensor
) -> bool:
    """Whether the operation would convert ``tensor``, its only argument, to the dtype and device that it has."""
    if function in _CASTS:
        return len(args) == 1 and not kwargs and tensor.dtype == _CASTS[function]
    if function is torch.Tensor.cpu:
        return len(args) == 1 and not kwargs and tensor.device.type == "cpu"
    if function is torch.Tensor.cuda:
        wanted = args[1] if len(args) > 1 else kwargs.get("device", torch.device("cuda"))
        wanted = torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted or "cuda")
        return _is_there(tensor, wanted)
    if function is not torch.Tensor.to or kwargs.get("copy") or any(isinstance(a, torch.Tensor) for a in args[1:]):
        return False
    parse: Any = torch._C._nn._parse_to
    try:
        device, dtype, _, memory_format = parse(*args[1:], **kwargs)
    except (TypeError, RuntimeError):
        return False
    return memory_format is None and dtype in (None, tensor.dtype) and (device is None or _is_there(tensor, device))


def _is_there(tensor: torch.Tensor, device: torch.device) -> bool:
    if device.type != tensor.device.type:
        return False
    index: Any = device.index
    if index is None and device.type == "cuda":
        index = torch.cuda.current_device()
    return index in (None, tensor.device.index or 0)


def unit_by_unit(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: Callable[[Sequence[Any]], Hashable],
) -> tuple[Any] | None:
    """Make a call of an operation over lists as calls over some of the elements each; the result that one call would give.

    ``key`` says of the elements at one place of all the lists with which others they go together. None: they all do.
    """
    length = len(args[0]) if args and isinstance(args[0], list | tuple) else 0
    if not name_of(function).startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return None

    def is_list(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.dim() == 1 and len(value) == length
        return isinstance(value, list | tuple) and len(value) == length

    lists = [value for value in (*args, *kwargs.values()) if is_list(value)]
    groups: dict[Hashable, list[int]] = {}
    for index in range(length):
        groups.setdefault(key([value[index] for value in lists]), []).append(index)
    if len(groups) < 2:
        return None
    results: list[Any] = [None] * length
    kind: type = type(None)
    for places in groups.values():

        def pick(value: Any, places: list[int] = places) -> Any:
            if not is_list(value):
                return value
            return value[places] if isinstance(value, torch.Tensor) else [value[place] for place in places]

        found = function(*map(pick, args), **{name: pick(value) for name, value in kwargs.items()})
        if isinstance(found, list | tuple) and len(found) == len(places):
            kind = type(found)
            for index, item in zip(places, found, strict=True):
                results[index] = item
    return (None if kind is type(None) else kind(results),)
