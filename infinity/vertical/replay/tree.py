"""Arguments and results of a module as a list of tensors and a form to put such a list back into.

Knows containers; must not know what the tensors are for.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from infinity.activations.refusal import Refusal

_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    slice,
    range,
    frozenset,
    type,
    type(Ellipsis),
    type(NotImplemented),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    nn.Module,
)
"""What cannot carry a gradient, and does not change by being passed around."""
_MOST_LEVELS = 40


class _Slot:
    """Stands for the tensor at one place of the list."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Container:
    """A container of known type: an empty one like it, and the forms of its items."""

    def __init__(self, empty: Any, keys: Sequence[Any], items: Sequence[Any]) -> None:
        self.empty = empty
        self.keys = tuple(keys)
        self.items = tuple(items)


class Tree:
    """A value taken apart: ``tensors`` (each once, however often it occurs) and the form around them.

    Containers are tuples, lists, dicts, their subclasses and dataclasses. Anything else is kept as it is.
    """

    def __init__(self, value: Any) -> None:
        """
        Raises:
            Refusal: something in it carries a gradient in a way that cannot be followed, or it is too deep.
        """
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}
        self._watched: list[tuple[Any, tuple[Any, ...]]] = []
        self._form = self._take_apart(value, 0)

    def _take_apart(self, value: Any, level: int) -> Any:
        if level > _MOST_LEVELS:
            raise Refusal("a block's arguments are nested too deeply to be followed")
        if isinstance(value, torch.Tensor):
            if id(value) not in self._places:
                self._places[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return _Slot(self._places[id(value)])
        if isinstance(value, _ATOMS):
            return value
        content = content_of(value)
        if content is None:
            self._watch(value)
            return value
        keys, items = content
        return _Container(_emptied(value, keys), keys, [self._take_apart(item, level + 1) for item in items])

    def _watch(self, value: Any) -> None:
        """``value`` is passed as it is: it must carry no gradient, and must not change."""
        if callable(value):
            return
        attributes = _attributes(value)
        for item in attributes:
            for leaf in tensors_in(item):
                if leaf.requires_grad:
                    raise Refusal(f"a block is given a {type(value).__name__} that carries gradients")
        self._watched.append((value, attributes))

    def check_unchanged(self) -> None:
        """Raise `Refusal` if an object that was passed as it is has changed since."""
        for value, before in self._watched:
            now = _attributes(value)
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                raise Refusal(f"a block, or what follows it, changes a {type(value).__name__} that it is given")

    def forget(self) -> None:
        """Let go of the tensors; only the form is left."""
        self.tensors.clear()
        self._places.clear()

    def build(self, tensors: Sequence[Any], built: Built | None = None) -> Any:
        """The value again, in fresh containers, with ``tensors`` in the place of its own.

        Args:
            tensors: as many as there were in ``self.tensors``.
            built: takes note of the containers, to see later whether somebody has changed them.
        """
        return self._build(self._form, tensors, built)

    def _build(self, form: Any, tensors: Sequence[Any], built: Built | None) -> Any:
        if isinstance(form, _Slot):
            return tensors[form.index]
        if not isinstance(form, _Container):
            return form
        value = _refill(form.empty, form.keys, [self._build(item, tensors, built) for item in form.items])
        if built is not None:
            built.note(value)
        return value


class Built:
    """Containers that were handed to somebody, and what was in them then."""

    def __init__(self) -> None:
        self._containers: list[tuple[Any, tuple[Any, ...]]] = []

    def note(self, container: Any) -> None:
        """Remember what is in ``container`` now."""
        if not isinstance(container, tuple):
            content = content_of(container)
            if content is not None:
                self._containers.append((container, (*content[0], *content[1])))

    def check_unchanged(self) -> None:
        """Raise `Refusal` if one of them has other items than before."""
        for container, before in self._containers:
            content = content_of(container)
            now = () if content is None else (*content[0], *content[1])
            if len(now) != len(before) or not all(map(_is_same, now, before)):
                raise Refusal(f"a block changes a {type(container).__name__} that it is given")


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, _ATOMS) and isinstance(b, _ATOMS) and bool(a == b))


def content_of(value: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """(keys, items) of a container of known type; None for anything else."""
    if isinstance(value, tuple | list):
        return (), tuple(value)
    if isinstance(value, dict):
        return tuple(value), tuple(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return names, [getattr(value, name) for name in names]
    return None


def _emptied(original: Any, keys: Sequence[Any]) -> Any:
    """Something like ``original`` that holds none of its items; a tuple's type in place of the tuple."""
    if isinstance(original, tuple):
        return type(original)
    if type(original) in (list, dict):
        return type(original)()
    return _refill(original, keys, [None] * (len(original) if isinstance(original, list) else len(keys)))


def _refill(empty: Any, keys: Sequence[Any], items: list[Any]) -> Any:
    if isinstance(empty, type):
        if empty is tuple:
            return tuple(items)
        return empty(*items) if hasattr(empty, "_fields") else empty(items)
    fresh = copy.copy(empty)
    if isinstance(fresh, list):
        fresh[:] = items
    elif isinstance(fresh, dict):
        for key, item in zip(keys, items, strict=True):
            fresh[key] = item
    else:
        for key, item in zip(keys, items, strict=True):
            object.__setattr__(fresh, key, item)
    return fresh


def _attributes(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, "__dict__", {}).values())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value of any kind: in containers, and in the attributes of plain objects."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif not isinstance(item, _ATOMS) and not callable(item) and id(item) not in seen:
            seen.add(id(item))
            content = content_of(item)
            waiting += _attributes(item) if content is None else content[1]
