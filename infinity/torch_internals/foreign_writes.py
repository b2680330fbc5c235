"""Writes to memory of tensors that torch does not count in their versions.

Knows torch's dispatcher and the methods that give memory away; must not know units or parameters.

[Note: uncounted writes]
Fused kernels (``torch._fused_adamw_``, and those of a `GradScaler`) write to their tensors and do not count it. While an
engine lives, a kernel in front of theirs says so before and after.
Who has the memory itself (an array, an address, a storage, a DLPack capsule) writes past torch. There is nothing to count,
but something to see: whoever asks a tensor for its memory. So while an engine lives, the methods that give it away say so
before, of any tensor, for nobody can know from which view of a weight it is asked. What is looked up is one address in a
dict. If it is that of weights that are open, a checksum of the parameter is taken, and compared when its use ends.
So it is with ``apply_``, ``map_`` and ``map2_``, which write past torch's dispatcher.
What C++ does with a tensor that it is given stays unseen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.utils.dlpack


class Watcher(Protocol):
    """Whoever wants to know of it."""

    def before_write(self, tensor: torch.Tensor) -> None:
        """``tensor`` is about to be written to."""
        ...

    def after_write(self, tensor: torch.Tensor) -> None:
        """It has been."""
        ...

    def before_exposure(self, tensor: torch.Tensor) -> None:
        """The memory of ``tensor`` is about to be given to somebody who may write to it."""
        ...

    def before_storage_write(self, address: int) -> None:
        """The storage at ``address`` is about to be written to as such. May raise."""
        ...


_BASE: Any = torch._C.TensorBase
plain_array: Callable[[torch.Tensor], Any] = _BASE.numpy
"""``tensor.numpy()``, for the engine itself."""
plain_storage: Callable[[torch.Tensor], Any] = _BASE.untyped_storage
"""``tensor.untyped_storage()``, likewise."""

plain_address: Callable[[torch.Tensor], int] = _BASE.data_ptr
"""``tensor.data_ptr()``, likewise."""

_watchers: tuple[weakref.ref[Any], ...] = ()
_installed: list[Callable[[], None]] = []
"""What takes back what `watch` has done."""


def watch(watcher: Watcher) -> None:
    """``watcher`` is told from now on, until `unwatch`, or as long as it lives."""
    global _watchers
    _watchers = (*(known for known in _watchers if known() is not None), weakref.ref(watcher))
    if not _installed:
        library = torch.library.Library("aten", "IMPL")
        for operation in _fused_kernels():
            library.impl(operation, _announcing(operation), "ADInplaceOrView", with_keyset=True)
        _installed.append(library._destroy)
        for owner, name in _EXPOSING:
            _wrap(owner, name, torch.Tensor, lambda watcher, tensor: watcher.before_exposure(tensor))
        for owner in (torch.UntypedStorage, torch.storage.TypedStorage):
            for name in ("fill_", "copy_", "__setitem__"):
                _wrap(owner, name, owner, _announce_storage_write)


def _announce_storage_write(watcher: Watcher, storage: Any) -> None:
    watcher.before_storage_write(getattr(storage, "_untyped_storage", storage).data_ptr())


def unwatch(watcher: Watcher) -> None:
    """The counterpart of `watch`: with the last watcher, torch is again as it was."""
    global _watchers
    _watchers = tuple(known for known in _watchers if known() not in (None, watcher))
    while not _watchers and _installed:
        _installed.pop()()


_EXPOSING: tuple[tuple[Any, str], ...] = (
    *((torch.Tensor, name) for name in ("numpy", "data_ptr", "untyped_storage", "__dlpack__")),
    *((torch.Tensor, name) for name in ("apply_", "map_", "map2_")),
    (torch.utils.dlpack, "to_dlpack"),
)


def _present() -> list[Any]:
    return [watcher for known in _watchers if (watcher := known()) is not None]


def _wrap(owner: Any, name: str, kind: type, announce: Callable[[Any, Any], None]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(first, kind):
            for watcher in _present():
                announce(watcher, first)
        return function(first, *args, **kwargs)

    is_own = name in vars(owner)
    setattr(owner, name, wrapped)
    _installed.append(lambda: setattr(owner, name, function) if is_own else delattr(owner, name))


@functools.cache
def _fused_kernels() -> tuple[Any, ...]:
    """Those that write. torch has thousands of operations, which takes milliseconds to go through."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(("aten::_fused_", "aten::_amp_foreach_")):
            base, _, overload = name.removeprefix("aten::").partition(".")
            operation = getattr(getattr(torch.ops.aten, base), overload or "default")
            first = operation._schema.arguments[0]
            if first.alias_info is not None and first.alias_info.is_write:
                found.append(operation)
    return tuple(found)


def _announcing(operation: Any) -> Callable[..., Any]:
    after: Any = torch._C._after_ADInplaceOrView_keyset

    def kernel(keyset: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        watchers = _present()
        for watcher in watchers:
            for tensor in tensors:
                watcher.before_write(tensor)
        result = operation.redispatch(keyset & after, tensors, *args, **kwargs)
        for watcher in watchers:
            for tensor in tensors:
                watcher.after_write(tensor)
        return result

    return kernel
