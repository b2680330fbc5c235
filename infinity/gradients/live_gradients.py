"""Main gradients as live tensors: what the user holds of them is the gradient, and what he writes to it counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping

import torch

from infinity.gradients.held_gradients import HeldGradient, PagedGradient
from infinity.gradients.reducer import ReducedGradients
from infinity.units.layout import Slot
from infinity.units.unit import Unit


class LiveGradients:
    """The gradients that scripts see in ``parameter.grad`` between backward and step: of the parameter's shape, without
    the loss scale, fp32 or, if sums are rounded to it, bf16.

    One that is not in memory is a `PagedGradient`. It keeps its values when the parameter gets another gradient, or none.
    """

    def __init__(self, gradients: ReducedGradients, await_update: Callable[[Unit], None]) -> None:
        """``await_update`` returns when no update of a unit is pending, which would still read its gradients."""
        self._gradients = gradients
        self._held = gradients.held
        self._await_update = await_update

    def of(self, unit: Unit, slot: Slot) -> torch.Tensor:
        """The gradient, which the parameter has."""
        own = self._held.own.get((unit.index, slot.index))
        if own is not None:
            return own.show()
        return self._shown(unit, slot)

    def _shown(self, unit: Unit, slot: Slot) -> torch.Tensor:
        key = unit.index, slot.index
        given = self._held.given_for(key)
        if given is not None:
            return given
        # In memory, and read by no update: a plain view. Held until the step, which looks whether it was written to.
        if self._gradients.is_available(unit) and (unit.update is None or unit.update.done()):
            self._held.views[key] = HeldGradient(unit, slot, self._gradients.show(unit).tracked_view(slot))
            return self._held.views[key].tensor

        def fetch() -> torch.Tensor:
            self._await_update(unit)
            self._gradients.make_whole(unit, slot)
            return self._gradients.show(unit).tracked_view(slot)

        def replace(values: torch.Tensor) -> None:
            unit.parameters[slot.index].grad = values

        paged = PagedGradient.of(
            slot.spec.shape, self._gradients.dtype_shown, fetch, lambda: self._gradients.on_change(unit), replace
        )
        # Weak, as in torch: `p.grad` is the same object while somebody holds it, and costs nothing afterwards.
        self._held.given[key] = weakref.ref(paged)
        return paged

    def is_same(self, unit: Unit, slot: Slot, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` is what stands for the gradient already."""
        own = self._held.own.get((unit.index, slot.index))
        return gradient is (self._held.given_for((unit.index, slot.index)) if own is None else own.tensor)

    def replace(self, unit: Unit, slot: Slot, gradient: torch.Tensor | None) -> None:
        """``gradient``, a tensor of the user's, is the gradient from now on; None: there is none."""
        if self._held.own:  # assigned one after the other, tensors that nobody else holds must not pile up
            self._apply_user_write(next(reversed(self._held.own)))
        self._await_update(unit)
        self._gradients.set_gradient(unit, slot, None if gradient is None else gradient.detach())
        if gradient is not None:
            self._held.own[unit.index, slot.index] = HeldGradient(unit, slot, gradient)

    def zero(self, kept: Collection[tuple[int, int]]) -> None:
        """``zero_grad(set_to_none=False)``, but for those ``kept``: gradients that are tensors of the user's stay these."""
        for key, view in list(self._held.views.items()):
            if key not in kept and view.is_held_by_others:  # what he holds becomes zero, and stays the gradient
                # A view follows the unit's memory; with memory of its own it stays the user's gradient, whatever is
                # kept there.
                del self._held.views[key]
                view.tensor.data = view.tensor.clone()
                self._held.own[key] = view
        for key, reference in list(self._held.given.items()):
            paged = reference()
            if key not in kept and paged is not None:
                paged.in_memory()  # it is another tensor for the user, so it must become an ordinary one
        own = {key: value for key, value in self._held.own.items() if key not in kept}
        self._gradients.zero(kept)
        # As torch's zero_grad: detached from its graph, then zeroed in place.
        for value in own.values():
            if value.tensor.grad_fn is not None:
                value.tensor.detach_()
            value.tensor.requires_grad_(False).zero_()
            value.on_delivered()
        self._held.own.update(own)

    def apply_user_writes(self) -> None:
        """What the user wrote into gradients of his own becomes the gradient. A step is about to begin."""
        for key in list(self._held.views):
            view = self._held.views.pop(key)
            if view.has_moved:
                self._held.own[key] = view  # `.data` was assigned: its memory is the user's now
            elif view.is_held_by_others:
                self._held.views[key] = view  # else nobody can write to it any more
            del view
        for key in list(self._held.own):
            self._apply_user_write(key)

    def _apply_user_write(self, key: tuple[int, int]) -> None:
        own = self._held.own.pop(key)
        if own.may_have_changed:
            self._await_update(own.unit)
            self._gradients.set_gradient(own.unit, own.slot, own.tensor.detach())
            own.on_delivered()
        if own.is_shared:  # else nobody can write to it, and the copy among the main gradients is enough
            self._held.own[key] = own

    def is_present(self, unit: Unit, slot: Slot) -> bool:
        """Whether the parameter has a gradient of this backward's predecessors, or a part of its own."""
        return slot in self._gradients.slots_with_gradient(unit)

    def add_with_graph(self, unit: Unit, slot: Slot, gradient: torch.Tensor) -> None:
        """As autograd does with a graph, give the parameter another tensor: the sum of what was there and ``gradient``."""
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        key = unit.index, slot.index
        own = self._held.own_of(key)
        before = None
        if own is not None:
            before = own.tensor
            if not own.is_new:
                self._apply_user_write(key)
        elif self.is_present(unit, slot):
            # The sum needs the values on the gradient's device, and must not change with the memory that it came from.
            before = self._shown(unit, slot).clone().to(gradient.device)
            self._held.detach(unit, [slot])
        with torch.enable_grad():  # a hook runs without; the user differentiates through the sum
            self._held.own[key] = HeldGradient(
                unit, slot, gradient if before is None else before + gradient, is_new=True
            )

    def add(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        """As autograd does without a graph, add to the very tensor that the user holds."""
        if not self._held.own and not self._held.views:
            return
        for slot, gradient in gradients.items():
            key = unit.index, slot.index
            own = self._held.own_of(key)
            if own is None:
                continue
            # A new one contains the delivered gradient already, as the sum that `add_with_graph` made.
            if not own.is_new:
                self._apply_user_write(key)
                with torch.no_grad():
                    own.tensor.add_(gradient)
            own.on_delivered()
