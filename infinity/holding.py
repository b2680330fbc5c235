"""The engine's hold on a model: which parameter lies where, and the hooks in its modules.

Knows modules, units and parameters; must not know optimizers or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.errors import ModelError, UnsupportedModelError
from infinity.layout import Slot
from infinity.parameter import let_go
from infinity.unit import Unit

if TYPE_CHECKING:
    from infinity.pager import Pager


class _ModuleHooks:
    """The hooks of one module. A deep copy of the module gets none: it is an ordinary module."""

    def __init__(
        self,
        pager: Pager,
        units: Sequence[Unit],
        owned: Sequence[tuple[Unit, Sequence[Slot]]],
        note_call: Callable[[Unit, Sequence[Slot]], None],
        keep_alive: object,
        abandon: Callable[[], None] | None,
    ) -> None:
        """``abandon``, for the model itself: forget the calls that were cut off."""
        self._is_root = abandon is not None
        self._abandon = abandon or (lambda: None)
        self._pager = pager
        self._units = list(units)
        self._owned = list(owned)
        self._note_call = note_call
        self._keep_alive = keep_alive
        self._parameters: tuple[tuple[str, nn.Parameter], ...] = ()
        self._entered: list[int] = []
        """How many units each running call of the module holds (a module may call itself)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoHooks:
        return _NoHooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoHooks, ()

    def watch(self, module: nn.Module) -> None:
        """Remember the module's own parameters: they must stay the same objects."""
        self._parameters = tuple((name, p) for name, p in module._parameters.items() if p is not None)

    def before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            raise UnsupportedModelError(
                f"torch.compile cannot trace {type(module).__name__} while an engine pages its parameters",
                cure="Train it without compiling",
            )
        own = module._parameters
        for name, parameter in self._parameters:
            if own.get(name) is not parameter:
                raise UnsupportedModelError(
                    f"parameter '{name}' of {type(module).__name__} was replaced while an engine holds it",
                    cure="Don't call .to(device) or assign new parameters after infinity.initialize",
                )
        if self._is_root and self._pager.is_in_forward:
            self._abandon()  # torch runs no hooks after a KeyboardInterrupt, so the last call seems to go on
        self._pager.begin_forward()
        self._entered.append(0)
        if self._pager.is_training_forward:
            for unit, slots in self._owned:
                self._note_call(unit, slots)
        for unit in self._units:
            self._pager.enter(unit)
            self._entered[-1] += 1

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._entered:
            return  # the call failed before our hook ran
        num_entered = self._entered.pop()
        try:
            for unit in reversed(self._units[:num_entered]):
                self._pager.leave(unit)
        finally:
            self._pager.end_forward()

    def forget(self) -> None:
        """Calls that an exception cut off are over."""
        self._entered.clear()


class _NoHooks:
    """What a copy of a module has in place of hooks."""

    def before(self, *_: Any) -> None: ...

    def after(self, *_: Any) -> None: ...


class _BoundHook:
    """A method of some hooks as a callable that torch can mark, and that deep copies do not share with the original."""

    def __init__(self, hooks: object, name: str) -> None:
        self._hooks = hooks
        self._name = name

    def __call__(self, *args: Any) -> None:
        getattr(self._hooks, self._name)(*args)


class ModelHolding:
    """Where each parameter of a model lies, and the hooks that tell the pager what is needed. Answers for the parameters."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.model = model
        self.units = list(units)
        self._places: dict[int, tuple[Unit, Slot]] = {
            id(parameter): (unit, slot)
            for unit in units
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True)
        }
        self._handles: list[Any] = []
        self.handles_of_others: list[Any] = []
        """Of hooks that go with those of the modules."""
        self._hooks: list[_ModuleHooks] = []
        self._modified: list[Unit] = []

    def locate(self, parameter: torch.Tensor) -> tuple[Unit, Slot]:
        """The unit and slot of a parameter of the model.

        Raises:
            ModelError: it is not one of the model's.
        """
        place = self._places.get(id(parameter))
        if place is None:
            raise ModelError(
                f"a tensor of shape {tuple(parameter.shape)} is no parameter of the engine's model. Pass one of "
                "engine.module.parameters()"
            )
        return place

    def holds(self, parameter: object) -> bool:
        """Whether this is a parameter of the model."""
        return id(parameter) in self._places

    def num_owners(self) -> dict[tuple[int, int], int]:
        """(unit index, slot index) -> how many modules have the parameter as their own."""
        owners: dict[tuple[int, int], int] = {}
        for module in self.model.modules():
            for parameter in {id(p): p for p in module.parameters(recurse=False)}.values():
                unit, slot = self.locate(parameter)
                owners[unit.index, slot.index] = owners.get((unit.index, slot.index), 0) + 1
        return owners

    def install(
        self,
        pager: Pager,
        note_call: Callable[[Unit, Sequence[Slot]], None],
        keep_alive: object,
        before_load: Callable[[list[nn.Parameter]], Any],
        after_load: Callable[[Any], None],
    ) -> None:
        """Hook every module.

        A module enters the units of its own parameters, if none of its descendants has parameters of another unit: else
        it would hold them through its whole forward, and operations on them fault them in anyway. The module in which
        all of a unit lies (a block) enters the unit as well, so that it is bound once per call.
        """
        pager.on_use = note_call
        inside: dict[int, set[int]] = {}
        for module in self.model.modules():
            inside[id(module)] = {self.locate(p)[0].index for p in module.parameters()}
        for module in self.model.modules():
            own = self._own_slots(module)
            reach = inside[id(module)]
            entered = [unit for unit, _ in own if reach == {unit.index}]
            if not entered and len(reach) == 1:
                entered = [self.units[next(iter(reach))]]
            abandon = (lambda: self._abandon_calls(pager)) if module is self.model else None
            hooks = _ModuleHooks(pager, entered, own, note_call, keep_alive, abandon)
            hooks.watch(module)
            self._hooks.append(hooks)
            self._handles.append(module.register_forward_pre_hook(_BoundHook(hooks, "before"), prepend=True))
            self._handles.append(module.register_forward_hook(_BoundHook(hooks, "after"), always_call=True))
            if own:
                load = _LoadHooks(module, before_load, after_load)
                self._handles.append(module.register_load_state_dict_pre_hook(_BoundHook(load, "before")))
                self._handles.append(module.register_load_state_dict_post_hook(_BoundHook(load, "after")))
        detach = _StateDictHooks(pager)
        self._handles.append(self.model.register_state_dict_pre_hook(_BoundHook(detach, "before")))
        self._handles.append(self.model.register_state_dict_post_hook(_BoundHook(detach, "after")))

    def _own_slots(self, module: nn.Module) -> list[tuple[Unit, list[Slot]]]:
        own: dict[int, tuple[Unit, list[Slot]]] = {}
        for parameter in module.parameters(recurse=False):
            unit, slot = self.locate(parameter)
            own.setdefault(unit.index, (unit, []))[1].append(slot)
        return list(own.values())

    def _abandon_calls(self, pager: Pager) -> None:
        self.forget_calls()
        pager.abandon_forward()

    def forget_calls(self) -> None:
        """An exception has cut off whatever was running."""
        for hooks in self._hooks:
            hooks.forget()

    def uninstall(self) -> None:
        """Remove the hooks."""
        for handle in (*self._handles, *self.handles_of_others):
            handle.remove()
        self._handles.clear()
        self.handles_of_others.clear()
        self._hooks.clear()

    def release(self) -> None:
        """The parameters are ordinary again; they must have been given data of their own."""
        let_go(parameter for unit in self.units for parameter in unit.parameters)


class _LoadHooks:
    """``load_state_dict`` on one module: its parameters are gathered before and written back after."""

    def __init__(
        self, module: nn.Module, before_load: Callable[[list[nn.Parameter]], Any], after_load: Callable[[Any], None]
    ) -> None:
        self._parameters = list(module.parameters(recurse=False))
        self._before_load = before_load
        self._after_load = after_load
        self._gathered: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoHooks:
        return _NoHooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoHooks, ()

    def before(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise UnsupportedModelError(
                "load_state_dict(assign=True) would replace parameters that an engine holds",
                cure="Call load_state_dict without assign, or before infinity.initialize",
                fqn=prefix.rstrip("."),
            )
        self._gathered = self._before_load(self._parameters)

    def after(self, module: nn.Module, incompatible_keys: Any) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            self._after_load(gathered)


class _StateDictHooks:
    """``state_dict()`` of the model gives copies of the true weights."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoHooks:
        return _NoHooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoHooks, ()

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._pager.begin_state_dict()

    def after(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        self._pager.copies_detached = False


def cast_buffers(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Buffers as ``model.to(device, dtype)`` leaves them: floating-point ones are cast, all are moved."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device=device, dtype=dtype if buffer.is_floating_point() else None)


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor | None]]:
    """All buffers as they are: module, name, value."""
    return [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]


def restore_buffers(buffers: Sequence[tuple[nn.Module, str, torch.Tensor | None]]) -> None:
    """The modules have these buffers again."""
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
