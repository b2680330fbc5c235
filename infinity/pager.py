"""Residency: a unit that is touched is there; what comes next is fetched early; what is furthest away makes room.

Knows units, flat buffers and the trace; must not know optimizers, gradients or files. Everything here runs in the thread
that trains (or in autograd's, while that one waits inside backward): there is no lock.

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

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from infinity.errors import BudgetTooSmallError, ParameterNotResidentError
from infinity.flat_pool import FlatPool
from infinity.layout import Slot
from infinity.parameter import host_of, leaves
from infinity.telemetry.clock import StepClock
from infinity.trace import Trace, wanted
from infinity.unit import Arrival, Unit

if TYPE_CHECKING:
    from infinity.device import FlatBuffer


class WeightSource(Protocol):
    """Brings a unit's model weights into its flat buffer."""

    def fetch(self, unit: Unit, *, is_demand: bool) -> Arrival: ...


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


class Pager:
    """Keeps at most ``pool.capacity_bytes`` of flat buffers and decides which."""

    def __init__(self, units: Sequence[Unit], pool: FlatPool, source: WeightSource | None, clock: StepClock, *,
                 prefetches: bool, guess: Sequence[int], budget_key: str) -> None:
        """``source`` None: the weights never leave memory, and nothing is evicted."""
        self.units = list(units)
        self.pool = pool
        self.clock = clock
        self._source = source
        self._prefetches = prefetches
        self._budget_key = budget_key
        self.training_trace = Trace(guess)
        self.eval_trace = Trace(sorted(set(guess)))
        self.trace = self.training_trace
        self._by_address: dict[int, Unit] = {}
        self._depth = 0
        self._saving: torch.autograd.graph.saved_tensors_hooks | None = None
        self._sizes = [unit.num_bytes for unit in self.units]
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

    def forward_order(self) -> list[int]:
        """All units in the order in which the recorded forward needed them; units that it did not need come last."""
        trace = self.training_trace
        first = dict.fromkeys(trace.order[: trace.backward_start])
        return [*first, *(unit.index for unit in self.units if unit.index not in first)]

    @property
    def fills(self) -> bool:
        """Whether an update may wait until its unit is wanted, to leave the new weights in the unit's buffer."""
        return self._source is not None and self._prefetches

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
        self._make_resident(unit)
        if moved:
            self.pump()

    def _make_resident(self, unit: Unit) -> None:
        if unit.flat is None and not self._attach(unit, is_demand=True):
            self.await_update(unit)
            flat = self._allocate(unit, is_demand=True)
            if flat is None:
                raise self._no_room(unit)
            self.place(unit, flat, None)
            unit.arrival = self._fetch(unit, is_demand=True)
        self._await_arrival(unit)

    def prepare_update(self, unit: Unit) -> None:
        """An update of ``unit`` is about to be created: nobody computes with it, and no earlier update is under way."""
        unit.close()
        self.await_update(unit)

    def collect_all(self) -> None:
        """Take note of everything that has arrived."""
        for unit in self.units:
            self._collect(unit)

    def close(self) -> None:
        """Give all flat buffers back. Errors of what is still on its way are of no interest any more."""
        for unit in self.units:
            unit.close()
            unit.arrival = None
            unit.update = None
            if unit.flat is not None:
                flat, unit.flat = unit.flat, None
                self.pool.give_back(flat)
        self._by_address.clear()

    def _await_arrival(self, unit: Unit) -> None:
        arrival = unit.arrival
        if arrival is not None:
            if not arrival.done():
                arrival.promote()
                with self.clock.waiting("update" if arrival is unit.update else "read"):
                    arrival.wait()
            else:
                arrival.wait()
            unit.arrival = None
        self.await_update(unit)

    def await_update(self, unit: Unit) -> None:
        """Return when no update of ``unit`` is pending."""
        update = unit.update
        if update is not None:
            if not update.done():
                update.promote()
                with self.clock.waiting("update"):
                    update.wait()
            else:
                update.wait()
            unit.update = None

    def _attach(self, unit: Unit, *, is_demand: bool, keep: Collection[int] = ()) -> bool:
        """Let the pending update of ``unit`` fill a fresh flat buffer, which saves a read."""
        if unit.update is None or not unit.update.accepts_buffer:
            return False
        flat = self._allocate(unit, is_demand=is_demand, keep=keep)
        if flat is None:
            return False
        if not unit.update.attach(flat):  # it began a moment ago
            self.pool.give_back(flat)
            return False
        self.place(unit, flat, unit.update)
        return True

    def place(self, unit: Unit, flat: FlatBuffer, arrival: Arrival | None = None) -> None:
        """``flat`` is the unit's memory from now on; its weights come with ``arrival``, or are put there by the caller."""
        unit.flat = flat
        unit.arrival = arrival
        self._by_address[flat.address] = unit

    def _fetch(self, unit: Unit, *, is_demand: bool) -> Arrival:
        if self._source is None:
            raise RuntimeError(f"unit {unit.name} has no place to be fetched from")
        return self._source.fetch(unit, is_demand=is_demand)

    # ------------------------------------------------------------------------------------------------ room and prefetch

    def wanted(self) -> list[int]:
        """The units to hold now, next first."""
        if self._source is None or not self._prefetches:
            return []
        return wanted(tuple(self.trace.upcoming()), 0, self._sizes, self.pool.capacity_bytes)

    def pump(self) -> None:
        """Start fetching what is wanted, evicting what is not."""
        if self._source is None or not self._prefetches:
            return
        targets = self.wanted()
        for index in targets:
            unit = self.units[index]
            if unit.update is not None and unit.update.done():
                self._collect(unit)
            if unit.flat is not None:
                continue
            if unit.update is not None:
                # Its stored weights are about to change: nothing may be read before the update has written them.
                self._attach(unit, is_demand=False, keep=targets)
                continue
            flat = self._allocate(unit, is_demand=False, keep=targets)
            if flat is None:
                return
            self.place(unit, flat, None)
            unit.arrival = self._fetch(unit, is_demand=False)

    def _collect(self, unit: Unit) -> None:
        """Take note of what has arrived at ``unit``; raises what went wrong on the way."""
        if unit.arrival is not None and unit.arrival.done():
            unit.arrival.wait()
            unit.arrival = None
        if unit.update is not None and unit.update.done():
            unit.update.wait()
            unit.update = None

    def _allocate(self, unit: Unit, *, is_demand: bool, keep: Collection[int] = ()) -> FlatBuffer | None:
        while True:
            flat = self.pool.allocate(unit.num_bytes)
            if flat is not None:
                return flat
            victim = self._victim(unit, is_demand=is_demand, keep=keep)
            if victim is None:
                return None
            self.evict(victim)

    def _victim(self, wanting: Unit, *, is_demand: bool, keep: Collection[int]) -> Unit | None:
        """The unit that is needed last among those that may leave. A prefetch waits for nothing and takes nothing wanted."""
        rank = {index: place for place, index in enumerate(self.trace.upcoming())}
        best: Unit | None = None
        best_key = (-1, -1)
        for unit in self.units:
            if unit.flat is None or unit is wanting or unit.num_active or unit.index in keep:
                continue
            self._collect(unit)
            is_busy = unit.arrival is not None or unit.update is not None
            if is_busy and not is_demand:
                continue
            key = (0 if is_busy else 1, rank.get(unit.index, len(rank)))
            if key > best_key:
                unit.close()
                if is_busy or not unit.flat.has_views:
                    best, best_key = unit, key
        return best

    def evict(self, unit: Unit) -> None:
        """Page ``unit`` out. What is on its way into its buffer has to arrive first."""
        if unit.flat is None:
            return
        unit.close()
        self._await_arrival(unit)
        self._by_address.pop(unit.flat.address, None)
        self.pool.give_back(unit.flat)
        unit.flat = None

    def _no_room(self, unit: Unit) -> BudgetTooSmallError:
        held = [f"{u.name} ({u.num_bytes} bytes, {'in use' if u.num_active else 'views of it are still referenced'})"
                for u in self.units if u.flat is not None]
        return BudgetTooSmallError(
            self._budget_key, budget_bytes=self.pool.capacity_bytes, minimum_bytes=self.pool.used_bytes + unit.num_bytes,
            reason=f"This is the part of it for weights. Unit {unit.name} ({unit.num_bytes} bytes) is needed together with "
            + ("; ".join(held) or "nothing else"),
        )

    def close_strays(self) -> None:
        """Close the units that an operation opened and no module holds."""
        for unit in self.units:
            if unit.is_open and unit.num_active == 0:
                unit.close()

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

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
                parameters: list[nn.Parameter], locate: Callable[[nn.Parameter], tuple[Unit, Slot]]) -> Any:
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
            is_alias = any(isinstance(leaf, torch.Tensor) and host_of(leaf) is None and not leaf.is_sparse
                           and self._by_address.get(leaf.untyped_storage().data_ptr()) in units for leaf in leaves(result))
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
                    self._make_resident(unit)
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
