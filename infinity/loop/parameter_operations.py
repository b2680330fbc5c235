"""Operations on parameters that are paged out, and on views of them.

Knows what an operation does to its arguments; must not know why a unit comes or goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from infinity.errors import AccessError
from infinity.loop.pager import Pager
from infinity.paging.saved_tensors import are_forbidden
from infinity.threads.engine_lock import is_inside
from infinity.torch_internals.modes import has_memory, outside_modes
from infinity.torch_internals.names import in_backward, with_lazy_bits
from infinity.torch_internals.operations import (
    AS_ARRAY,
    EXPOSING,
    JOINING,
    REBINDING,
    Apart,
    leaves,
    may_write,
    name_of,
    replaced,
    writes_unseen,
)
from infinity.units.layout import Slot
from infinity.units.parameter import HeldTensor, PagedView, bind_view, host_of, unbind_view
from infinity.units.unit import Unit

_CURES = {
    "share_memory_": "The engine's weights come and go, so other processes cannot look at them. Give them a copy: "
    "copy.deepcopy(model).share_memory(); or engine.close(restore_weights=True) first, after which the model is an ordinary one",
    "moving to the meta device": "To have the model without values, build another one inside `with torch.device('meta'):`; to "
    "let go of the values of this one, engine.close(restore_weights=False)",
}
_Outlasting = Callable[[Unit, Slot, torch.Tensor], torch.Tensor]


class ParameterOperations:
    """Runs them while the units are open, each under the engine lock."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[HeldTensor],
        locate: Callable[[HeldTensor], tuple[Unit, Slot]],
        outlasting: _Outlasting,
    ) -> Any:
        """Run an operation on parameters, and views of some. See `ParameterHost.operate`.

        ``outlasting`` makes a view of a weight into one that may be kept when the unit is paged out.
        """
        places = {id(tensor): locate(tensor) for tensor in tensors}
        units = list(dict.fromkeys(unit for unit, _ in places.values()))
        if len(units) > 1:  # an operation over lists works unit by unit
            apart = Apart(
                function, args, kwargs, lambda row: frozenset(places[id(t)][0].index for t in row if id(t) in places)
            )
            if apart.is_several:
                return apart.run(lambda part, named: function(*part, **named))
        pager, name = self._pager, name_of(function)
        if len(units) > 1 and name in JOINING and not pager.residency.has_room(units):
            args, kwargs = (
                replaced(a, lambda leaf: leaf.clone() if id(leaf) in places else leaf) for a in (args, kwargs)
            )
            return function(*args, **kwargs)  # what it gives is a copy of all of them anyway
        fqn = places[id(tensors[0])][1].spec.fqn
        if function in REBINDING:
            raise AccessError.of_parameter(fqn, operation=name)
        if in_backward():
            pager.backwards.note()
            for unit in units:
                pager.backwards.collector.note_parts(unit, by_script=False)
        pager.lock.acquire(f"{name} of '{fqn}'")
        try:
            with contextlib.nullcontext() if is_inside() else pager.lock.joined():  # else autograd's thread
                if name in EXPOSING and not all(unit.num_active for unit in units):
                    raise AccessError.of_parameter(fqn, operation=name, cure=_CURES.get(name))
                if not pager.is_computing:
                    if name == "detach" and not isinstance(tensors[0], PagedView):
                        place = places[id(tensors[0])]
                        collected = pager.copies.collected(tensors[0], fqn, lambda: pager.copy_for_user(*place))
                        if collected is not None:
                            return collected
                    pager.begin_outside_read()
                    pager.residency.check_room(units)
                if pager.is_training_forward:
                    for unit, slot in (places[id(tensor)] for tensor in tensors if not isinstance(tensor, PagedView)):
                        pager.backwards.collector.note_call(unit, [slot])
                try:
                    with pager.held(units), self._saving():
                        result = self._run(function, args, kwargs, tensors, places)
                        if name in ("to", "empty_like") and isinstance(result, torch.Tensor) and result.is_meta:
                            # ``module.to("meta")`` would replace the parameter by one without values.
                            what = "moving to the meta device"
                            raise AccessError.of_parameter(fqn, operation=what, cure=_CURES[what])
                        return replaced(result, lambda leaf: self._outlasting(leaf, units, outlasting))
                finally:
                    self._end(units)
        finally:
            pager.lock.release()

    def _saving(self) -> contextlib.AbstractContextManager[Any]:
        """The hooks for saving, unless they are up."""
        pager = self._pager
        if not pager.is_computing:
            return pager.saving
        return contextlib.nullcontext() if pager.is_inside_modules else pager.saving.in_recomputation()

    @outside_modes
    def _end(self, units: Sequence[Unit]) -> None:
        self._pager.residency.close_unused(units)

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[HeldTensor],
        places: Mapping[int, tuple[Unit, Slot]],
    ) -> Any:
        """The operation itself, while the units are open."""
        views = list({id(tensor): tensor for tensor in tensors if isinstance(tensor, PagedView)}.values())
        try:
            self._begin(views, places.values() if may_write(function, kwargs) else ())
            if name_of(function) in AS_ARRAY and args:
                result = function(args[0].detach().clone().requires_grad_(args[0].requires_grad), *args[1:], **kwargs)
                result.flags.writeable = False  # what is written there would reach no weight
                return result
            if are_forbidden() and not may_write(function, kwargs):
                # What is saved is the weight itself, which is about to lose its memory: a view holds it.
                args, kwargs = (
                    replaced(tree, lambda leaf: _as_view(leaf) if id(leaf) in places else leaf)
                    for tree in (args, kwargs)
                )
            result = function(*args, **kwargs)
            if writes_unseen(function):
                for leaf in leaves(args[:1]):
                    if id(leaf) in places:
                        unit, slot = places[id(leaf)]
                        unit.note_written([slot.index])
            return result
        finally:
            for view in views:
                unbind_view(view)

    @outside_modes
    def _begin(self, views: Sequence[PagedView], written: Iterable[tuple[Unit, Slot]]) -> None:
        for unit, slot in written:
            self._pager.residency.remember(unit, slot)
        for view in views:
            place = view.place
            if place.unit.flat is None:
                raise RuntimeError(f"unit {place.unit.name} is not resident after a touch")
            base = place.unit.flat.tensor().view(place.dtype)
            bind_view(view, with_lazy_bits(base.as_strided(place.shape, place.stride, place.offset), place.bits))

    def _outlasting(self, value: Any, units: Sequence[Unit], outlasting: _Outlasting) -> Any:
        """``value``, a result of an operation, as it may be kept when the units are paged out."""
        if not self._looks_at(value, units):
            return value
        if value.requires_grad and self._pager.is_computing and torch.is_grad_enabled():
            return value  # what it is used for is saved as tokens
        unit = self._pager.residency.unit_behind(value)
        slot = None if unit is None else unit.slot_at(int(value.storage_offset()) * value.itemsize)
        if unit is None or slot is None or type(value) is not torch.Tensor:
            return value.clone()
        return outlasting(unit, slot, value)

    def _looks_at(self, value: Any, units: Sequence[Unit]) -> bool:
        """Whether ``value`` is a tensor over the memory of one of the units."""
        if not isinstance(value, torch.Tensor) or host_of(value) is not None or value.layout is not torch.strided:
            return False
        if value.is_meta or not has_memory(value) or not value.numel():
            return False
        return self._pager.residency.unit_behind(value) in units


def _as_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor.detach()
