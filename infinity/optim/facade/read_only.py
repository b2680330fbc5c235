"""Tensors of optimizer states as users read them: copies, so writing to one would be lost, and raises instead."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from infinity.errors import AccessError
from infinity.torch_internals.names import as_plain
from infinity.torch_internals.operations import WRITING_METHODS, name_of, writes_unseen


class ReadOnlyTensor(Tensor):
    """A copy of a state. Operations that would write to it, or to a view of it, raise `AccessError`.

    NumPy arrays over it are read-only. Pickles and deep copies of it are ordinary tensors.
    """

    about: tuple[str, str]
    """The parameter's name, and the state's."""

    @classmethod
    def of(cls, tensor: Tensor, about: tuple[str, str]) -> ReadOnlyTensor:
        """``tensor``, protected."""
        with as_plain():
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
        with as_plain():
            before = [each._version for each in read]
            result = func(*args, **kwargs)
            for each, version in zip(read, before, strict=True):
                if each._version != version:  # an operation that writes to something else than its first argument
                    _refuse(each)
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
    with as_plain():
        return tensor.as_subclass(Tensor)


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ReadOnlyTensor]:
    """Those that the operation would write to."""
    name = name_of(func)
    if writes_unseen(func):
        return _protected_in((args, kwargs))
    writes_to_first = name in WRITING_METHODS or name.startswith("assigning ") or (name[-1] == "_" and name[-2] != "_")
    return _protected_in((args[:1] if writes_to_first else (), kwargs.get("out")))


def _protected_in(values: Any) -> list[ReadOnlyTensor]:
    return [each for each in tree_leaves(values) if isinstance(each, ReadOnlyTensor)]


def _refuse(tensor: ReadOnlyTensor) -> None:
    fqn, name = tensor.about
    raise AccessError.of_state(fqn, name, "what is read of a state is a copy, so writing to it would be lost")


def _protect(owners: Mapping[int, ReadOnlyTensor], result: Any) -> Any:
    """A result, protected if it shows the memory of one that is."""
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
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
        """They were assigned, and are stored."""
        self._latest = values
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
                self.forget()
                raise AccessError.of_state(
                    fqn, name, "the tensor was written to after it had been assigned, and stored"
                )

    def forget(self) -> None:
        """A step has been made, or all states were replaced."""
        self._tensors.clear()
        self._latest = None
