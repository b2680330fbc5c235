"""Page faults: a unit that is touched is there, whichever way the code came.

Knows phases, parameters and saved tensors; must not know optimizers, gradients or files.

[Note: page faults]
Three events touch a unit, and each makes it resident, whichever way the code came:
  * a module that owns some of its parameters begins its forward (`enter` and `leave`, called by the hooks);
  * an operation gets one of its parameters while that is paged out (`operate`, from ``PagedParameter``);
  * backward asks for a tensor that it had saved from the unit (`unpack`).
In forward, autograd saves views of weights (``weight.t()`` for every linear). `pack` turns each into a token: unit,
offset, shape and strides. So the graph holds no weight memory, and backward faults the unit in exactly when it needs it.
The tokens die with the graph nodes that own them; a unit without tokens is needed by no backward any more, and only
then may its weights change.
Under non-reentrant activation checkpointing the recomputation saves plain views, because torch's own pack hook stands
above ours. Those views keep the flat buffer alive (see ``FlatBuffer.has_views``), and it is not evicted under them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.errors import ParameterNotResidentError, UnsupportedModelError
from infinity.flat_pool import FlatPool
from infinity.layout import Slot
from infinity.parameter import host_of, leaves
from infinity.residency import Residency, WeightSource
from infinity.saving import SavingHooks
from infinity.telemetry.clock import StepClock
from infinity.unit import Unit

_DATA: Any = torch.Tensor.data


class _SavedView:
    """Stands for a view of a unit's weights in autograd's graph."""

    __slots__ = ("__weakref__", "dtype", "offset", "shape", "stride", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.version = unit.version
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        unit.note_token(self)


_REBINDING: frozenset[Any] = frozenset(
    {_DATA.__set__, torch.Tensor.set_, torch.Tensor.resize_, torch.Tensor.resize_as_}
)
"""Operations that give a tensor other memory, which the engine would not see."""
_EXPOSING: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name)
    for name in ("data_ptr", "untyped_storage", "storage", "numpy", "__array__", "__dlpack__", "share_memory_")
)
"""Operations whose results look at the memory without being tensors."""


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's backward."""
    return bool(torch._C._current_graph_task_id() != -1)


class Pager(Residency):
    """`Residency` with a model in front of it: phases, page faults and saved tensors."""

    def __init__(
        self,
        units: Sequence[Unit],
        pool: FlatPool,
        source: WeightSource | None,
        clock: StepClock,
        *,
        prefetches: bool,
        guess: Sequence[int],
        budget: tuple[str, int],
    ) -> None:
        """See `Residency`."""
        super().__init__(units, pool, source, clock, prefetches=prefetches, guess=guess, budget=budget)
        self._depth = 0
        self.saving = SavingHooks(self.pack, self.unpack)
        """The hooks that turn what autograd saves into tokens."""
        self.copies_detached = False
        """Set while ``state_dict`` collects: ``detach`` of a paged-out parameter gives a copy of its values."""
        self.check: Callable[[], None] = lambda: None
        """Called before anything begins: raises what went wrong in the background, or that the engine is closed."""
        self.on_forward: Callable[[], None] = lambda: None
        """Called when a forward phase begins."""
        self.on_settled_read: Callable[[], None] = lambda: None
        self.on_backward_use: Callable[[Unit, bool], None] = lambda unit, is_saved: None
        """Called when backward uses a unit's weights, and whether forward had saved them for that."""
        self.on_pause: Callable[[], None] = lambda: None
        """Called between two pieces of a step: another unit is needed or updated, or another micro-batch has its turn."""
        self.on_use: Callable[[Unit, Sequence[Slot]], None] = lambda unit, slots: None
        """Called when an operation in a training forward uses parameters, other than through their own module."""
        self.on_backward_end: Callable[[], None] = lambda: None
        """Called when a backward ends that `note_backward` has noticed. Must not raise."""
        self._open_backward = False
        """Called before weights are read outside forward and backward: raises if they are between two steps."""

    # ------------------------------------------------------------------------------------------------ forward phases

    @property
    def is_computing(self) -> bool:
        """Whether the model is inside a forward or a backward."""
        return self._depth > 0 or in_backward()

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward has begun and not ended, and no backward runs."""
        return self._depth > 0 and not in_backward()

    @property
    def is_training_forward(self) -> bool:
        """Whether the model is inside a forward that will have a backward (and not inside a recomputation)."""
        return self._depth > 0 and self.trace is self.training_trace and not in_backward()

    def begin_outside_read(self) -> None:
        """Weights are about to be read outside forward and backward: raises if that cannot be."""
        self.check()
        self.on_settled_read()

    def begin_state_dict(self) -> None:
        """``state_dict()`` collects from now on: `copies_detached` until it has ended."""
        self.begin_outside_read()
        self.copies_detached = True

    def begin_forward(self) -> None:
        """A module of the model begins its forward; the outermost one begins a forward phase."""
        if self._depth == 0 and not in_backward():
            self._open_backward = False
            self.check()
            self.on_forward()
            self.close_strays()
            self.saving.clear_top()
            if self.trace is self.training_trace and self.trace.has_backward:
                self.trace.commit()
            self.trace = self.training_trace if torch.is_grad_enabled() else self.eval_trace
            self.trace.begin()
            self.saving.push()
            self.clock.begin_compute("forward")
        elif self._depth == 0:
            self.saving.push_in_recomputation()
        self._depth += 1

    def end_forward(self) -> None:
        """The counterpart of `begin_forward`, also after an exception."""
        self._depth -= 1
        if self._depth == 0:
            self.saving.pop()
            if in_backward():
                return
            self.clock.end_compute()
            self.close_strays()
            if self.trace is self.eval_trace:
                self.trace.commit()

    def note_backward(self) -> None:
        """Something happens inside backward: if it is the first thing, `on_backward_end` will be called when it ends.

        The end of the innermost running backward is meant; for a loss whose own graph uses weights that is the outermost.
        """
        self.training_trace.begin_backward()
        self.clock.begin_compute("backward")
        if not self._open_backward:
            self._open_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        if self._open_backward:
            self._open_backward = False
            self.on_backward_end()

    def end_backward(self, *, is_complete: bool, fetches: bool) -> None:
        """Backward has ended.

        Args:
            is_complete: it ended without an exception, so the record may be replayed.
            fetches: begin to fetch what the next forward needs first.
        """
        self.clock.end_compute()
        self.close_strays()
        if is_complete:
            self.training_trace.commit()
            if fetches:
                self.pump()

    def abandon_forward(self) -> None:
        """Forget modules that an exception left open, so that the next forward begins afresh."""
        self._depth = 0
        self.clock.end_compute()
        self.saving.clear()
        for unit in self.units:
            unit.num_active = 0
        self.close_strays()

    # ------------------------------------------------------------------------------------------------------- touching

    def enter(self, unit: Unit) -> None:
        """A module that uses ``unit`` begins: open until the matching `leave`."""
        self.touch(unit)
        unit.num_active += 1
        unit.open()

    def leave(self, unit: Unit) -> None:
        """The counterpart of `enter`."""
        unit.num_active = max(unit.num_active - 1, 0)
        if unit.num_active == 0:
            slot = unit.changed()
            unit.close()
            if slot is not None:
                self._forget_changes(unit)
                raise UnsupportedModelError(
                    f"the model's forward writes to its parameter '{slot.spec.fqn}', and the engine cannot see by how much",
                    cure="Change weights inside `with infinity.GatheredParameters(...)` between steps instead",
                    fqn=slot.spec.fqn,
                )
            if self.is_computing:
                self.pump()

    def _forget_changes(self, unit: Unit) -> None:
        """What was written into the unit's buffer never happened, if the weights are stored elsewhere."""
        if unit.flat is not None and not unit.flat.has_views and not unit.num_active:
            self.evict(unit)

    def touch(self, unit: Unit, *, is_saved: bool = False) -> None:
        """``unit`` is needed now: it is resident when this returns, and what the trace says comes next is on its way."""
        if in_backward():
            self.note_backward()
            self.on_backward_use(unit, is_saved)
        unit.num_active += 1  # whatever the trace says, it is needed now
        try:
            moved = self.trace.touch(unit.index)
            if moved:
                self.clock.pause_compute()
            self.make_resident(unit)
            if moved:
                self.pump()
                self.on_pause()
                self.clock.resume_compute(unit.name)
        finally:
            unit.num_active -= 1

    # ------------------------------------------------------------------------------------------------- saved tensors

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves ``tensor``: a view of a unit becomes a token; anything else is kept, with its version."""
        if tensor.layout is not torch.strided:
            return tensor, tensor._version
        unit = self._by_address.get(tensor.untyped_storage().data_ptr())
        if unit is not None and unit.flat is not None:
            return _SavedView(unit, tensor)
        # Detached: an operation's saved result would otherwise hold the operation that holds it, until backward runs.
        return tensor.detach(), tensor._version

    def unpack(self, saved: Any) -> torch.Tensor:
        """Autograd needs what `pack` got."""
        if isinstance(saved, _SavedView):
            unit = saved.unit
            if unit.version != saved.version:
                raise RuntimeError(
                    f"backward needs the weights of unit {unit.name} as they were in forward, but they have been changed by "
                    "an optimizer step since. Run forward again"
                )
            self.touch(unit, is_saved=True)
            if unit.flat is None:
                raise RuntimeError(f"unit {unit.name} is not resident after a touch")
            return unit.flat.tensor().view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)
        tensor, version = saved
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
                f"shape {list(tensor.shape)} is at version {tensor._version}, expected version {version}"
            )
        result: torch.Tensor = tensor
        return result

    # ------------------------------------------------------------------------------------------- paged-out parameters

    def operate(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: list[nn.Parameter],
        locate: Callable[[nn.Parameter], tuple[Unit, Slot]],
    ) -> Any:
        """Run an operation on parameters that are paged out. See `ParameterHost.operate`."""
        units = list(dict.fromkeys(locate(parameter)[0] for parameter in parameters))
        name = getattr(function, "__name__", str(function))
        fqn = locate(parameters[0])[1].spec.fqn
        if function in _REBINDING or (function in _EXPOSING and not self.is_computing):
            raise ParameterNotResidentError(fqn, operation="assigning its data" if name == "__set__" else name)
        if self.is_computing:
            if self.is_training_forward:
                for parameter in parameters:
                    unit, slot = locate(parameter)
                    self.on_use(unit, [slot])
            saving = contextlib.nullcontext() if self._depth else self.saving.in_recomputation()
            with self.held(units), saving:
                return function(*args, **kwargs)
        if self.copies_detached and name == "detach":
            return self.copy_of(*locate(parameters[0]))
        self.begin_outside_read()
        versions = [parameter._version for parameter in parameters]
        kept = [(unit, unit.flat.tensor().clone()) for unit in units if unit.stays_resident and unit.flat is not None]
        is_modified = is_alias = False
        try:
            with self.held(units), self.saving:
                try:
                    result = function(*args, **kwargs)
                finally:
                    is_modified = any(p._version != v for p, v in zip(parameters, versions, strict=True))
                    if is_modified:
                        for unit, before in kept:
                            if unit.flat is not None:
                                unit.flat.tensor().copy_(before)
                is_alias = any(self._looks_at(leaf, units) for leaf in leaves(result))
        finally:
            for unit in units:
                unit.close()
            if is_modified:
                for unit in units:
                    self._forget_changes(unit)
        is_moving_away = any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves(result))
        if is_modified or is_alias or is_moving_away:
            del result
            raise ParameterNotResidentError(fqn, operation=name)
        return result

    def _looks_at(self, value: Any, units: Sequence[Unit]) -> bool:
        """Whether ``value`` is a tensor over the memory of one of the units."""
        if not isinstance(value, torch.Tensor) or host_of(value) is not None or value.layout is not torch.strided:
            return False
        return self._by_address.get(value.untyped_storage().data_ptr()) in units

    @contextmanager
    def held(self, units: Sequence[Unit]) -> Iterator[None]:
        """The units are open and stay so inside the ``with`` block; in a forward or backward they stay open after it."""
        entered: list[Unit] = []
        try:
            for unit in units:
                if self.is_computing:
                    self.touch(unit)
                else:
                    self.make_resident(unit)
                unit.num_active += 1
                entered.append(unit)
            for unit in entered:
                unit.open()
            yield
        finally:
            for unit in entered:
                unit.num_active = max(unit.num_active - 1, 0)

    @contextmanager
    def opened(self, unit: Unit) -> Iterator[None]:
        """The unit's weights lie in its flat buffer inside the ``with`` block."""
        was_open = unit.is_open
        with self.held([unit]):
            yield
        if not was_open and unit.num_active == 0:
            unit.close()

    def copy_of(self, unit: Unit, slot: Slot) -> torch.Tensor:
        """A copy of one parameter's model weight, on the compute device."""
        with self.opened(unit):
            return unit.weight(slot).clone()
