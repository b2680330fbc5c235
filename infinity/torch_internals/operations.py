"""Facts about torch's operations: which read metadata only, which write, which can be split."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
    """A tree with ``replace(leaf)`` for each leaf; ``tree`` itself if that changes no leaf."""
    if not isinstance(tree, tuple | list | dict):
        return replace(tree)
    before = list(tree.values()) if isinstance(tree, dict) else list(tree)
    after = [replaced(item, replace) for item in before]
    if all(a is b for a, b in zip(before, after, strict=True)):
        return tree
    if isinstance(tree, dict):
        return dict(zip(tree, after, strict=True))
    kind: Any = type(tree)
    return kind(*after) if hasattr(tree, "_fields") else kind(after)  # a named tuple takes its fields one by one


def with_parts(given: Any, parts: Callable[[Any], Sequence[Any]]) -> Any:
    """Parameters, (name, parameter) pairs or groups, as optimizers take them, with ``parts`` in place of each parameter."""
    if isinstance(given, Mapping):
        return {**given, "params": with_parts(given["params"], parts)}
    if isinstance(given, torch.Tensor):
        return list(parts(given))
    found: list[Any] = []
    # No tree of torch's, to which iterators and views of dicts are leaves: groups may have those.
    for item in given:
        if isinstance(item, tuple):
            own = parts(item[1])
            names = [item[0]] if len(own) == 1 else [f"{item[0]}.{number}" for number in range(len(own))]
            found += zip(names, own, strict=True)
        else:
            found += [with_parts(item, parts)] if isinstance(item, Mapping) else parts(item)
    return found


def name_of(function: Callable[..., Any]) -> str:
    """The operation as a user would write it."""
    # torch passes `Tensor.grad.__get__` to __torch_function__ for `x.grad`: its owner is a descriptor, whose name is
    # wanted.
    name = getattr(function, "__name__", None) or str(function)
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(function, "__self__", None)
        attribute = getattr(owner, "__name__", name)
        return f"assigning .{attribute}" if name == "__set__" else f".{attribute}"
    return str(name)


# Attributes that are read, attributes that are set, and methods that are called, without values of the tensor. Those
# that this torch does not have are skipped. An operation that is missing here only costs a fetch of its unit.
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
"""Operations on metadata only, for which a placeholder gives the right answer."""
# `_has_compatible_shallow_copy_type` is called by Module._apply for each parameter.

REBINDING: frozenset[Any] = frozenset({torch.Tensor.set_, torch.Tensor.resize_, torch.Tensor.resize_as_})
"""Operations that give a tensor other memory, unseen by the engine."""

EXPOSING = frozenset({"data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_"})
"""Names of operations that give access to the memory by something else than a tensor."""

JOINING = frozenset(
    {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack"}
)
"""Names of operations whose result is a copy of all arguments, one after the other."""

AS_ARRAY = frozenset({"numpy", "__array__"})
"""Names of operations that return a NumPy array over the memory."""

# By torch's convention, methods that end in "_" write in place. `requires_grad_` sets a flag, and `share_memory_` is
# refused elsewhere. `__iadd__` and the like are methods of their own: there is one without the "i" as well, which there
# is not for `__iter__`.
WRITING_METHODS: tuple[str, ...] = tuple(
    name
    for name in dir(torch.Tensor)
    if (name.endswith("_") and not name.startswith("_") and name not in ("requires_grad_", "share_memory_"))
    or name == "__setitem__"
    or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))
)
"""Methods of a tensor that write to it."""


def writes_unseen(function: Callable[..., Any]) -> bool:
    """Whether the operation writes to the tensors of its first argument without incrementing their versions."""
    # The fused optimizer kernels and GradScaler's `_amp_foreach_non_finite_check_and_unscale_`.
    return name_of(function).startswith(("_fused_", "_amp_"))


def may_write(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether the operation may write to one of its arguments. False only if that is certain."""
    name = name_of(function).partition(".")[0]  # "add_.Tensor" of an aten overload -> "add_"
    if kwargs.get("out") is not None or name in WRITING_METHODS or name.endswith("_"):
        return True
    # torch's C functions without "_" or `out` do not write. A function in Python (of torch.nn.functional, or a user's)
    # may: functional.batch_norm writes to running statistics, functional.relu has `inplace`.
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
    """Whether the operation would convert ``tensor`` to the dtype and device that it already has."""
    # torch returns the tensor itself then, so nothing has to be fetched.
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
    parse: Any = torch._C._nn._parse_to  # torch's parser for the signatures of `to`
    try:
        device, dtype, _, memory_format = parse(*args[1:], **kwargs)
    except (TypeError, RuntimeError):
        return False
    return memory_format is None and dtype in (None, tensor.dtype) and (device is None or _is_there(tensor, device))


def _is_there(tensor: torch.Tensor, device: torch.device) -> bool:
    if device.type != tensor.device.type:
        return False
    index: Any = device.index  # "cuda" without an index means the current device
    if index is None and device.type == "cuda":
        index = torch.cuda.current_device()
    return index in (None, tensor.device.index or 0)


def unit_by_unit(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: Callable[[Sequence[Any]], Hashable],
) -> tuple[Any] | None:
    """Split a call of a ``_foreach_`` or ``_fused_`` operation into one call per ``key``, and join the results.

    ``key`` gets the elements at one index of all lists. Returns the result in a 1-tuple, or None if one call is enough.
    """
    # Worked example: _foreach_add_([p0, p1, p2], [g0, g1, g2], alpha=2), with p0 and p2 in unit A and p1 in unit B,
    # runs as _foreach_add_([p0, p2], [g0, g2], alpha=2) and _foreach_add_([p1], [g1], alpha=2). So one unit at a time
    # is in memory.
    length = len(args[0]) if args and isinstance(args[0], list | tuple) else 0
    if not name_of(function).startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return None

    def is_list(value: Any) -> bool:
        if isinstance(value, torch.Tensor):  # a tensor of scalars, one per element, as of _foreach_addcmul
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
        # What one group's call gets of an argument: the entries of each list at the group's places.
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
