"""Arguments and results of a block as a list of tensors, and the same again around other tensors."""

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

_ATOMS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, type, nn.Module, torch.dtype, torch.device)
"""What carries no gradient, or is not looked into."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands for a tensor: its number in the list."""

    number: int


class _Fields:
    """A dataclass, which torch's trees do not know: an object like it without its fields, and their forms."""

    def __init__(self, value: Any, take_apart: Callable[[Any], Any]) -> None:
        found = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
        }
        self._empty = _refilled(value, dict.fromkeys(found))
        self._forms = tree_map(take_apart, found, is_leaf=_is_size)

    def build(self, put_in: Callable[[Any], Any]) -> Any:
        return _refilled(self._empty, tree_map(put_in, self._forms, is_leaf=_is_size))


def _is_size(value: Any) -> bool:
    """torch's trees would make a tuple of it."""
    return isinstance(value, torch.Size)


def _refilled(value: Any, fields: dict[str, Any]) -> Any:
    fresh = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(fresh, name, item)
    return fresh


class Tree:
    """A value taken apart: ``tensors`` (each once, however often it occurs), and the form around them.

    Containers are those of `torch.utils._pytree`, and dataclasses. Anything else is kept as it is.
    """

    def __init__(self, value: Any) -> None:
        """
        Raises:
            Refusal: an object carries a gradient in a way that cannot be followed.
        """
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, _Place] = {}
        self._form = tree_map(self._flatten, value, is_leaf=_is_size)

    def _flatten(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._places:
                self._places[id(leaf)] = _Place(len(self.tensors))
                self.tensors.append(leaf)
            return self._places[id(leaf)]
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _Fields(leaf, self._flatten)
        if any(tensor.requires_grad for tensor in _tensors_inside(leaf)):
            raise UnsupportedSchedule(f"a block is given a {type(leaf).__name__} that carries gradients")
        return leaf

    def forget(self) -> None:
        """Release the tensors; only the form is left."""
        self.tensors.clear()
        self._places.clear()

    def build(self, tensors: Sequence[Any]) -> Any:
        """The value again, in fresh containers, with ``tensors`` in the place of its own: as many as there were."""

        def put_in(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return tensors[leaf.number]
            return leaf.build(put_in) if isinstance(leaf, _Fields) else leaf

        return tree_map(put_in, self._form, is_leaf=_is_size)


def is_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects, or equal ones of a kind that cannot change."""
    return len(before) == len(now) and all(
        a is b or (isinstance(a, _ATOMS) and isinstance(b, _ATOMS) and bool(a == b))
        for a, b in zip(before, now, strict=True)
    )


def _tensors_inside(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in the attributes of an object, however deep."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif not isinstance(item, _ATOMS) and not callable(item) and id(item) not in seen:
            seen.add(id(item))
            waiting += tree_leaves(list(getattr(item, "__dict__", {}).values()))
