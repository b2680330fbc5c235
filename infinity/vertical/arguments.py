"""Takes a block's arguments or results apart into tensors, and builds them again around other tensors."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from infinity.activations.unsupported import UnsupportedSchedule

# Not searched for tensors. The immutable ones may be compared by value; modules, whose parameters do not count as
# arguments, have no `==` of their own and compare by identity.
_ATOMS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, type, nn.Module, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class _TensorIndex:
    """Takes the place of a tensor in the form: its index in ``Tree.tensors``."""

    number: int


class _Fields:
    """A dataclass instance taken apart, since torch's pytrees treat it as a leaf. transformers' outputs are
    dataclasses."""

    def __init__(self, value: Any, take_apart: Callable[[Any], Any]) -> None:
        found = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
        }
        self._empty = _refilled(value, dict.fromkeys(found))
        self._forms = tree_map(take_apart, found, is_leaf=_is_size)

    def build(self, put_in: Callable[[Any], Any]) -> Any:
        return _refilled(self._empty, tree_map(put_in, self._forms, is_leaf=_is_size))


def _is_size(value: Any) -> bool:
    # A torch.Size is a tuple: tree_map would build a plain tuple of it, which has no `numel`.
    return isinstance(value, torch.Size)


def _refilled(value: Any, fields: dict[str, Any]) -> Any:
    # A copy and object.__setattr__, since __init__ may compute or check things, and a frozen dataclass forbids
    # assignment.
    fresh = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(fresh, name, item)
    return fresh


class Tree:
    """A value taken apart: ``tensors`` (each once, however often it occurs), and the form around them.

    Containers are those of `torch.utils._pytree`, and dataclasses. Any other object is part of the form.
    """

    # Worked example: (x, {"mask": m, "again": x}, 3) has tensors [x, m] and the form (P0, {"mask": P1, "again": P0},
    # 3). `build([a, b])` returns (a, {"mask": b, "again": a}, 3).

    def __init__(self, value: Any) -> None:
        """
        Raises:
            UnsupportedSchedule: an object that is no container has tensors with gradients in its attributes.
        """
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, _TensorIndex] = {}
        self._form = tree_map(self._flatten, value, is_leaf=_is_size)

    def _flatten(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._places:
                self._places[id(leaf)] = _TensorIndex(len(self.tensors))
                self.tensors.append(leaf)
            return self._places[id(leaf)]
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _Fields(leaf, self._flatten)
        if any(tensor.requires_grad for tensor in _tensors_inside(leaf)):
            raise UnsupportedSchedule(f"a block is given a {type(leaf).__name__} that carries gradients")
        return leaf

    def forget(self) -> None:
        """Release the tensors, and keep the form."""
        self.tensors.clear()
        self._places.clear()

    def build(self, tensors: Sequence[Any]) -> Any:
        """Return the value in fresh containers, with ``tensors`` in place of its own; as many as there were."""

        def put_in(leaf: Any) -> Any:
            if isinstance(leaf, _TensorIndex):
                return tensors[leaf.number]
            return leaf.build(put_in) if isinstance(leaf, _Fields) else leaf

        return tree_map(put_in, self._form, is_leaf=_is_size)


def is_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects, or equal ones of immutable types."""
    return len(before) == len(now) and all(
        a is b or (isinstance(a, _ATOMS) and isinstance(b, _ATOMS) and bool(a == b))
        for a, b in zip(before, now, strict=True)
    )


def _tensors_inside(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an object's attributes, at any depth."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        # Callables are skipped: a function or bound method may reach the whole model.
        elif not isinstance(item, _ATOMS) and not callable(item) and id(item) not in seen:
            seen.add(id(item))
            waiting += tree_leaves(list(getattr(item, "__dict__", {}).values()))
