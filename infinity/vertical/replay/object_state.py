"""What a model's attributes hold, however deep: containers, objects, generators, arrays, tensors. Its state can be put back.

Knows Python's, NumPy's and torch's types; must not know models.
"""

from __future__ import annotations

import array
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity.errors import UnsupportedModelError
from infinity.numerics.raw_bytes import raw_bytes
from infinity.torch_internals.names import version_of

_MOST_LEVELS = 12
_MOST_HOLDERS = 10_000
_MOST_BYTES = 1 << 20
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OPAQUE = (nn.Module, nn.Parameter, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_FOREIGN = frozenset(
    {"torch", "numpy", "infinity", "swapper", "threading", "_thread", "logging", "weakref", "builtins"}
)
"""Packages whose objects are left alone, apart from those that are known here."""
_ABSENT: Any = object()


class ObjectState:
    """Everything changeable that some values hold, as it is now."""

    def __init__(self, values: Iterable[tuple[str, Any]]) -> None:
        """``values``: each with a name, for messages."""
        self._kept: list[tuple[str, _Holder]] = []
        self._seen: set[int] = set()
        self.too_much: str | None = None
        """The name of a value that holds more than is followed."""
        waiting = [(name, value, 0) for name, value in values]
        while waiting:
            name, value, level = waiting.pop()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            holders = list(_holders_of(value))
            if holders and (level > _MOST_LEVELS or len(self._kept) >= _MOST_HOLDERS):
                self.too_much = name
                return
            self._kept += [(name, holder) for holder in holders]
            items = [item for holder in holders for item in holder.items]
            waiting += [(name, item, level + 1) for item in (value if type(value) is tuple else items)]

    def changed(self) -> str | None:
        """The name of a value that has changed, or in which something has."""
        return next((name for name, holder in self._kept if not holder.is_same()), None)

    def restore(self) -> None:
        """All is as it was.

        Raises:
            UnsupportedModelError: something too large to be copied beforehand has been written to.
        """
        for name, holder in self._kept:
            if not holder.is_same():
                holder.restore(name)


class _Holder:
    """One of them: how to read its state, how to set it, what lies in it."""

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], object] | None,
        equal: Callable[[Any, Any], bool],
        *,
        items: Callable[[Any], Iterable[Any]] = lambda state: (),
    ) -> None:
        self._read = read
        self._write = write
        self._equal = equal
        self._state = read()
        self.items = list(items(self._state))

    def is_same(self) -> bool:
        return self._equal(self._read(), self._state)

    def restore(self, name: str) -> None:
        if self._write is None:
            raise too_large(name)
        self._write(self._state)


def too_large(name: str) -> UnsupportedModelError:
    """The error for something that a forward has written to, and that was not copied before."""
    return UnsupportedModelError(
        f"the model's forward writes to '{name}' in a way that forbids taking micro-batches together, and it is too large to "
        "be put back as it was before the step",
        cure="Set config key 'infinity.schedule' to \"ordinary\"",
    )


def _holders_of(value: Any) -> Iterable[_Holder]:
    """Of a container, and of its attributes; of anything that cannot change, none."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield _of_tensor(value)
        return
    if isinstance(value, _OPAQUE):
        return
    known = _of_known(value)
    if known is not None:
        yield known
    if type(value).__module__.partition(".")[0] in _FOREIGN:
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield _Holder(attributes.copy, lambda state: _refill(dict, attributes, state), _same_mapping, items=dict.values)
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    if slots:
        yield _Holder(
            lambda: {name: found for name in slots if (found := getattr(value, name, _ABSENT)) is not _ABSENT},
            lambda state: _fill_slots(value, state),
            _same_mapping,
            items=dict.values,
        )


def _of_known(value: Any) -> _Holder | None:
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return _Holder(
            lambda: dict(kind.items(value)), lambda state: _refill(kind, value, state), _same_mapping, items=dict.values
        )
    if isinstance(value, list):
        return _Holder(
            lambda: list.copy(value), lambda state: list.__setitem__(value, slice(None), state), _same_items, items=iter
        )
    if isinstance(value, set):
        return _Holder(lambda: set(value), lambda state: _refill(set, value, state), lambda a, b: bool(a == b))
    if isinstance(value, deque):
        return _Holder(lambda: list(value), lambda state: _refill_deque(value, state), _same_items, items=iter)
    if isinstance(value, torch.Generator):
        return _Holder(value.get_state, value.set_state, torch.equal)
    if isinstance(value, random.Random):
        return _Holder(value.getstate, value.setstate, lambda a, b: bool(a == b))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return _Holder(lambda: bits.state, lambda state: setattr(bits, "state", state), lambda a, b: repr(a) == repr(b))
    if isinstance(value, np.random.RandomState):
        return _Holder(value.get_state, value.set_state, lambda a, b: repr(a) == repr(b))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        if value.nbytes > _MOST_BYTES:
            return _Holder(lambda: hash(value.tobytes()), None, lambda a, b: bool(a == b))
        return _Holder(value.copy, lambda state: np.copyto(value, state), lambda a, b: bool(a.tobytes() == b.tobytes()))
    if isinstance(value, bytearray | array.array):
        whole = slice(None)
        return _Holder(lambda: value[whole], lambda state: value.__setitem__(whole, state), lambda a, b: bool(a == b))
    return None


def _of_tensor(value: torch.Tensor) -> _Holder:
    if value.nbytes > _MOST_BYTES or value.layout is not torch.strided or value.is_inference():
        return _Holder(lambda: version_of(value), None, lambda a, b: bool(a == b))

    def write(state: torch.Tensor) -> None:
        with torch.no_grad():
            value.copy_(state)

    return _Holder(lambda: value.detach().clone(), write, same_bits)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors of one kind are equal, NaNs included."""
    return torch.equal(raw_bytes(a), raw_bytes(b))


def _refill(kind: Any, container: Any, items: Any) -> None:
    """With the methods of ``kind``, whatever a subclass made of them."""
    kind.clear(container)
    kind.update(container, items)


def _refill_deque(value: deque[Any], items: Iterable[Any]) -> None:
    value.clear()
    value.extend(items)


def _slots_of(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _fill_slots(value: Any, state: dict[str, Any]) -> None:
    for name, item in state.items():
        object.__setattr__(value, name, item)


def is_same_value(now: Any, then: Any) -> bool:
    """Whether it is the same object, or an equal one of a kind that cannot change."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if type(now) is tuple:
        return _same_items(now, then)
    return isinstance(now, _ATOMS) and bool(now == then)


def _same_items(now: Any, then: Any) -> bool:
    return len(now) == len(then) and all(is_same_value(a, b) for a, b in zip(now, then, strict=True))


def _same_mapping(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    return list(now) == list(then) and all(is_same_value(now[key], then[key]) for key in now)
