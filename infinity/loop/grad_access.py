"""What ``parameter.grad`` gives between backward and step, and what assigning it does.

Knows where gradients are; must not know when they come.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import AccessError, OtherNumbersWarning
from infinity.gradients.listener import GradientListener
from infinity.gradients.paged_grad import PagedGradient
from infinity.loop.backward import Backwards
from infinity.paging.module_hooks import ModuleHooks
from infinity.paging.residency import Residency
from infinity.torch_internals.names import num_owners
from infinity.units.layout import Slot
from infinity.units.parameter import plain_grad, set_plain_grad
from infinity.units.unit import Unit
from infinity.updates.stepper import Stepper


class _Own:
    """A tensor of the user's that is a parameter's gradient, and has been copied to where gradients wait."""

    def __init__(self, unit: Unit, slot: Slot, tensor: torch.Tensor, *, is_new: bool = False) -> None:
        """``is_new``: it is going to be delivered."""
        self.unit = unit
        self.slot = slot
        self.tensor = tensor
        self.is_new = is_new
        self.note_taken()

    @property
    def has_moved(self) -> bool:
        """Whether its ``data`` was assigned since `note_taken`."""
        return self.tensor.data_ptr() != self._address

    @property
    def may_have_changed(self) -> bool:
        """Whether it was written to since `note_taken`, or may be: who gets ``parameter.grad`` may write by ``.data``, and
        `GradScaler` writes by kernels; neither counts."""
        return self.was_shown or self.has_moved or self.tensor._version != self._version

    def note_taken(self) -> None:
        """Its values are known."""
        self._version = self.tensor._version
        self._address = self.tensor.data_ptr()
        self.was_shown = False
        """Whether ``parameter.grad`` has given it since."""

    @property
    def is_held_by_others(self) -> bool:
        """Whether anybody else can see it, or write to it."""
        tensor: Any = self.tensor  # torch does not declare the counter, which counts views
        return bool(tensor.requires_grad or sys.getrefcount(tensor) > 3 or tensor._use_count() > 1)

    @property
    def is_shared(self) -> bool:
        """Whether anybody else can see its memory, or write to it: through a tensor that it is a view of, say."""
        if self.is_held_by_others:
            return True
        storage = self.tensor.untyped_storage()
        # One is the tensor's, one this variable's. Memory that is not torch's (numpy's) is counted by nobody.
        return bool(num_owners(storage) > 2 or not storage.resizable())


class GradAccess(GradientListener):
    """The main gradients as ``parameter.grad``: live, of the parameter's shape, where they are kept, without the loss scale.

    They are fp32, or bf16 if the config asks for gradients that are rounded to it. One that is not in memory is a
    `PagedGradient`. As in torch, the same object is given as long as somebody holds it, and it keeps its values when the
    parameter gets another gradient, or none.
    """

    def __init__(self, module_hooks: ModuleHooks, residency: Residency, stepper: Stepper, backwards: Backwards) -> None:
        self._module_hooks = module_hooks
        self._residency = residency
        self._stepper = stepper
        self._gradients = stepper.gradients
        self._backwards = backwards
        self._given: dict[tuple[int, int], weakref.ref[PagedGradient]] = {}
        """(unit, slot) -> what stands for its gradient, as far as somebody may still hold it."""
        self._views: dict[tuple[int, int], _Own] = {}
        """The same for gradients in memory. Held, because assigning their ``data`` shows in nothing else."""
        self._own: dict[tuple[int, int], _Own] = {}
        """Gradients that are tensors of the user's: assigned by him, or with a graph (``create_graph=True``)."""

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient, or None without one.

        Raises:
            AccessError: it was used up by an update in backward, or is averaged in the step.
        """
        unit, slot = self._module_hooks.locate(parameter)
        if not slot.spec.is_trainable:
            return plain_grad(parameter)
        self._backwards.before_gradient_access(unit, slot)
        self._check_not_used_up(unit, slot)
        if slot not in self._gradients.slots_with_gradient(unit):
            return plain_grad(parameter)
        self._gradients.check_averaged(unit, slot)
        own = self._own.get((unit.index, slot.index))
        if own is not None:
            own.was_shown = True
            return own.tensor
        return self._shown(unit, slot)

    def _check_not_used_up(self, unit: Unit, slot: Slot) -> None:
        if (unit.index, slot.index) in self._stepper.used_up:
            raise AccessError.of_gradient(
                slot.spec.fqn,
                reason="its unit was updated in backward, and the gradient was used up",
                cure='Set "infinity.update": "step" to see or change gradients between backward and step',
            )

    def _shown(self, unit: Unit, slot: Slot) -> torch.Tensor:
        given = self._given_for(unit, slot)
        return self._stand_in(unit, slot) if given is None else given

    def _given_for(self, unit: Unit, slot: Slot) -> torch.Tensor | None:
        key = unit.index, slot.index
        if key in self._views:
            return self._views[key].tensor
        reference = self._given.get(key)
        return reference() if reference is not None else None

    def _stand_in(self, unit: Unit, slot: Slot) -> torch.Tensor:
        key = unit.index, slot.index
        if self._gradients.is_at_hand(unit) and (unit.update is None or unit.update.done()):
            self._views[key] = _Own(unit, slot, self._gradients.show(unit).lend(slot))
            return self._views[key].tensor

        def fetch() -> torch.Tensor:
            self._residency.await_update(unit)
            self._gradients.check_averaged(unit, slot)
            return self._gradients.show(unit).lend(slot)

        def replace(values: torch.Tensor) -> None:
            unit.parameters[slot.index].grad = values

        paged = PagedGradient.of(
            slot.spec.shape, self._gradients.dtype_shown, fetch, lambda: self._gradients.note_change(unit), replace
        )
        self._given[key] = weakref.ref(paged)
        return paged

    def set(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it.

        Raises:
            TypeError: it is no floating-point tensor.
            ValueError: wrong shape.
            AccessError: the one before was used up by an update in backward.
        """
        unit, slot = self._module_hooks.locate(parameter)
        if not slot.spec.is_trainable:
            set_plain_grad(parameter, gradient)
            return
        if gradient is not None:
            if not getattr(gradient, "is_floating_point", bool)():
                raise TypeError(f"gradient of '{slot.spec.fqn}' must be a floating-point tensor, got {gradient!r:.80}")
            if tuple(gradient.shape) != slot.spec.shape:
                raise ValueError(
                    f"gradient of '{slot.spec.fqn}' must have shape {slot.spec.shape}, got {tuple(gradient.shape)}"
                )
        self._backwards.before_gradient_access(unit, slot, assigns=gradient is not None)
        self._check_not_used_up(unit, slot)
        is_absent = slot not in self._gradients.slots_with_gradient(unit) and not self._gradients.is_in_parts
        if gradient is None and is_absent:
            return
        if gradient is not None:
            own = self._own.get((unit.index, slot.index))
            if gradient is (self._given_for(unit, slot) if own is None else own.tensor):
                return  # `parameter.grad *= 2`: it has been changed in place already
            if isinstance(gradient, PagedGradient):
                gradient = gradient.in_memory()
            if gradient.layout is not torch.strided:
                warnings.warn(OtherNumbersWarning.of_sparse_gradient(slot.spec.fqn), stacklevel=2)
                gradient = gradient.to_dense()
        if self._own:  # assigned one after the other, tensors that nobody else holds must not pile up
            self._take_in(next(reversed(self._own)))
        self._residency.await_update(unit)
        self._gradients.set_gradient(unit, slot, None if gradient is None else gradient.detach())
        if gradient is None:
            self._backwards.note_drop()
        else:
            self._own[unit.index, slot.index] = _Own(unit, slot, gradient)

    def zero(self, kept: Collection[tuple[int, int]]) -> None:
        """``zero_grad(set_to_none=False)``, but for those ``kept``: gradients that are tensors of the user's stay these."""
        for key, view in list(self._views.items()):
            if key not in kept and view.is_held_by_others:  # what he holds becomes zero, and stays the gradient
                del self._views[key]
                view.tensor.data = view.tensor.clone()
                self._own[key] = view
        for key, reference in list(self._given.items()):
            paged = reference()
            if key not in kept and paged is not None:
                paged.in_memory()
        own = {key: value for key, value in self._own.items() if key not in kept}
        self._gradients.zero(kept)
        for value in own.values():
            if value.tensor.grad_fn is not None:
                value.tensor.detach_()
            value.tensor.requires_grad_(False).zero_()
            value.note_taken()
        self._own.update(own)

    def take_in(self) -> None:
        """What the user wrote into gradients of his own becomes the gradient. A step is about to begin."""
        for key in list(self._views):
            view = self._views.pop(key)
            if view.has_moved:
                self._own[key] = view
            elif view.is_held_by_others:
                self._views[key] = view
            del view
        for key in list(self._own):
            self._take_in(key)

    def _take_in(self, key: tuple[int, int]) -> None:
        own = self._own.pop(key)
        if own.may_have_changed:
            self._residency.await_update(own.unit)
            self._gradients.set_gradient(own.unit, own.slot, own.tensor.detach())
            own.note_taken()
        if own.is_shared:
            self._own[key] = own

    def _own_of(self, key: tuple[int, int]) -> _Own | None:
        if key in self._views and self._views[key].has_moved:
            self._own[key] = self._views.pop(key)
        return self._own.get(key)

    def note_graph(self, unit: Unit, slot: Slot, gradient: torch.Tensor) -> None:
        """As autograd does with a graph, give the parameter another tensor: the sum of what was there and ``gradient``."""
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        key = unit.index, slot.index
        own = self._own_of(key)
        before = None
        if own is not None:
            before = own.tensor
            if not own.is_new:
                self._take_in(key)
        elif slot in self._gradients.slots_with_gradient(unit):
            before = self._shown(unit, slot).clone().to(gradient.device)
            self.note_end(unit, [slot])
        with torch.enable_grad():
            self._own[key] = _Own(unit, slot, gradient if before is None else before + gradient, is_new=True)

    def note_delivery(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        """As autograd does without a graph, add to the very tensor that the user holds."""
        if not self._own and not self._views:
            return
        for slot, gradient in gradients.items():
            key = unit.index, slot.index
            own = self._own_of(key)
            if own is None:
                continue
            if own.is_new:
                own.is_new = False
            else:
                self._take_in(key)
                with torch.no_grad():
                    own.tensor.add_(gradient)
            own.note_taken()

    def note_end(self, unit: Unit, slots: Sequence[Slot]) -> None:
        """These gradients will be others, or none: what the user holds of them keeps the values that it has."""
        for slot in slots:
            key = unit.index, slot.index
            self._own.pop(key, None)
            view = self._views.pop(key, None)
            if view is not None and view.is_held_by_others:
                view.tensor.data = view.tensor.clone()
            reference = self._given.pop(key, None)
            paged = reference() if reference is not None else None
            if paged is not None:
                paged.settle(torch.clone(paged))
