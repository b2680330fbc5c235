"""Answers for the parameters of one model while an engine holds them."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from infinity.distributed.collectives import Ranks
from infinity.errors import ModelError, OtherNumbersWarning
from infinity.loop.grad_access import GradAccess
from infinity.loop.module_hooks import ModuleHooks
from infinity.loop.pager import Pager
from infinity.loop.parameter_operations import ParameterOperations
from infinity.paging.assigned import AssignedData
from infinity.paging.parameter_map import ParameterMap
from infinity.paging.saved_tensors import keep_saved
from infinity.threads.engine_lock import is_inside
from infinity.torch_internals.names import in_backward, lazy_bits
from infinity.units.layout import Slot
from infinity.units.parameter import (
    HeldTensor,
    PagedView,
    Place,
    detach_view,
    host_of,
    make_view,
)
from infinity.units.unit import Unit


class Gatherer(Protocol):
    """Whoever gives full weights."""

    @property
    def data_ranks(self) -> Ranks:
        """Who has the same parameters."""

    def gather(self, parameters: Sequence[nn.Parameter], *, compares: bool = False) -> Any: ...

    def scatter(self, gathering: Any) -> None: ...


class ParameterHandler:
    """The `ParameterHost` of a model: passes each question on to the part that knows."""

    def __init__(
        self,
        parameter_map: ParameterMap,
        module_hooks: ModuleHooks,
        pager: Pager,
        gradients: GradAccess,
        gatherer: Gatherer,
        assigned: AssignedData,
    ) -> None:
        """
        Args:
            parameter_map, module_hooks, pager: whom it works with.
            gradients: answers for gradients.
            gatherer: gathers full weights.
            assigned: knows what was assigned to ``.data``.
        """
        self._parameter_map = parameter_map
        self._module_hooks = module_hooks
        self._pager = pager
        self._operations = ParameterOperations(pager)
        self._gradients = gradients
        self.gatherer = gatherer
        """Gathers full weights."""
        self._has_warned_of_strides = False
        self._assigned = assigned

    def operate(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[HeldTensor],
    ) -> Any:
        mine = [tensor for tensor in tensors if host_of(tensor) is self]
        if not self._pager.is_inside_modules:
            unit, _ = self._parameter_map.locate_any(mine[0])
            is_called = self._module_hooks.hook_inside(unit)
            if is_called and not in_backward() and torch.is_grad_enabled():
                self._pager.backwards.collector.note_parts(unit, by_script=True)
        return self._operations.run(function, args, kwargs, mine, self._parameter_map.locate_any, self._outlasting)

    def data_of(self, parameter: nn.Parameter) -> torch.Tensor:
        unit, slot = self._parameter_map.locate(parameter)
        view = unit.hand_out(slot)
        if not unit.is_bound or not is_inside():
            return make_view(view, self._whole(unit, slot))
        self._pager.residency.remember(unit, slot)
        return view

    def _whole(self, unit: Unit, slot: Slot) -> Place:
        spec = slot.spec
        return Place(
            weakref.ref(self), unit, slot, spec.dtype, spec.shape, spec.stride, slot.offset_bytes // spec.dtype.itemsize
        )

    def _outlasting(self, unit: Unit, slot: Slot, view: torch.Tensor) -> torch.Tensor:
        """``view``, which lies in the unit's flat buffer, as a `PagedView`."""
        shape, offset = tuple(view.shape), int(view.storage_offset())
        place = Place(weakref.ref(self), unit, slot, view.dtype, shape, view.stride(), offset, lazy_bits(view))
        unit.note_view(slot, view)
        return make_view(view, place)

    def set_data(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        unit, slot = self._parameter_map.locate(parameter)
        if values is parameter or (isinstance(values, PagedView) and values.place == self._whole(unit, slot)):
            return
        _check_assigned(slot, parameter, values)
        before = self._assigned.of(slot.spec.fqn)
        is_plain = type(values) in (torch.Tensor, nn.Parameter) and values.layout is torch.strided
        is_plain &= host_of(values) is None and not values.is_inference()
        if before is not None and is_plain and before.shows_the_weight(values):
            return
        self._check_shared(slot, values)
        if not self._has_warned_of_strides and host_of(values) is None and not _lies_alike(values, slot):
            self._has_warned_of_strides = True
            what = (
                f"was given values with the strides {values.stride()} (channels_last? transposed?), and keeps its own, "
                f"{slot.spec.stride}: kernels may give other last bits than in torch"
            )
            cure = "Convert the model before infinity.initialize"
            warnings.warn(OtherNumbersWarning.of_parameter(slot.spec.fqn, what, cure=cure), stacklevel=3)
        if host_of(values) is not None:
            values = values.detach().clone()  # it looks at the same memory, in another order
        for view in unit.handed_out(slot):
            if isinstance(view, PagedView) or unit.is_bound:
                detach_view(view, view.clone())  # it goes on looking at the old weights
        with torch.no_grad():
            if unit.num_tokens:
                keep_saved(unit, slot, lambda: parameter.data.clone())
            parameter.data.copy_(values)
        self._assigned.forget(slot.spec.fqn)
        if is_plain and values.numel():
            self._assigned.add(slot.spec.fqn, values)

    def _check_shared(self, slot: Slot, values: torch.Tensor) -> None:
        """Raise if the parameter would have one memory with another one from now on.

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
            f"parameters '{fqn}' and '{other}' would have the same memory from now on, which an engine does not give them",
            cure="Copy the values: parameter.data.copy_(other.data). To tie two parameters, make them one before "
            "infinity.initialize (module.weight = other.weight)",
            fqn=fqn,
        )

    def _slot_behind(self, values: Any) -> Slot | None:
        """The parameter, of any engine, whose memory a tensor looks at."""
        host = host_of(values)
        if host is not None:
            return values.place.slot if isinstance(values, PagedView) else host.slot_of(values)
        unit = self._pager.residency.unit_behind(values) if values.layout is torch.strided and values.numel() else None
        return None if unit is None else unit.slot_at(int(values.storage_offset()) * values.itemsize)

    def before_write(self, parameter: nn.Parameter) -> None:
        self._pager.residency.remember(*self._parameter_map.locate(parameter))

    def copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        unit, slot = self._parameter_map.locate(parameter)
        with self._pager.lock.held(f"a copy of '{slot.spec.fqn}'"):
            self._pager.begin_outside_read()
            return self._pager.copy_of(unit, slot)

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        with contextlib.nullcontext() if in_backward() else self._pager.lock.held("reading a gradient"):
            return self._gradients.get(parameter)

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        with contextlib.nullcontext() if in_backward() else self._pager.lock.held("setting a gradient"):
            self._gradients.set(parameter, gradient)

    def slot_of(self, parameter: nn.Parameter) -> Slot:
        return self._parameter_map.locate(parameter)[1]


def _lies_alike(values: torch.Tensor, slot: Slot) -> bool:
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
            'The config says what is computed in: set "bf16" or "fp16" there, or none. If the model\'s own forward casts it, as '
            "routers of Switch Transformers and NLLB-MoE do, plain torch trains it in that dtype from then on, and the engine "
            f"cannot: build the model with router_dtype='{dtype}', which from_pretrained takes too"
        )
    elif tuple(values.shape) != slot.spec.shape:
        what = f"given the shape {tuple(values.shape)}, which is not its {slot.spec.shape}"
        cure = "Change the model before infinity.initialize, or after engine.close(restore_weights=True)"
    else:
        return
    raise ModelError(
        f"parameter '{slot.spec.fqn}' cannot be {what} while an engine holds it", cure=cure, fqn=slot.spec.fqn
    )
