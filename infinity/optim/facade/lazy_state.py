"""Optimizer state that is read from where it lies only when somebody looks."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from infinity.optim.values import same_values


class Access(Protocol):
    """Reads one parameter's state."""

    def has_any(self) -> bool:
        """Whether it has any; reads nothing."""
        ...

    def read(self) -> dict[str, Any]:
        """The values now, in a plain dict; tensors may be changed in place until the next step."""
        ...

    def copy(self) -> dict[str, Any]:
        """Copies of the values now."""
        ...


class WriteAccess(Access, Protocol):
    """Reads and writes one parameter's state."""

    def replace(self, values: Mapping[str, Any]) -> None:
        """Store others."""
        ...


class StateKeeper(Protocol):
    """Whoever keeps the states of parameters."""

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
    """One parameter's state. Every way of reading it gathers the values as they are at that moment.

    It is a dict so that torch takes it for one in `load_state_dict`; pickling (`torch.save`) and `copy.deepcopy` turn
    it into a plain mapping with values, and so does calling its class with a mapping, as code does that rebuilds
    containers. It is never filled. What is written into the tensors that it gives is stored before the next step (see
    `ShownStates`). Assignments are those of the subclasses.

    Args:
        access: reads the parameter's state where it is kept.
        name: the parameter's name, for messages.
    """

    __slots__ = ("_access", "_name")

    def __new__(cls, access: Access | Mapping[str, Any] | None = None, name: str = "") -> Any:
        if access is None or isinstance(access, Mapping):
            return dict(access or {})
        return super().__new__(cls)

    def __init__(self, access: Access, name: str = "") -> None:
        super().__init__()
        self._access = access
        self._name = name

    def gather(self) -> dict[str, Any]:
        """Copies of the values now, in a plain dict that the caller owns: one read for all of them."""
        return self._access.copy()

    def __getitem__(self, key: str) -> Any:
        return self._access.read()[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._access.read().get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._access.read())

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._access.read())

    def __len__(self) -> int:
        return len(self._access.read())

    def __contains__(self, key: object) -> bool:
        return key in self._access.read()

    def __bool__(self) -> bool:
        return self._access.has_any()

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # dict promises its own view class
        return self._access.read().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return self._access.read().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        if sys._getframe(1).f_globals.get("__name__") == Optimizer.__module__:
            return self._access.copy().items()  # a plain optimizer loads them, keeps them, and writes to them
        return self._access.read().items()

    def copy(self) -> dict[str, Any]:
        return self._access.read()

    def __or__(self, other: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]  # dict has overloads
        return self._access.read() | dict(other)

    def __ror__(self, other: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return dict(other) | self._access.read()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = None

    def __repr__(self) -> str:
        return f"<optimizer state of '{self._name}', not in memory: read it with entry['...'] or dict(entry)>"

    def __copy__(self) -> dict[str, Any]:
        return self._access.read()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return self._access.copy()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # torch.load(weights_only=True) knows OrderedDict by name, and not the builtin dict.
        return OrderedDict, (), None, None, iter(self._access.copy().items())

    # ---------------------------------------------------------------------------------------------------------- writing

    def _change(self, values: Mapping[str, Any]) -> None:
        """Something was assigned or removed: these are the values with it."""
        raise NotImplementedError

    def assign(self, values: Mapping[str, Any]) -> None:
        """``optimizer.state[param] = values``."""
        self._change(dict(values))

    def __setitem__(self, key: str, value: Any) -> None:
        self._change({**self._access.read(), key: value})

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._change({**self._access.read(), **dict(*args, **kwargs)})

    def __ior__(self, other: Any) -> LazyEntry:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        self._change({})

    def pop(self, key: str, *default: Any) -> Any:
        values = dict(self._access.read())
        found = values.pop(key, *default)
        self._change(values)
        return found

    def popitem(self) -> tuple[str, Any]:
        key = next(reversed(self))
        return key, self.pop(key)


class StateEntry(LazyEntry):
    """An entry of ``optimizer.state``: what is assigned is stored at once."""

    __slots__ = ()
    _access: WriteAccess

    def _change(self, values: Mapping[str, Any]) -> None:
        present = self._access.read()
        # Else they are the tensors that were read: `ShownStates` sees what was written.
        if present.keys() != values.keys() or any(present[key] is not value for key, value in values.items()):
            self._access.replace(values)


class DictEntry(LazyEntry):
    """An entry of a state dict.

    If it is assigned what it has, it holds copies from then on and is an ordinary entry: torch's DCP does that with each value,
    and then reads a checkpoint into the tensors. Any other assignment would change the optimizer in torch, and is an error.
    """

    __slots__ = ()

    def _change(self, values: Mapping[str, Any]) -> None:
        is_held = isinstance(self._access, _Held)
        present = self._access.read() if is_held else self._access.copy()
        if not is_held and not same_values(present, dict(values)):
            raise TypeError(
                "this entry of a state dict stands for what lies outside memory. Change optimizer.state[parameter], or a "
                "copy.deepcopy of the state dict"
            )
        # A tensor that was read of the entry before is the optimizer's own: who writes to the copy must not write to it.
        self._access = _Held(
            {key: present[key] if same_values(present.get(key), value) else value for key, value in values.items()}
        )


class _Held:
    """Values in memory, see `Access`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def has_any(self) -> bool:
        return bool(self._values)

    def read(self) -> dict[str, Any]:
        return self._values

    def copy(self) -> dict[str, Any]:
        return copy.deepcopy(self._values)


@dataclass(eq=False, repr=False)
class LazyState(MutableMapping[Any, Any]):
    """`optimizer.state`: maps each parameter that has state to its lazy entry. Nothing is stored here.

    Attributes:
        params: the optimizer's parameters in the order of its groups.
        has_state: whether a tensor is a parameter of the model that has had an update.
        entry: makes a parameter's entry.
        others: states of whatever else is a key: live, and in memory.
        known: all parameters of the model.
    """

    params: Callable[[], Iterator[Tensor]]
    has_state: Callable[[Tensor], bool]
    entry: Callable[[Tensor], LazyEntry | None]
    others: MutableMapping[Any, Any]
    known: Callable[[], Iterator[Tensor]]

    def _entry_of(self, key: Any) -> LazyEntry | None:
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
            entry.clear()

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        value = value.copy() if isinstance(value, LazyEntry) else value
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
