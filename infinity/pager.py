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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.errors import ParameterNotResidentError
from infinity.flat_pool import FlatPool
from infinity.layout import Slot
from infinity.parameter import host_of, leaves
from infinity.residency import Residency, WeightSource
from infinity.telemetry.clock import StepClock
from infinity.unit import Unit


class _SavedView:
    """Stands for a view of a unit's weights in autograd's graph."""

    __slots__ = ("dtype", "offset", "shape", "stride", "unit")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        unit.num_tokens += 1

    def __del__(self) -> None:
        self.unit.num_tokens -= 1


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
        budget_key: str,
    ) -> None:
        """See `Residency`."""
        super().__init__(units, pool, source, clock, prefetches=prefetches, guess=guess, budget_key=budget_key)
        self._depth = 0
        self._saving: torch.autograd.graph.saved_tensors_hooks | None = None
        self.copies_detached = False
        """Set while ``state_dict`` collects: ``detach`` of a paged-out parameter gives a copy of its values."""
        self.check: Callable[[], None] = lambda: None
        """Called before anything begins: raises what went wrong in the background, or that the engine is closed."""
        self.on_forward: Callable[[], None] = lambda: None
        """Called when a forward phase begins."""
        self.on_settled_read: Callable[[], None] = lambda: None
        """Called before weights are read outside forward and backward: raises if they are between two steps."""

    # ------------------------------------------------------------------------------------------------ forward phases

    @property
    def is_computing(self) -> bool:
        """Whether the model is inside a forward or a backward."""
        return self._depth > 0 or in_backward()

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
            self.check()
            self.on_forward()
            self.close_strays()
            if self.trace is self.training_trace and self.trace.has_backward:
                self.trace.commit()
            self.trace = self.training_trace if torch.is_grad_enabled() else self.eval_trace
            self.trace.begin()
            self._saving = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
            self._saving.__enter__()
        self._depth += 1

    def end_forward(self) -> None:
        """The counterpart of `begin_forward`, also after an exception."""
        self._depth -= 1
        if self._depth == 0 and self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None
            self.close_strays()
            if self.trace is self.eval_trace:
                self.trace.commit()

    def end_backward(self, *, is_complete: bool, fetches: bool) -> None:
        """Backward has ended.

        Args:
            is_complete: it ended without an exception, so the record may be replayed.
            fetches: begin to fetch what the next forward needs first.
        """
        self.close_strays()
        if is_complete:
            self.training_trace.commit()
            if fetches:
                self.pump()

    def abandon_forward(self) -> None:
        """Forget modules that an exception left open, so that the next forward begins afresh."""
        self._depth = 0
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None
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
            unit.close()
            if self.is_computing:
                self.pump()

    def touch(self, unit: Unit) -> None:
        """``unit`` is needed now: it is resident when this returns, and what the trace says comes next is on its way."""
        if in_backward():
            self.training_trace.begin_backward()
        moved = self.trace.touch(unit.index)
        self.make_resident(unit)
        if moved:
            self.pump()

    # ------------------------------------------------------------------------------------------------ room and prefetch

    # ------------------------------------------------------------------------------------------------- saved tensors

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves ``tensor``: a view of a unit becomes a token; anything else is kept, with its version."""
        unit = self._by_address.get(tensor.untyped_storage().data_ptr())
        if unit is not None and unit.flat is not None:
            return _SavedView(unit, tensor)
        return tensor, tensor._version

    def unpack(self, saved: Any) -> torch.Tensor:
        """Autograd needs what `pack` got."""
        if isinstance(saved, _SavedView):
            unit = saved.unit
            self.touch(unit)
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
        if self.is_computing:
            with self.held(units):
                return function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        fqn = locate(parameters[0])[1].spec.fqn
        if self.copies_detached and name == "detach":
            return self.copy_of(*locate(parameters[0]))
        self.begin_outside_read()
        versions = [parameter._version for parameter in parameters]
        with self.held(units), torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            result = function(*args, **kwargs)
            is_modified = any(p._version != v for p, v in zip(parameters, versions, strict=True))
            is_alias = any(
                isinstance(leaf, torch.Tensor)
                and host_of(leaf) is None
                and not leaf.is_sparse
                and self._by_address.get(leaf.untyped_storage().data_ptr()) in units
                for leaf in leaves(result)
            )
        for unit in units:
            unit.close()
        if is_modified:
            # The write went into a buffer that is about to be forgotten; the stored weights are untouched.
            for unit in units:
                if self._source is not None and unit.flat is not None and not unit.flat.has_views:
                    self.evict(unit)
        if is_modified or is_alias:
            del result
            raise ParameterNotResidentError(fqn, operation=name)
        return result

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

    def copy_of(self, unit: Unit, slot: Slot) -> torch.Tensor:
        """A copy of one parameter's model weight, on the compute device."""
        was_open = unit.is_open
        with self.held([unit]):
            if unit.flat is None:
                raise RuntimeError(f"unit {unit.name} is not resident after a touch")
            copy = unit.view(unit.flat.tensor(), slot).clone()
        if not was_open and unit.num_active == 0:
            unit.close()
        return copy
