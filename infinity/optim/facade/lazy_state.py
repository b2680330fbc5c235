"""Optimizer states that are read from where they lie when somebody looks."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_map

from infinity.optim.facade.read_only import ReadOnlyTensor


class StateKeeper(Protocol):
    """Whoever keeps the states of parameters."""

    @property
    def num_loads(self) -> int:
        """How often states were replaced."""
        ...

    def has_place(self, parameter: Tensor, /) -> bool:
        """Whether the parameter can have state: it was trainable in `initialize`."""
        ...

    def has_state(self, parameter: Tensor, /) -> bool:
        """Whether an update asked for so far, or a load, gives the parameter state."""
        ...

    def gather_state(self, parameter: Tensor, /) -> dict[str, Any]:
        """Copies of the parameter's state after all updates asked for: element-wise ones float32 of its shape, and
        scalars. Empty when it has none."""
        ...

    def load_state(self, parameter: Tensor, values: dict[str, Any], /) -> None:
        """Replace the parameter's state: every name of `PieceUpdater.state_names` as float32 of its shape, and
        scalars; tensors belong to the caller and are to be copied. Empty: the parameter starts anew."""
        ...


class LazyEntry(dict[str, Any]):
    """One parameter's state: a dict that reads itself at the first look, and again at the first look after a step.

    It is a dict so that torch takes it for one in `load_state_dict`. Pickles, deep copies and what its class makes of a mapping
    are ordinary dicts.

    Args:
        read: gives copies of the values now.
        clock: gives something else after each step or load.
        name: the parameter's name, for messages.
    """

    __slots__ = ("_clock", "_name", "_read", "_read_at")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `type(entry)({...})` is how code rebuilds containers.
        return super().__new__(cls) if args and callable(args[0]) else dict(*args, **kwargs)

    def __init__(self, read: Callable[[], dict[str, Any]], clock: Callable[[], object], name: str) -> None:
        super().__init__()
        self._read = read
        self._clock = clock
        self._name = name
        self._read_at: object = None

    def look(self) -> None:
        """Read it, unless that has been done since the last step."""
        now = self._clock()
        if self._read_at != now:
            values = self._shown(self._read())
            dict.clear(self)
            dict.update(self, values)
            self._read_at = now

    def held(self) -> dict[str, Any]:
        """What was read last, in a plain dict."""
        return dict(dict.items(self))  # `dict.copy` would look

    def _shown(self, values: dict[str, Any]) -> dict[str, Any]:
        """What a look gives of values that were read."""
        return values

    def gather(self) -> dict[str, Any]:
        """The values in a plain dict, whose tensors may be written to. An entry that nobody has looked at stays unread."""
        return self._read()

    def __repr__(self) -> str:
        return f"<optimizer state of '{self._name}', read at the first look>"

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return self.gather()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # torch.load(weights_only=True) knows OrderedDict by name, and not the builtin dict.
        return OrderedDict, (), None, None, iter(self.gather().items())


class StateEntry(LazyEntry):
    """An entry of ``optimizer.state``: tensors are read-only, and what is assigned is stored at once.

    Args:
        read, clock, name: see `LazyEntry`.
        store: replaces the state.
    """

    __slots__ = ("_store",)

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        clock: Callable[[], object],
        name: str,
        store: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(read, clock, name)
        self._store = store

    def _shown(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tree_map(lambda each, name=name: self._protected(each, name), value) for name, value in values.items()
        }

    def _protected(self, value: Any, name: str) -> Any:
        return ReadOnlyTensor.of(value, (self._name, name)) if type(value) is Tensor else value

    def assign(self, values: Mapping[str, Any]) -> None:
        """``optimizer.state[parameter] = values``; those that were read are stored already."""
        given = dict(values)
        if given:  # else nothing has to be read
            self.look()
        present = self.held()
        if (
            not given
            or present.keys() != given.keys()
            or any(present[key] is not value for key, value in given.items())
        ):
            self._store(given)

    def in_state_dict(self) -> DictEntry:
        """The same state in a state dict."""
        return DictEntry(self._read, self._clock, self._name)


class DictEntry(LazyEntry):
    """An entry of a state dict: copies that are the caller's own, so that it is an ordinary dict once it has been changed.

    torch's DCP reads a checkpoint into them, and a plain optimizer that loads them steps with them.
    """

    __slots__ = ("_as_read",)
    _as_read: dict[str, tuple[Any, int]]

    def look(self) -> None:
        if self._read_at is None or not self._is_changed():
            super().look()

    def _shown(self, values: dict[str, Any]) -> dict[str, Any]:
        self._as_read = {name: (value, _version(value)) for name, value in values.items()}
        return values

    def _is_changed(self) -> bool:
        present = self.held()
        return present.keys() != self._as_read.keys() or any(
            present[name] is not value or _version(value) != version for name, (value, version) in self._as_read.items()
        )

    @property
    def is_read(self) -> bool:
        """Whether somebody has looked."""
        return self._read_at is not None

    def gather(self) -> dict[str, Any]:
        return self.copy() if self.is_read else self._read()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo) if self.is_read else self._read()


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _looks(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: LazyEntry, *args: Any, **kwargs: Any) -> Any:
        self.look()
        return method(self, *args, **kwargs)

    return call


def _stores(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: StateEntry, *args: Any, **kwargs: Any) -> Any:
        self.look()
        values = self.held()
        result = method(values, *args, **kwargs)
        self.assign(values)
        return self if result is values else result

    return call


_CHANGING = ("__delitem__", "__ior__", "__setitem__", "clear", "pop", "popitem", "setdefault", "update")
_READING = (
    *("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__", "__reversed__", "__ror__"),
    *("copy", "get", "items", "keys", "values"),
)
for _name in (*_READING, *_CHANGING):
    setattr(LazyEntry, _name, _looks(getattr(dict, _name)))
for _name in _CHANGING:
    setattr(StateEntry, _name, _stores(getattr(dict, _name)))


@dataclass(eq=False, repr=False)
class LazyState(MutableMapping[Any, Any]):
    """`optimizer.state`: maps each parameter that has state to its entry. Nothing is stored here.

    Attributes:
        params: the optimizer's parameters in the order of its groups.
        has_state: whether a tensor is a parameter of the model that has had an update.
        entry: gives a parameter's entry.
        others: states of whatever else is a key: live, and in memory.
        known: all parameters of the model.
    """

    params: Callable[[], Iterator[Tensor]]
    has_state: Callable[[Tensor], bool]
    entry: Callable[[Tensor], StateEntry | None]
    others: MutableMapping[Any, Any]
    known: Callable[[], Iterator[Tensor]]

    def _entry_of(self, key: Any) -> StateEntry | None:
        return self.entry(key) if isinstance(key, Tensor) else None

    def __getitem__(self, key: Any) -> Any:
        # As torch's, which is a defaultdict: a parameter without state gives an empty entry.
        entry = self._entry_of(key)
        return self.others[key] if entry is None else entry

    def __contains__(self, key: object) -> bool:
        return (isinstance(key, Tensor) and self.has_state(key)) or key in self.others

    def __iter__(self) -> Iterator[Any]:
        held = [param for param in self.params() if param not in self.others and self.has_state(param)]
        yield from [*held, *self.others]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, key: Any, value: Any) -> None:
        entry = self._entry_of(key)
        if entry is None:
            self.others[key] = value
        else:
            entry.assign(value)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        entry = self._entry_of(key)
        if entry is None:
            del self.others[key]
        else:
            entry.assign({})

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        value = value.gather() if isinstance(value, LazyEntry) else value
        del self[key]
        return value

    def clear(self) -> None:
        for param in self.known():  # that of parameters which have left the groups, too
            if self.has_state(param):
                del self[param]
        self.others.clear()

    def replace(self, values: Mapping[Any, Any]) -> None:
        """``optimizer.state = values``."""
        if values is self:
            return
        for key in [key for key in self if key not in values]:
            del self[key]
        self.update(values)

    def __repr__(self) -> str:
        return f"<optimizer state of {len(self)} parameters, not in memory>"
