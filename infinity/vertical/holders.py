"""What a model's attributes hold besides tensors and modules: containers, objects, generators, arrays. Its state can be put back.

Knows Python's and NumPy's types; must not know models.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_MOST_LEVELS = 5
_MOST_HOLDERS = 10_000
_MOST_ARRAY_BYTES = 1 << 20
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_OPAQUE = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_FOREIGN = frozenset(
    {"torch", "numpy", "infinity", "swapper", "threading", "_thread", "logging", "weakref", "builtins"}
)
"""Packages whose objects are left alone, apart from those that are known here."""


class Holders:
    """Everything changeable that some values hold, however deep (within reason), as it is now."""

    def __init__(self, values: Iterable[tuple[str, Any]]) -> None:
        """``values``: each with a name, for messages."""
        self._kept: list[tuple[str, _Holder]] = []
        self._seen: set[int] = set()
        waiting = [(name, value, 0) for name, value in values]
        while waiting and len(self._kept) < _MOST_HOLDERS:
            name, value, level = waiting.pop()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            holder = _holder_of(value)
            if holder is not None:
                self._kept.append((name, holder))
                items: Iterable[Any] = holder.items
            else:
                items = value if type(value) is tuple else ()
            if level < _MOST_LEVELS:
                waiting += [(name, item, level + 1) for item in items]

    def changed(self) -> str | None:
        """The name of a value that has changed, or in which something has."""
        return next((name for name, holder in self._kept if not holder.is_same()), None)

    def restore(self) -> None:
        """All is as it was."""
        for _, holder in self._kept:
            if not holder.is_same():
                holder.restore()


class _Holder:
    """One of them: how to read its state, how to set it, what lies in it."""

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        equal: Callable[[Any, Any], bool],
        *,
        has_items: bool = False,
    ) -> None:
        self._read = read
        self._write = write
        self._equal = equal
        self._state = read()
        self.items: Iterable[Any] = ()
        if has_items:
            self.items = list(self._state.values()) if isinstance(self._state, dict) else list(self._state)

    def is_same(self) -> bool:
        return self._equal(self._read(), self._state)

    def restore(self) -> None:
        self._write(self._state)


def _holder_of(value: Any) -> _Holder | None:
    kind = type(value)
    if kind in _MAPPINGS:
        return _Holder(lambda: dict(value), lambda state: _refill(value, state), _same_mapping, has_items=True)
    if kind is list:
        return _Holder(value.copy, lambda state: value.__setitem__(slice(None), state), _same_items, has_items=True)
    if kind is set:
        return _Holder(value.copy, lambda state: _refill(value, state), lambda a, b: bool(a == b))
    if kind is deque:
        return _Holder(value.copy, lambda state: _none(value.clear(), value.extend(state)), _same_items, has_items=True)
    if isinstance(value, torch.Generator):
        return _Holder(value.get_state, lambda state: _none(value.set_state(state)), torch.equal)
    if isinstance(value, random.Random):
        return _Holder(value.getstate, value.setstate, lambda a, b: bool(a == b))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return _Holder(lambda: bits.state, lambda state: setattr(bits, "state", state), lambda a, b: repr(a) == repr(b))
    if isinstance(value, np.random.RandomState):
        return _Holder(value.get_state, value.set_state, lambda a, b: repr(a) == repr(b))
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= _MOST_ARRAY_BYTES and not value.dtype.hasobject
        return _Holder(value.copy, lambda state: np.copyto(value, state), _same_array) if is_small else None
    is_foreign = kind.__module__.partition(".")[0] in _FOREIGN
    if is_foreign or isinstance(value, _OPAQUE) or not isinstance(getattr(value, "__dict__", None), dict):
        return None
    attributes = vars(value)
    return _Holder(attributes.copy, lambda state: _refill(attributes, state), _same_mapping, has_items=True)


def _none(*_: Any) -> None:
    """For functions of which only the effect counts."""


def _refill(container: Any, items: Any) -> None:
    container.clear()
    container.update(items)


def is_same_value(now: Any, then: Any) -> bool:
    """Whether it is the same object, or an equal one of a kind that cannot change."""
    if now is then:
        return True
    return type(now) is type(then) and isinstance(now, (*_ATOMS, tuple)) and _same_atoms(now, then)


def _same_atoms(now: Any, then: Any) -> bool:
    if type(now) is tuple:
        return len(now) == len(then) and all(is_same_value(a, b) for a, b in zip(now, then, strict=True))
    return not isinstance(now, tuple) and bool(now == then)


def _same_items(now: Any, then: Any) -> bool:
    return len(now) == len(then) and all(is_same_value(a, b) for a, b in zip(now, then, strict=True))


def _same_mapping(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    return now.keys() == then.keys() and all(is_same_value(now[key], then[key]) for key in now)


def _same_array(now: Any, then: Any) -> bool:
    return bool(now.tobytes() == then.tobytes())
