"""Optimizer states that are read from where they are stored when somebody looks.

What is read of `optimizer.state` are copies, so writing to one would be lost, and raises instead.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from infinity.errors import AccessError
from infinity.torch_internals.names import outside_modes, without_torch_function
from infinity.torch_internals.operations import WRITING_METHODS, name_of, writes_unseen


class LazyEntry(dict[str, Any]):
    """One parameter's state: a dict that reads itself at the first look, and again at the first look after a step.

    It is a dict so that torch takes it for one in `load_state_dict`. Pickles, deep copies and what its class makes of a mapping
    are ordinary dicts.

    With ``store`` it is an entry of ``optimizer.state``: tensors are read-only, and what is assigned is stored at once. Without,
    it is one of a state dict: copies that are the caller's own, so that it is an ordinary dict once it has been changed. torch's
    DCP reads a checkpoint into those, and a plain optimizer that loads them steps with them.

    Args:
        read: gives copies of the values now.
        clock: gives something else after each step or load.
        name: the parameter's name, for messages.
        store: replaces the state.
    """

    __slots__ = ("_clock", "_name", "_read", "_read_at", "_shown", "_store")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `type(entry)({...})` is how code rebuilds containers.
        return super().__new__(cls) if args and callable(args[0]) else dict(*args, **kwargs)

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        clock: Callable[[], object],
        name: str,
        store: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__()
        self._read, self._clock, self._name, self._store = outside_modes(read), clock, name, store
        self._read_at: object = None
        self._shown: dict[str, tuple[Any, int]] = {}
        """The values last read, each with its version counter at that time."""

    @property
    def is_read(self) -> bool:
        """Whether somebody has looked."""
        return self._read_at is not None

    def fetch(self) -> None:
        """Read it, unless that has been done since the last step, or the caller has changed what is its own."""
        now = self._clock()
        # Read since the last step; or, of a state dict, changed by its owner: a read would overwrite that.
        if self._read_at == now or (self._store is None and self.is_read and self._is_changed()):
            return
        values = self._read()
        if self._store is not None:
            values = {name: tree_map(partial(self._protected, name), value) for name, value in values.items()}
        # `_replace` uses dict's own methods: those of this class would look, and so come back here.
        self._replace(values)
        self._shown = {name: (value, _version(value)) for name, value in values.items()}
        self._read_at = now

    def _replace(self, values: dict[str, Any]) -> None:
        dict.clear(self)
        dict.update(self, values)

    def held(self) -> dict[str, Any]:
        """What was read last, in a plain dict."""
        return dict(dict.items(self))  # `dict.copy` would look

    def _is_changed(self) -> bool:
        present = self.held()
        return present.keys() != self._shown.keys() or any(
            present[name] is not value or _version(value) != version for name, (value, version) in self._shown.items()
        )

    def _protected(self, name: str, value: Any) -> Any:
        return ReadOnlyTensor.of(value, (self._name, name)) if type(value) is Tensor else value

    def assign(self, values: Mapping[str, Any]) -> None:
        """The state becomes these values; of ``optimizer.state``, those that were read are stored already."""
        given = dict(values)
        if self._store is None:
            self._replace(given)
            return
        if given:  # else nothing has to be read
            self.fetch()
        present = self.held()
        # Assigning to one key assigns all: nothing is written if the values are the objects that were read.
        if not given or present.keys() != given.keys() or any(present[key] is not given[key] for key in given):
            self._store(given)

    def gather(self) -> dict[str, Any]:
        """The values in a plain dict, whose tensors may be written to. An entry that nobody has looked at stays unread."""
        return self.copy() if self._store is None and self.is_read else self._read()

    def __repr__(self) -> str:
        return f"<optimizer state of '{self._name}', read at the first look>"

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        # A copy of what was read and perhaps changed, or a fresh read: that needs no further copy.
        return copy.deepcopy(self.gather(), memo) if self._store is None and self.is_read else self._read()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # torch.load(weights_only=True) knows OrderedDict by name, and not the builtin dict.
        return OrderedDict, (), None, None, iter(self.gather().items())


def _version(value: Any) -> int:
    # Tensors of inference mode have no version counter: reading it raises.
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _reads_first(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of dict that reads the state from the records, if that has not been done, before it runs."""

    @functools.wraps(method)
    def call(self: LazyEntry, *args: Any, **kwargs: Any) -> Any:
        self.fetch()
        return method(self, *args, **kwargs)

    return call


def _changes(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: LazyEntry, *args: Any, **kwargs: Any) -> Any:
        self.fetch()
        # Changed in a plain dict first, so that an operation that raises (a missing key) stores nothing.
        values = self.held()
        result = method(values, *args, **kwargs)
        self.assign(values)
        return self if result is values else result

    return call


# Every method of dict that reads or writes: C code of dict calls none of the others, so each needs its own.
for _name in ("__delitem__", "__ior__", "__setitem__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(LazyEntry, _name, _changes(getattr(dict, _name)))
for _name in (
    *("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__", "__reversed__", "__ror__"),
    *("copy", "get", "items", "keys", "values"),
):
    setattr(LazyEntry, _name, _reads_first(getattr(dict, _name)))


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
        # No entry is made or read for the question.
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
        value = value.gather() if isinstance(value, LazyEntry) else value  # read before the state is dropped
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


# ------------------------------------------------------------------------------------------------------ the tensors


class ReadOnlyTensor(Tensor):
    """A copy of a state. Operations that would write to it, or to a view of it, raise `AccessError`.

    NumPy arrays over it are read-only. Pickles and deep copies of it are ordinary tensors.
    """

    about: tuple[str, str]
    """The parameter's name, and the state's."""

    @classmethod
    def of(cls, tensor: Tensor, about: tuple[str, str]) -> ReadOnlyTensor:
        """``tensor``, protected."""
        # Not through __torch_function__, which would refuse or protect once more.
        with without_torch_function():
            protected = tensor.as_subclass(cls)
        protected.about = about
        return protected

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for each in _written(func, args, kwargs):
            _refuse(each)
        read = _protected_in((args, kwargs))
        with without_torch_function():
            # Operations are refused by name before they run, as far as possible. What else has written shows in the
            # version.
            before = [each._version for each in read]
            result = func(*args, **kwargs)
            for each, version in zip(read, before, strict=True):
                if each._version != version:  # an operation that writes to something else than its first argument
                    _refuse(each)
            # Views of protected memory are protected too. Empty tensors all have the address 0.
            owners = {each.untyped_storage().data_ptr(): each for each in read if each.numel()}
            return tree_map(functools.partial(_protect, owners), result)

    def __iter__(self) -> Any:
        return iter(self.unbind(0))  # torch's gives rows that are not protected

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return unprotected(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unprotected(self).__reduce_ex__(protocol)


def unprotected(tensor: Tensor) -> Tensor:
    """The same memory as an ordinary tensor."""
    with without_torch_function():
        return tensor.as_subclass(Tensor)


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ReadOnlyTensor]:
    """The protected tensors that the operation would write to."""
    name = name_of(func)
    if writes_unseen(func):
        return _protected_in((args, kwargs))
    # In-place operations end with one underscore ("add_"); "__iadd__" and the like are among WRITING_METHODS.
    writes_to_first = name in WRITING_METHODS or name.startswith("assigning ") or (name[-1] == "_" and name[-2] != "_")
    return _protected_in((args[:1] if writes_to_first else (), kwargs.get("out")))


def _protected_in(values: Any) -> list[ReadOnlyTensor]:
    return [each for each in tree_leaves(values) if isinstance(each, ReadOnlyTensor)]


def _refuse(tensor: ReadOnlyTensor) -> None:
    fqn, name = tensor.about
    raise AccessError.of_state(fqn, name, "reading a state returns a copy, so this write would be lost")


def _protect(owners: Mapping[int, ReadOnlyTensor], result: Any) -> Any:
    """A result, protected if it shows the memory of one that is."""
    if isinstance(result, np.ndarray):
        result.flags.writeable = False  # numpy's own protection
    if type(result) is Tensor and result.layout is torch.strided and result.numel():
        owner = owners.get(result.untyped_storage().data_ptr())
        return result if owner is None else ReadOnlyTensor.of(result, owner.about)
    return result


class AssignedTensors:
    """What a script has assigned to states since the last step: what it writes into these tensors afterwards would be lost."""

    def __init__(self) -> None:
        self._tensors: list[tuple[tuple[str, str], weakref.ref[Tensor], int]] = []
        self._latest: Any = None
        """Keeps what was assigned last: nobody else may hold it when it is written to."""

    def add(self, fqn: str, values: Mapping[str, Any]) -> None:
        """Remember values that were assigned, and are stored."""
        self._latest = values
        # Only weak references: a check must not keep tensors of the size of states in memory.
        self._tensors += [
            ((fqn, name), weakref.ref(value), value._version)
            for name, value in values.items()
            if isinstance(value, Tensor) and not value.is_inference()
        ]

    def check(self) -> None:
        """Raise if one has been written to, once."""
        for (fqn, name), reference, version in self._tensors:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                self.forget()  # raised once: the caller may go on
                raise AccessError.of_state(
                    fqn, name, "the tensor was written to after it had been assigned, and stored"
                )

    def forget(self) -> None:
        """A step has been made, or all states were replaced."""
        self._tensors.clear()
        self._latest = None
