"""At which places of a model's forward its buffers are used.

Knows tensors and their memory; must not know units or schedules. [Note: places] All micro-batches go through one place of
the forward, a block or what lies between two blocks, before any goes through the next. What a micro-batch writes to a buffer
at one place others have written over when it comes to the next. So a buffer that is written to may be used at one place only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from infinity.torch_internals.names import NormBase, version_of
from infinity.torch_internals.operations import leaves

Key = tuple[int, str]
"""The id of a module's dictionary of buffers, and the name of one."""


def buffers_of(model: nn.Module) -> Iterator[tuple[Key, nn.Module, str, torch.Tensor]]:
    """All buffers of a model: their keys, modules, names and values."""
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield (id(module._buffers), name), module, name, buffer


def has_own_writers(model: nn.Module, keys: Collection[Key]) -> bool:
    """Whether some of these buffers are written to by others than batch norms, which use theirs nowhere else."""
    norms = {
        (id(module._buffers), name)
        for module in model.modules()
        if isinstance(module, NormBase)
        for name in module._buffers
    }
    return any(key not in norms for key in keys)


class BufferWatch:
    """Takes note of each use while it is `watching`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._marks: dict[Key, tuple[int, int]] = {}
        self._at: dict[int, list[Key]] = {}
        self._places: defaultdict[Key, set[int]] = defaultdict(set)
        self.note(None)

    def note(self, place: int | None) -> None:
        """A micro-batch has come to the end of ``place``. What has been replaced or written to since was so there."""
        self._at = {}
        for key, _, _, buffer in buffers_of(self._model):
            mark = id(buffer), version_of(buffer)
            if place is not None and self._marks.get(key) != mark:
                self._places[key].add(place)
            self._marks[key] = mark
            address = _address(buffer)
            if address is not None:
                self._at.setdefault(address, []).append(key)

    def is_used_at_one_place(self, key: Key) -> bool:
        """Whether nobody used a buffer at a second place."""
        return len(self._places.get(key, ())) <= 1

    def watching(self, place: Callable[[], int], note_hook: Callable[[torch.Tensor], None]) -> TorchFunctionMode:
        """A context in which uses are noted.

        Args:
            place: says where the forward is: an odd number inside a block.
            note_hook: called with each tensor that is given a hook for its gradient.
        """
        return _Watching(lambda tensor: self._use(tensor, place()), note_hook)

    def _use(self, tensor: torch.Tensor, place: int) -> None:
        address = _address(tensor)
        for key in self._at.get(address, ()) if address is not None else ():
            self._places[key].add(place)


class _Watching(TorchFunctionMode):
    def __init__(self, note: Callable[[torch.Tensor], None], note_hook: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note
        self._note_hook = note_hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
                self._note(leaf)
        if func is torch.Tensor.register_hook:
            self._note_hook(args[0])
        return func(*args, **kwargs or {})


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # it has none: sparse, say
        return None
