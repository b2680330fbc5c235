"""Optimizer states that somebody looked at, and may have changed.

A state rests outside memory, so what is read of it is a copy. Until the next step that copy stands for the state: reading
again gives the same tensors, and what was written into them, by whatever way, is stored before anybody else reads or updates
the state. Copies that nobody holds any more are let go of at the next read, so that one parameter's at most stay in memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from infinity.errors import StaleStateError
from infinity.numerics.stamp import contents_stamp
from infinity.optim.facade.lazy_state import StateKeeper
from infinity.optim.probe import copy_scalar
from infinity.optim.values import same_values


class _Memory:
    """One tensor that was handed out: its memory, and whether anybody else still looks at it."""

    def __init__(self, tensor: Tensor) -> None:
        """``tensor`` has no gaps in memory."""
        self._array = tensor.numpy()
        self._flat = tensor.as_strided((tensor.numel(),), (1,))
        self._stamp = contents_stamp(self._flat)
        self._tensor: Tensor | None = None
        self._handed: Callable[[], Any] = lambda: None
        """Gives the array that every tensor over the memory keeps, however it was derived."""
        self.present()

    def present(self) -> Tensor:
        """The tensor that was handed out, or another over the same memory."""
        if self._tensor is None:
            array = self._handed()
            if array is None:
                array = self._array.view()
                self._handed = weakref.ref(array)
            self._tensor = torch.from_numpy(array)
        return self._tensor

    def forget(self) -> bool:
        """Let go of the tensor. Returns whether nobody else holds it, either."""
        self._tensor = None
        return self._handed() is None

    def is_changed(self) -> bool:
        """Whether it was written to since it was handed out, or `note_stored`."""
        return contents_stamp(self._flat) != self._stamp

    def note_stored(self) -> None:
        """What is in it now is stored."""
        self._stamp = contents_stamp(self._flat)


class _Shown:
    """One parameter's state, as it was handed out."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._memory: dict[str, _Memory] = {}
        self._others: dict[str, Any] = {}
        self._order = list(values)
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device.type == "cpu" and value.dtype != torch.bfloat16:
                self._memory[name] = _Memory(value)
            else:
                self._others[name] = value
        self._before = {name: copy_scalar(value) for name, value in self._others.items()}

    def values(self) -> dict[str, Any]:
        return {
            name: self._memory[name].present() if name in self._memory else self._others[name] for name in self._order
        }

    def forget(self) -> bool:
        """Let go of it, unless somebody else holds a part. Returns whether nobody does."""
        return all([memory.forget() for memory in self._memory.values()])

    def changes(self) -> list[str]:
        """Names of what was written to since it was handed out, or `note_stored`."""
        changed = [name for name, memory in self._memory.items() if memory.is_changed()]
        return changed + [name for name, value in self._others.items() if not same_values(value, self._before[name])]

    def note_stored(self) -> None:
        """What is in it now is stored. Not before it is: an interrupt may come in between."""
        for memory in self._memory.values():
            memory.note_stored()
        self._before = {name: copy_scalar(value) for name, value in self._others.items()}


class ShownStates:
    """Hands out states, and stores what was changed in them.

    Args:
        keeper: keeps them.
        name: a parameter's name, for messages.
    """

    def __init__(self, keeper: StateKeeper, name: Callable[[Tensor], str]) -> None:
        self._keeper = keeper
        self._name = name
        self._shown: dict[Tensor, _Shown] = {}
        self._given: dict[Tensor, dict[str, tuple[weakref.ref[Tensor], int]]] = {}
        """What the user has assigned."""
        self._latest: Mapping[str, Any] | None = None
        """Keeps what was assigned last: it may be changed although nobody else holds it when that is looked for."""
        self._stale: list[tuple[str, _Shown]] = []
        """What was read before the last step, by parameter's names."""
        self._lent: list[tuple[str, _Shown]] = []
        """Copies by parameter's names: what is written into them is an error."""

    def read(self, param: Tensor) -> dict[str, Any]:
        """The state as it is now, in tensors that may be changed in place until the next step; empty without one."""
        shown = self._shown.get(param)
        if shown is None:
            self.settle()
            values = self._keeper.gather_state(param)
            if not values:
                return {}
            shown = self._shown[param] = _Shown(values)
        return shown.values()

    def read_anew(self, param: Tensor) -> dict[str, Any]:
        """As `read`, with a look at where the state rests even if somebody still holds it: all ranks look as often."""
        values = self.copy(param)
        if values and param not in self._shown:
            self._shown[param] = _Shown(values)
        return self._shown[param].values() if values else {}

    def copy(self, param: Tensor) -> dict[str, Any]:
        """A copy of the state as it is now, of which no note is taken."""
        self.settle()
        return self._keeper.gather_state(param)

    def lend(self, fqn: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values``, which are copies that stand for nothing: who writes into them is told so."""
        self.settle()
        shown = _Shown(values)
        self._lent.append((fqn, shown))
        return shown.values()

    def replace(self, param: Tensor, values: Mapping[str, Any]) -> None:
        """Store another state; an empty one makes the parameter start anew. Until the next step, its tensors are the state.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        self.settle()
        self._keeper.load_state(param, dict(values))
        self._shown.pop(param, None)
        self._latest = values
        self._given[param] = {
            name: (weakref.ref(value), contents_stamp(value))
            for name, value in values.items()
            if isinstance(value, Tensor)
        }

    def settle(self) -> None:
        """Store what was changed, and let go of what nobody else holds.

        Raises:
            StaleStateError: a tensor was changed that was read before the last step, or one that was lent.
        """
        if not (self._shown or self._given or self._stale or self._lent):
            return
        for param, given in self._given.items():
            alive = [(name, value(), stamp) for name, (value, stamp) in given.items()]
            changed = {
                name: value for name, value, stamp in alive if value is not None and contents_stamp(value) != stamp
            }
            if changed:
                self._keeper.load_state(param, {**self._keeper.gather_state(param), **changed})
                given.update({name: (weakref.ref(value), contents_stamp(value)) for name, value in changed.items()})
        self._latest = None
        for param, shown in list(self._shown.items()):
            if shown.changes():
                self._keeper.load_state(param, shown.values())
                shown.note_stored()
            if shown.forget():
                del self._shown[param]
        for kept in (self._stale, self._lent):
            for pair in list(kept):
                fqn, shown = pair
                changed_names = shown.changes()
                shown.note_stored()  # it is told once
                if shown.forget():
                    kept.remove(pair)
                if changed_names:
                    raise StaleStateError(fqn, changed_names[0], is_copy=kept is self._lent)

    def expire(self) -> None:
        """A step has been made, or all states were replaced: what was handed out is not the state any more."""
        self._given.clear()
        if self._shown:
            self._stale += [(self._name(param), shown) for param, shown in self._shown.items()]
            self._shown.clear()
