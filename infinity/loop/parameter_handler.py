"""Implements operations, ``.data`` and ``.grad`` of a model's parameters while an engine holds them."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.errors import AccessError, ModelError, OtherNumbersWarning
from infinity.gradients.held_gradients import PagedGradient
from infinity.gradients.live_gradients import LiveGradients
from infinity.loop.module_hooks import ModuleHooks
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.paging.assigned import AssignedData
from infinity.paging.parameter_map import ParameterMap
from infinity.paging.saved_tensors import hooks_are_forbidden, hooks_of_the_user, is_checkpointed, keep_saved
from infinity.threads.engine_lock import is_inside
from infinity.torch_internals import operations
from infinity.torch_internals.names import has_memory, in_backward, lazy_bits, outside_modes, with_lazy_bits
from infinity.units.layout import Slot
from infinity.units.parameter import (
    HeldTensor,
    PagedView,
    ViewPlace,
    bind_view,
    detach_view,
    host_of,
    make_view,
    plain_grad,
    set_plain_grad,
    unbind_view,
)
from infinity.units.unit import Unit
from infinity.updates.stepper import Stepper

_CURES = {
    "share_memory_": "The engine moves weights in and out of memory, so other processes cannot share them. Share a copy: "
    "copy.deepcopy(model).share_memory(); or engine.close(restore_weights=True) first, after which the model is "
    "an ordinary one",
    "moving to the meta device": "To have the model without values, build another one inside `with torch.device('meta'):`; to "
    "release the values of this one, engine.close(restore_weights=False)",
}


@dataclass(eq=False)
class ParameterHandler:
    """Runs operations on paged-out parameters of one model, and gives their data and gradients.

    `infinity.units.parameter` calls it from ``__torch_function__`` and from the properties ``data`` and ``grad``.
    """

    _parameter_map: ParameterMap
    _module_hooks: ModuleHooks
    _coordinator: ParameterCoordinator
    _stepper: Stepper
    _live: LiveGradients
    """The main gradients as ``parameter.grad``."""
    gatherer: Any
    """`ConsistentAccess`, for `GatheredParameters`. It is in a layer above, hence Any."""
    _assigned: AssignedData
    _has_warned_of_strides = False

    # ------------------------------------------------------------------------------------------------------- operations

    def operate(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[HeldTensor]
    ) -> Any:
        """Run ``function``, with ``tensors`` among its arguments that are paged out, or raise."""
        # An operation over weights of two engines comes to each of them in turn.
        tensors = [tensor for tensor in tensors if host_of(tensor) is self]
        places = {id(tensor): self._parameter_map.locate_any(tensor) for tensor in tensors}
        if not self._coordinator.is_inside_modules:
            unit, _ = places[id(tensors[0])]
            # No module has entered the unit. If one inside a block is being called, such modules get hooks, or each of
            # its operations would be a page fault of its own.
            is_called = self._module_hooks.hook_inside(unit)
            if is_called and not in_backward() and torch.is_grad_enabled():
                self._coordinator.backwards.collector.on_partial_gradients(unit, by_script=True)
        units = list(dict.fromkeys(unit for unit, _ in places.values()))
        # torch._foreach_* over all parameters (clip_grad_norm_, EMA) would need all units at once: one call for each
        # unit.
        if len(units) > 1:
            found = operations.unit_by_unit(
                function, args, kwargs, lambda row: frozenset(places[id(t)][0].index for t in row if id(t) in places)
            )
            if found is not None:
                return found[0]
        coordinator, name = self._coordinator, operations.name_of(function)
        if len(units) > 1 and name in operations.JOINING and not coordinator.parameter_cache.has_room(units):
            args, kwargs = operations.replaced(
                (args, kwargs), lambda leaf: leaf.clone() if id(leaf) in places else leaf
            )
            # torch.cat copies its arguments anyway. Here each is copied on its own, so that one unit at a time is
            # needed.
            return function(*args, **kwargs)
        fqn = places[id(tensors[0])][1].spec.fqn
        # `set_` and `resize_` would give the parameter memory that the engine does not see.
        if function in operations.REBINDING:
            raise AccessError.of_parameter(fqn, operation=name)
        if in_backward():
            # An operation of a custom autograd.Function may be the first event of a backward.
            coordinator.backwards.on_activity()
            for unit in units:
                coordinator.backwards.collector.on_partial_gradients(unit, by_script=False)
        coordinator.lock.acquire(f"{name} of '{fqn}'")
        try:
            # Bound weights are plain tensors only for threads that are inside. Autograd's threads get there by
            # `joined`.
            with contextlib.nullcontext() if is_inside() else coordinator.lock.joined():
                # The address would be wrong as soon as the unit is paged out. While a module or block holds the units,
                # it is valid.
                if name in operations.EXPOSING and not all(unit.num_active for unit in units):
                    raise AccessError.of_parameter(fqn, operation=name, cure=_CURES.get(name))
                if not coordinator.is_computing:
                    # `state_dict()` calls detach() on each parameter: it gets a copy, which may be in a file.
                    if name == "detach" and not isinstance(tensors[0], PagedView):
                        place = places[id(tensors[0])]
                        collected = coordinator.copies.collected(
                            tensors[0], fqn, lambda: coordinator.copy_for_user(*place)
                        )
                        if collected is not None:
                            return collected
                    coordinator.begin_outside_read()
                    coordinator.parameter_cache.check_room(units)
                if coordinator.is_training_forward:
                    for unit, slot in (places[id(tensor)] for tensor in tensors if not isinstance(tensor, PagedView)):
                        coordinator.backwards.collector.on_module_call(unit, [slot])
                try:
                    with coordinator.held(units), self._saving():
                        result = self._run(function, args, kwargs, tensors, places)
                        if name in ("to", "empty_like") and isinstance(result, torch.Tensor) and result.is_meta:
                            # ``module.to("meta")`` would replace the parameter by one without values.
                            what = "moving to the meta device"
                            raise AccessError.of_parameter(fqn, operation=what, cure=_CURES[what])
                        # A view of the weights must not outlive their memory.
                        return operations.replaced(result, lambda leaf: self._outlasting(leaf, units))
                finally:
                    self._unbind(units)
        finally:
            coordinator.lock.release()

    def _saving(self) -> contextlib.AbstractContextManager[Any]:
        """A context with the saved-tensor hooks, unless they are active."""
        coordinator = self._coordinator
        return contextlib.nullcontext() if coordinator.is_inside_modules else coordinator.saving

    @outside_modes
    def _unbind(self, units: Sequence[Unit]) -> None:
        self._coordinator.parameter_cache.unbind_unused(units)

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[HeldTensor],
        places: Mapping[int, tuple[Unit, Slot]],
    ) -> Any:
        """Call the operation, while the units are bound."""
        views = list({id(tensor): tensor for tensor in tensors if isinstance(tensor, PagedView)}.values())
        try:
            self._begin(views, places.values() if operations.may_write(function, kwargs) else ())
            if operations.name_of(function) in operations.AS_ARRAY and args:
                # NumPy would keep looking at memory that the engine gives to another unit.
                result = function(args[0].detach().clone().requires_grad_(args[0].requires_grad), *args[1:], **kwargs)
                result.flags.writeable = False  # what is written there would reach no weight
                return result
            if hooks_are_forbidden() and not operations.may_write(function, kwargs):
                # What is saved is the weight itself, which is about to lose its memory: a view holds it.
                args, kwargs = operations.replaced(
                    (args, kwargs), lambda leaf: _as_view(leaf) if id(leaf) in places else leaf
                )
            result = function(*args, **kwargs)
            # Fused optimizers write without counting: the versions of the parameters stay, so the write is noted here.
            if operations.writes_unseen(function):
                for leaf in operations.leaves(args[:1]):
                    if id(leaf) in places:
                        unit, slot = places[id(leaf)]
                        unit.on_write([slot.index])
            return result
        finally:
            for view in views:
                unbind_view(view)

    @outside_modes
    def _begin(self, views: Sequence[PagedView], written: Iterable[tuple[Unit, Slot]]) -> None:
        for unit, slot in written:
            # Before the write: which elements it changes decides which keep their fp32 main weight.
            self._coordinator.parameter_cache.remember(unit, slot)
        for view in views:
            place = view.place
            # `place` is a recipe: dtype, shape, strides and offset into the unit's flat buffer, wherever that is now.
            base = place.unit.memory.view(place.dtype)
            bind_view(view, with_lazy_bits(base.as_strided(place.shape, place.stride, place.offset), place.lazy_bits))

    def _outlasting(self, value: Any, units: Sequence[Unit]) -> Any:
        """A result of an operation, made safe to keep: a view of weights becomes a `PagedView` or a copy."""
        unit = self._unit_behind(value)
        if unit is None or unit not in units:
            return value
        if value.requires_grad and self._coordinator.is_computing and torch.is_grad_enabled():
            return value  # what it is used for is saved as packed saved tensors
        if self._hooks_may_keep() or (in_backward() and is_checkpointed()):
            # Hooks of a script's, or of a checkpoint, may keep it, of what a torch.autograd.Function saves. torch makes another
            # tensor of what they keep, over the same memory: a `PagedView` has none. A plain view holds that of the unit.
            return value
        # A plain view becomes a `PagedView`, which follows the unit. Anything else is copied.
        slot = unit.slot_at(int(value.storage_offset()) * value.itemsize)
        if slot is None or type(value) is not torch.Tensor:
            return value.clone()
        shape, offset = tuple(value.shape), int(value.storage_offset())
        place = ViewPlace(weakref.ref(self), unit, slot, value.dtype, shape, value.stride(), offset, lazy_bits(value))
        unit.on_view(slot, value)
        return make_view(value, place)

    def _hooks_may_keep(self) -> bool:
        """Whether hooks of a script's may get a tensor that is saved now."""
        return self._coordinator.is_computing and hooks_of_the_user() is not None

    def _unit_behind(self, value: Any) -> Unit | None:
        """The unit over whose memory ``value`` is a plain tensor; None without one."""
        if not isinstance(value, torch.Tensor) or host_of(value) is not None or value.layout is not torch.strided:
            return None
        if value.is_meta or not has_memory(value) or not value.numel():
            return None
        return self._coordinator.parameter_cache.unit_behind(value)

    # ------------------------------------------------------------------------------------------------------------- data

    def data_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Implements reading ``parameter.data``."""
        unit, slot = self._parameter_map.locate(parameter)
        view = unit.data_view(slot)
        if not unit.is_bound and self._hooks_may_keep():
            # What they keep needs memory, see `_outlasting`. The second `.data` is torch's: a version counter of its own.
            return parameter.detach().data
        # Outside of calls, a view that pages the unit in whenever it is used.
        if not unit.is_bound or not is_inside():
            return make_view(view, self._whole(unit, slot))
        self._coordinator.parameter_cache.remember(unit, slot)
        return view

    def _whole(self, unit: Unit, slot: Slot) -> ViewPlace:
        spec = slot.spec
        return ViewPlace(
            weakref.ref(self), unit, slot, spec.dtype, spec.shape, spec.stride, slot.offset_bytes // spec.dtype.itemsize
        )

    def set_data(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Implements assigning ``parameter.data``: the values are copied."""
        unit, slot = self._parameter_map.locate(parameter)
        # `p.data = p.data`, as modules do when they are moved to where they are.
        if values is parameter or (isinstance(values, PagedView) and values.place == self._whole(unit, slot)):
            return
        _check_assigned(slot, parameter, values)
        # After `p.data = t`, torch has one memory for both, so t shows the trained weight, and a second `p.data = t`
        # changes nothing. Here t still has its old values, which must not come back. If the script changed t, it is
        # assigned.
        before = self._assigned.of(slot.spec.fqn)
        is_plain = type(values) in (torch.Tensor, nn.Parameter) and values.layout is torch.strided
        is_plain &= host_of(values) is None and not values.is_inference()
        if before is not None and is_plain and before.shows_the_weight(values):
            return
        self._check_shared(slot, values)
        if not self._has_warned_of_strides and host_of(values) is None and not _lies_alike(values, slot):
            self._has_warned_of_strides = True
            what = (
                f"was given values with the strides {values.stride()} (channels_last? transposed?), and keeps its "
                f"own, {slot.spec.stride}: the last bits may differ from torch's"
            )
            cure = "Convert the model before infinity.initialize"
            warnings.warn(OtherNumbersWarning.of_parameter(slot.spec.fqn, what, cure=cure), stacklevel=3)
        if host_of(values) is not None:
            values = values.detach().clone()  # it looks at the same memory, in another order
        for view in unit.data_views(slot):
            if isinstance(view, PagedView) or unit.is_bound:
                # In torch the parameter would get other memory. Here it is overwritten, so old views get a copy of it.
                detach_view(view, view.clone())
        with torch.no_grad():
            if unit.num_saved_tensors:
                keep_saved(unit, slot, lambda: parameter.data.clone())
            parameter.data.copy_(values)
        self._assigned.forget(slot.spec.fqn)
        if is_plain and values.numel():
            self._assigned.add(slot.spec.fqn, values)

    def _check_shared(self, slot: Slot, values: torch.Tensor) -> None:
        """Raise if the parameter would share memory with another one.

        Raises:
            ModelError: ``values`` are another parameter's, or were assigned to another one.
        """
        held, fqn = self._slot_behind(values), slot.spec.fqn
        if held is slot or values.layout is not torch.strided or not values.numel():
            return
        other = self._assigned.owner_of(values) if held is None else held.spec.fqn
        if other is None or (held is None and other == fqn):
            return
        raise ModelError(
            f"parameters '{fqn}' and '{other}' would share memory, which the engine does not support",
            cure="Copy the values: parameter.data.copy_(other.data). To tie two parameters, make them one before "
            "infinity.initialize (module.weight = other.weight)",
            fqn=fqn,
        )

    def _slot_behind(self, values: Any) -> Slot | None:
        """The slot of the parameter, of any engine, whose memory ``values`` is a view of; None without one."""
        host = host_of(values)
        if host is not None:
            return values.place.slot if isinstance(values, PagedView) else host.slot_of(values)
        unit = self._unit_behind(values)
        return None if unit is None else unit.slot_at(int(values.storage_offset()) * values.itemsize)

    def before_write(self, parameter: nn.Parameter) -> None:
        """Called before a resident parameter is written to."""
        self._coordinator.parameter_cache.remember(*self._parameter_map.locate(parameter))

    def copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of the parameter's values, as a plain tensor."""
        unit, slot = self._parameter_map.locate(parameter)
        with self._coordinator.lock.held(f"a copy of '{slot.spec.fqn}'"):
            self._coordinator.begin_outside_read()
            return self._coordinator.copy_of(unit, slot)

    # --------------------------------------------------------------------------------------------------------- gradients

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient; None without one.

        Raises:
            AccessError: an update in backward has consumed it.
            RankError: other ranks do not read theirs.
        """
        with contextlib.nullcontext() if in_backward() else self._coordinator.lock.held("reading a gradient"):
            unit, slot = self._parameter_map.locate(parameter)
            # Frozen in `initialize`: no main gradient exists, so torch's own field is used.
            if not slot.spec.is_trainable:
                return plain_grad(parameter)
            self._coordinator.backwards.before_gradient_access(unit, slot)
            # With ZeRO each rank may have a shard of the mean only: this gathers it, on all ranks.
            self._stepper.gradients.make_whole(unit, slot)
            if slot not in self._stepper.gradients.slots_with_gradient(unit):
                return plain_grad(parameter)
            return self._live.of(unit, slot)

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it.

        Raises:
            TypeError: it is no floating-point tensor.
            ValueError: wrong shape.
            AccessError: an update in backward has consumed the one before.
        """
        with contextlib.nullcontext() if in_backward() else self._coordinator.lock.held("setting a gradient"):
            unit, slot = self._parameter_map.locate(parameter)
            if not slot.spec.is_trainable:
                set_plain_grad(parameter, gradient)
                return
            if gradient is not None:
                if not getattr(gradient, "is_floating_point", bool)():
                    raise TypeError(
                        f"gradient of '{slot.spec.fqn}' must be a floating-point tensor, got {gradient!r:.80}"
                    )
                if tuple(gradient.shape) != slot.spec.shape:
                    raise ValueError(
                        f"gradient of '{slot.spec.fqn}' must have shape {slot.spec.shape}, got {tuple(gradient.shape)}"
                    )
            self._coordinator.backwards.before_gradient_access(unit, slot, assigns=gradient is not None)
            main = self._stepper.gradients
            if gradient is None and slot not in main.slots_with_gradient(unit) and not main.is_in_parts:
                return
            if gradient is not None:
                if self._live.is_same(unit, slot, gradient):
                    return  # `parameter.grad *= 2`: it has been changed in place already
                if isinstance(gradient, PagedGradient):
                    gradient = gradient.in_memory()
                if gradient.layout is not torch.strided:
                    warnings.warn(OtherNumbersWarning.of_sparse_gradient(slot.spec.fqn), stacklevel=2)
                    gradient = gradient.to_dense()
            self._live.replace(unit, slot, gradient)
            if gradient is None:
                self._coordinator.backwards.on_drop()

    def slot_of(self, parameter: nn.Parameter) -> Slot:
        """The parameter's place in its unit."""
        return self._parameter_map.locate(parameter)[1]


def _lies_alike(values: torch.Tensor, slot: Slot) -> bool:
    # The stride of a dimension of size 1 means nothing.
    pairs = zip(values.shape, values.stride(), slot.spec.stride, strict=True)
    return values.numel() < 2 or all(given == own for size, given, own in pairs if size != 1)


def _check_assigned(slot: Slot, parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Raise if ``values`` cannot become the parameter's data."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"parameter '{slot.spec.fqn}' needs a tensor for its data, not {type(values).__name__}")
    if values.device != parameter.device:
        what, cure = f"moved to {values.device}", "Pass device= to infinity.initialize"
    elif values.dtype != parameter.dtype:
        what = f"cast to {values.dtype}"
        dtype = str(parameter.dtype).removeprefix("torch.")
        cure = (
            'Set the compute dtype in the config ("bf16" or "fp16"). If the model\'s own forward casts this '
            "parameter, as the routers of Switch Transformers and NLLB-MoE do, build the model with "
            f"router_dtype='{dtype}', which from_pretrained takes too"
        )
    elif tuple(values.shape) != slot.spec.shape:
        what = f"given the shape {tuple(values.shape)}, which is not its {slot.spec.shape}"
        cure = "Change the model before infinity.initialize, or after engine.close(restore_weights=True)"
    else:
        return
    raise ModelError(
        f"parameter '{slot.spec.fqn}' cannot be {what} while an engine holds it", cure=cure, fqn=slot.spec.fqn
    )


def _as_view(tensor: torch.Tensor) -> torch.Tensor:
    # With a graph, the view has to be a part of it; without one, detach is a view as well.
    return tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor.detach()
