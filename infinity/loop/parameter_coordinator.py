"""Page faults: a unit that is used is in memory, whichever way the code reaches it.

[Note: page faults]
Three events touch a unit, and each makes it resident:
  * a module that owns some of its parameters begins its forward (`enter` and `leave`, called by the hooks);
  * an operation gets one of its parameters while that is paged out (``infinity.torch_internals.operations``);
  * backward asks for a tensor that it had saved from the unit (`unpack`).
In forward, autograd saves views of weights (``weight.t()`` for every linear). `pack` turns each into a packed saved tensor:
unit, offset, shape and strides. So the graph holds no weight memory, and backward faults the unit in exactly when it needs it.
Packed saved tensors die with the graph nodes that own them. A unit without any is needed by no backward, and only then
may its weights change. Under non-reentrant checkpointing the recomputation saves plain views, because torch's pack hook
is above ours. Such views keep the flat buffer alive (see ``FlatBuffer.has_views``), and it is not evicted under them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch

from infinity.activations.saved_activations import SavedActivations
from infinity.device.host_memory import HeapTrimmer
from infinity.distributed.dtensors import is_dtensor, local_part
from infinity.errors import EngineBusyError
from infinity.loop.backward import Backwards
from infinity.loop.phase import PhaseGuard
from infinity.loop.vertical_forward import VerticalForward
from infinity.metrics.reporter import Reporter
from infinity.paging.parameter_cache import ParameterCache
from infinity.paging.parameter_map import ParameterMap
from infinity.paging.saved_tensors import (
    HOOKS_OF_AN_ENGINE,
    PackedByAnother,
    PackedSavedTensor,
    SavingHooks,
    hooks_are_forbidden,
    in_use,
    modified,
)
from infinity.threads.engine_lock import EngineLock, refuse_reentry
from infinity.tiers.user_copies import UserCopies
from infinity.torch_internals.names import (
    backward_number,
    call_after_backward,
    has_memory,
    in_backward,
    is_inference,
    num_dispatch_modes,
    num_function_modes,
    outside_modes,
    transform,
    untraced,
)
from infinity.units.layout import Slot
from infinity.units.parameter import PagedParameter, PagedView, ResidentParameter
from infinity.units.unit import Unit
from infinity.updates.step_groups import StepGroups

# `attrgetter` and `map` below are C code: `leave` runs for each module.
_num_active = operator.attrgetter("num_active")


@dataclass(eq=False)
class Preconditions:
    """Checks that run before a model is used."""

    _checks: Sequence[Callable[[], None]]
    """Checks of the parts, in order. Each raises an error from the background, or refuses all calls (after `close`)."""
    _guard: PhaseGuard
    _backwards: Backwards
    _groups: StepGroups
    _reporter: Reporter

    def check_usable(self) -> None:
        """At the beginning of each call."""
        for check in self._checks:
            check()

    def check_consistent(self) -> None:
        """Before weights are read or changed: they must be of one step, and of one training."""
        self.check_usable()
        self._guard.check_consistent()

    def begin_forward(self) -> None:
        """At the beginning of each forward of the model."""
        self.check_usable()
        self._reporter.begin()
        self._guard.check_loaded()
        self._guard.check_consistent()
        # Gradients of a `loss.backward()` that is over, before this forward resets what is expected.
        self._backwards.deliver_pending()
        if torch.is_grad_enabled() and self._groups.before_forward():
            # Which gradients complete a unit is not known any more: parameters were frozen or thawed.
            self._backwards.collector.forget_history()


@dataclass(eq=False)
class ParameterCoordinator:
    """Handles page faults and saved tensors: between the hooks and the `ParameterCache`."""

    parameter_map: ParameterMap
    parameter_cache: ParameterCache
    """Decides which units are in memory."""
    lock: EngineLock
    """Held by each call that uses the model or its weights. It guards all fields here."""
    backwards: Backwards
    """Passes gradients to their updates."""
    preconditions: Preconditions
    """Run before the model is used."""
    copies: UserCopies
    """Makes the copies that ``state_dict`` returns."""
    _trimmer: HeapTrimmer | None = None
    """Returns heap memory to the system between two units; None: not needed."""
    _activations: SavedActivations | None = None
    """Keeps other saved tensors on the host or on NVMe; None: they stay where they are."""
    num_gathered = 0
    """How many ``with GatheredParameters`` blocks are open."""
    _depth = 0
    """Nesting depth of modules' forwards."""
    _saves_in_backward = False
    """Whether `saving` was pushed for a backward with ``create_graph=True``."""
    _num_locks_of_forward = 0
    """How often forwards hold the lock: a recomputation inside a backward acquires it again."""
    _handovers_at_state_dict = 0
    """`EngineLock.num_handovers` when the last state dict was begun."""
    _vertical: VerticalForward | None = None
    """The present vertical step, from `begin_vertical` until `end_vertical`; None: the step is an ordinary one."""

    def __post_init__(self) -> None:
        self.clock = self.parameter_cache.clock
        self.saving = SavingHooks(self.pack, self.unpack, self.packed_for)
        """Saved-tensor hooks that pack views of weights."""
        # Another pack function, by which `SavingHooks` tells the two apart on torch's stack of hooks.
        self.saving_while_gathered = SavingHooks(lambda tensor: self.pack(tensor), self.unpack, self.packed_for)
        """The same, for graphs made inside ``GatheredParameters``. A forward inside must not pop them."""
        self._unit_at = self.parameter_cache.unit_at

    def close(self) -> None:
        """Release all memory. A later backward raises."""
        for hooks in (self.saving, self.saving_while_gathered):
            hooks.close()
        if self._activations is not None:
            self._activations.close()
        self.parameter_cache.close()

    # ------------------------------------------------------------------------------------------------ forward phases

    @property
    def is_computing(self) -> bool:
        """Whether the model is inside a forward or a backward."""
        return self._depth > 0 or backward_number() != -1

    @property
    def is_inside_modules(self) -> bool:
        """Whether modules of the model are inside their forward, in a recomputation as well."""
        return self._depth > 0

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the calling thread has begun and not ended, and no backward runs.

        False in a vertical step, where calls of the model by several micro-batches overlap.
        """
        return self._depth > 0 and not in_backward() and self.lock.is_mine and self._vertical is None

    @property
    def is_training_forward(self) -> bool:
        """Whether the model is inside a forward that will have a backward (and not inside a recomputation)."""
        cache = self.parameter_cache
        return self._depth > 0 and cache.schedule is cache.training_schedule and backward_number() == -1

    def begin_outside_read(self) -> None:
        """Before weights are read outside forward and backward. Raises if they may not be read now."""
        if self.lock.is_nested:
            refuse_reentry("reading weights")
        self.preconditions.check_consistent()

    def begin_state_dict(self) -> None:
        """Pre-hook of ``state_dict()``, which must see weights of one step: see `end_state_dict`."""
        with self.lock.held("state_dict()"):  # not until its end, which an exception would keep it from
            self._handovers_at_state_dict = self.lock.num_handovers

    def end_state_dict(self) -> None:
        """Hook behind ``state_dict()``: raises if another thread has used the engine since, and may have made a
        step."""
        with self.lock.held("state_dict()"):
            if self.lock.num_handovers != self._handovers_at_state_dict:
                raise EngineBusyError(
                    "state_dict()",
                    "another thread has used the engine since it began, so its weights may be of two steps",
                    cure="Call it where no other thread uses the engine meanwhile",
                )

    def begin_forward(self, *, is_root: bool = True) -> bool:
        """A module of the model begins its forward; the outermost one begins a forward phase.

        Args:
            is_root: it is the model itself.

        Returns:
            Whether none was inside its forward before.
        """
        if self._depth == 0:
            # Reentry by a signal handler. A checkpoint in backward calls modules too, but never the model itself.
            if self.lock.owner == get_ident() and (is_root or not in_backward()):
                refuse_reentry("a forward")
            self.lock.acquire("forward")
            self._num_locks_of_forward += 1
        elif self.lock.owner != get_ident():
            self.lock.check("forward")
        try:
            if self._depth == 0 and not in_backward():
                # A backward that an exception cut off ends here at the latest.
                self.backwards.close()
                self.preconditions.begin_forward()
                self.copies.warn_of_written()
                self.parameter_cache.unbind_unused()
                # Hooks that an interrupted forward left up: see [Note: interrupted hooks] in
                # infinity.paging.saved_tensors.
                self.saving.clear_top()
                self.parameter_cache.begin_micro_batch(is_training=torch.is_grad_enabled())
                self.saving.push()
                self.clock.begin_compute("forward")
            elif self._depth == 0:
                # Depth 0 in backward: a checkpoint computes this module once more.
                self.saving.push()
            self._depth += 1
        except BaseException:
            if self._depth == 0:
                self._unlock_forward()
            raise
        return self._depth == 1

    def end_forward(self) -> None:
        """A module of the model ends its forward, also by an exception."""
        self._depth -= 1
        if self._depth == 0:
            try:
                self.saving.pop()
                if not in_backward():
                    self.clock.end_compute()
                    self.parameter_cache.unbind_unused()
                    # An evaluation ends with its forward. A training micro-batch ends with its backward: `Backwards.end`.
                    if self.parameter_cache.schedule is self.parameter_cache.eval_schedule:
                        self.parameter_cache.schedule.commit()
            finally:
                self._unlock_forward()

    def _unlock_forward(self) -> None:
        if self._num_locks_of_forward:
            self._num_locks_of_forward -= 1
            self.lock.release()

    def abandon_forward(self) -> None:
        """Forget forwards that an exception cut off, and close their units."""
        if self._vertical is not None:
            for unit in self.parameter_cache.units:
                unit.forget_uses()
                unit.unbind()
                self._vertical.undo_writes(unit)
        self.end_vertical()
        self._depth = 0
        self.clock.end_compute()
        self.saving.abandon()
        for unit in self.parameter_cache.units:
            unit.forget_uses(keeps_gathered=True)
        self.parameter_cache.unbind_unused()
        self.backwards.close()
        while self._num_locks_of_forward:
            self._unlock_forward()

    def break_off(self) -> None:
        """A call that holds the lock, on another thread, was cut off: free the lock."""
        self._num_locks_of_forward = self.num_gathered = 0
        self.backwards.break_off()
        self.lock.break_off()

    # --------------------------------------------------------------------------------------------------- shared forwards

    @property
    def is_shared(self) -> bool:
        """Whether the present step is a vertical one."""
        return self._vertical is not None

    def begin_vertical(self, vertical: VerticalForward) -> None:
        """A vertical step begins with the forward of all micro-batches. `end_forward` ends that, `end_vertical` the
        step."""
        # Depth stays above 0 until `end_forward`: each micro-batch's call of the model then counts as nested.
        self.begin_forward(is_root=False)  # no module's
        for unit in self.parameter_cache.units:  # what was written before the step stays
            self.parameter_cache.store_changes(unit)
        self.parameter_cache.write_by(vertical)  # until `end_vertical`, writes to weights are undone and refused
        self._vertical = vertical

    def end_vertical(self) -> None:
        """The vertical step is over, or was cut off."""
        self._vertical = None
        self.parameter_cache.write_by(None)
        self.parameter_cache.due.clear()

    @contextlib.contextmanager
    def as_if_inside(self, is_inside: bool) -> Iterator[None]:
        """Inside the ``with`` block, `is_inside_modules` is ``is_inside``."""
        depth, self._depth = self._depth, int(is_inside)
        try:
            yield
        finally:
            self._depth = depth

    # ------------------------------------------------------------------------------------------------------- touching

    def enter(self, *units: Unit) -> None:
        """A module that uses these units begins its forward: they are bound until the matching `leave`."""
        if not units or (self._vertical is not None and all(map(self._vertical.defers, units))):
            return
        with self.parameter_cache.lock:
            for unit in units:
                unit.begin_use()
            try:
                self.touch(*units)
                for unit in units:
                    unit.bind()
            except BaseException:
                for unit in units:
                    unit.end_use()
                raise

    def leave(self, *units: Unit) -> None:
        """The module that entered these units ends its forward."""
        if self._vertical is not None and all(map(self._vertical.defers, units)):
            return
        for unit in units:
            unit.end_use()
        # Without hooks for saved tensors (torch.func), the graph holds the weights themselves, so units stay open.
        if not all(map(_num_active, units)) and not hooks_are_forbidden():
            self.parameter_cache.unbind_unused(units)
            if self.is_computing:
                self.parameter_cache.pump()

    @contextlib.contextmanager
    def inside_module(self, units: Sequence[Unit]) -> Iterator[None]:
        """Do inside the ``with`` block what a module's hooks do around its forward. ``units``: those that it enters."""
        self._begin_module(units)
        try:
            yield
        finally:
            self._end_module(units)

    # Apart from the block, which runs code of the model: that is traced, and its modes see it.

    @untraced
    @outside_modes
    def _begin_module(self, units: Sequence[Unit]) -> None:
        self.begin_forward(is_root=False)
        try:
            if self.is_training_forward:
                for unit in units:
                    self.backwards.collector.on_module_call(unit, unit.layout.slots)
            self.enter(*units)
        except BaseException:
            self.end_forward()
            raise

    @untraced
    @outside_modes
    def _end_module(self, units: Sequence[Unit]) -> None:
        try:
            self.leave(*units)
        finally:
            self.end_forward()

    def touch(self, *units: Unit, is_saved: bool = False) -> None:
        """Page fault: the units are resident when this returns, and the next ones of the prefetch schedule are being
        read.

        Call it under the parameter cache's lock, after `Unit.begin_use`: otherwise the units might make room for the
        next ones.
        """
        parameter_cache, moved, is_backward = self.parameter_cache, False, backward_number() != -1
        if is_backward:
            self.backwards.on_activity()
        for unit in units:
            if (self._vertical is not None and self._vertical.on_touch(unit)) or is_backward:
                self.backwards.on_weight_use(unit, is_saved=is_saved)
            # Only the first touch in a row counts: while one unit is used, nothing else becomes wanted.
            if parameter_cache.schedule.touch(unit.index) and not moved:
                moved = True
                self.clock.pause_compute()
            parameter_cache.make_resident(unit)
        if moved:
            parameter_cache.pump()
            self.pause()
            self.clock.resume_compute(units[-1].name)

    def route(self, group: int, units: Sequence[int]) -> None:
        """A router has chosen these experts of a layer: start to read their units."""
        with self.parameter_cache.lock:
            self.parameter_cache.schedule.route(group, units)
            self.parameter_cache.pump()

    def pause(self) -> None:
        """Between two units or micro-batches: return heap memory to the system."""
        if self._trimmer is not None:
            self._trimmer.trim()

    # ------------------------------------------------------------------------------------------------- saved tensors

    @untraced
    def pack(self, tensor: torch.Tensor, *, is_outside: bool = False) -> Any:
        """Pack hook: a view of a unit becomes a packed saved tensor. Other tensors are kept with their version.

        ``is_outside``: no mode of torch is active. This and `unpack` run for each saved tensor of each step. So they avoid
        calls of Python, and use `outside_modes` only if a mode is active.
        """
        if not is_outside and (
            num_dispatch_modes() or num_function_modes() or transform() is not None or is_inference()
        ):
            return outside_modes(self.pack)(tensor, is_outside=True)
        packed: PackedSavedTensor | PackedByAnother | None = None
        try:
            if (kind := type(tensor)) is torch.Tensor or kind is ResidentParameter:
                # All views of a flat buffer share its storage, whose address is the key. An error if there is none.
                unit = self._unit_at.get(tensor.untyped_storage().data_ptr())
                if unit is not None and unit.flat is not None:
                    return PackedSavedTensor(unit, tensor)
            elif tensor.layout is not torch.strided or not has_memory(tensor):
                return tensor, tensor._version
            elif is_dtensor(tensor):
                local, made_of = local_part(tensor)
                return PackedByAnother(self.pack(local), lambda packed: made_of(self.unpack(packed)))
            else:
                packed = self._packed(tensor)
            # Each engine has two sets of hooks. More means that another engine is open, whose weight this may be.
            if packed is None and len(in_use) > HOOKS_OF_AN_ENGINE:
                packed = self.saving.packed_by_another(tensor)
        except RuntimeError:  # sparse tensors, torch.func's wrappers, and forward mode's zeros have no memory
            return tensor, tensor._version
        if packed is not None:
            return packed
        if self._activations is not None and self._vertical is None:  # a shared step keeps what goes between its units
            elsewhere = self._activations.pack(tensor)
            if elsewhere is not None:
                return elsewhere
        # Detached: an operation's saved result would otherwise hold the operation that holds it, until backward runs.
        return tensor.detach() if tensor.requires_grad else tensor, tensor._version

    @untraced
    @outside_modes
    def packed_for(self, tensor: torch.Tensor) -> PackedSavedTensor | None:
        """The packed saved tensor for a view of a unit of this engine; None for anything else."""
        if tensor.layout is not torch.strided or not has_memory(tensor):
            return None
        with contextlib.suppress(RuntimeError):
            return self._packed(tensor)
        return None

    def _packed(self, tensor: torch.Tensor) -> PackedSavedTensor | None:
        if isinstance(tensor, PagedParameter):  # what a torch.autograd.Function saves that was given the weight itself
            place = self.parameter_map.places.get(id(tensor))
            return None if place is None else PackedSavedTensor(place[0], tensor, place[1])
        if isinstance(tensor, PagedView) and tensor.place.unit in self.parameter_cache.units:  # or a view of the weight
            return PackedSavedTensor(tensor.place.unit, tensor, place=tensor.place)
        unit = self.parameter_cache.unit_behind(tensor)
        return None if unit is None or unit.flat is None else PackedSavedTensor(unit, tensor)

    @untraced
    def unpack(self, saved: Any, *, is_outside: bool = False) -> torch.Tensor:
        """Unpack hook: the tensor that `pack` was called with."""
        if type(saved) is tuple:
            # The check that autograd makes for what it saves without hooks.
            tensor: torch.Tensor = saved[0]
            if tensor._version != saved[1]:
                raise modified(*saved)
            return tensor
        if not is_outside and (
            num_dispatch_modes() or num_function_modes() or transform() is not None or is_inference()
        ):
            return outside_modes(self.unpack)(saved, is_outside=True)
        if not isinstance(saved, PackedSavedTensor):
            loaded: torch.Tensor = saved.load()
            return loaded
        unit = saved.unit
        may_differ = saved.tensor_version is not None and (unit.has_been_written or unit.is_bound)
        if unit.version != saved.version or may_differ:
            saved.check()
        # The usual case in backward, without lock and touch: the unit in use is saved many times (7 linears in a block
        # of Llama). The first unpack has made it resident.
        if (
            self.backwards.is_open
            and self._vertical is None
            and unit.index == self.parameter_cache.schedule.present
            and unit.flat is not None
            and unit.arrival is None
            and unit.update is None
            and self.lock.owner == get_ident()
            and not torch.is_grad_enabled()
        ):
            return saved.view()
        # In use first: room for prefetches, or a signal handler's page fault, must not take its buffer.
        with self.parameter_cache.lock:
            unit.begin_use()
            try:
                self.touch(unit, is_saved=True)
                self._save_in_backward()
                return saved.view()
            finally:
                unit.end_use()

    def _save_in_backward(self) -> None:
        """With ``create_graph=True``, push the hooks in backward, so that its graph holds no weights either."""
        if torch.is_grad_enabled() and in_backward() and not self._depth and not self.saving.are_up:
            self.saving.push()
            self._saves_in_backward = True
            call_after_backward(self._end_saving_in_backward)

    def _end_saving_in_backward(self) -> None:
        if self._saves_in_backward:
            self._saves_in_backward = False
            self.saving.pop()

    # --------------------------------------------------------------------------------------------------------- holding

    @contextlib.contextmanager
    def held(self, units: Sequence[Unit]) -> Iterator[None]:
        """Make units resident and bound inside the ``with`` block. They stay bound until unused units are closed."""
        entered: list[Unit] = []
        try:
            self._hold(units, entered)
            yield
        finally:
            with self.parameter_cache.lock:
                for unit in entered:
                    unit.end_use()

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside the ``with`` block, graphs over gathered weights hold packed saved tensors."""
        is_saving = torch.is_grad_enabled()  # else no graph is made of them, and torch.func allows no hooks
        self.num_gathered += 1
        if is_saving:
            self.saving_while_gathered.push()
        try:
            yield
        finally:
            if is_saving:
                self.saving_while_gathered.pop()
            # `break_off` may have set it to 0 meanwhile.
            self.num_gathered = max(self.num_gathered - 1, 0)

    @outside_modes
    def _hold(self, units: Sequence[Unit], entered: list[Unit]) -> None:
        with self.parameter_cache.lock:
            self.parameter_cache.check_unchanging()
            for unit in units:
                unit.begin_use()
                entered.append(unit)
                if self.is_computing:
                    self.touch(unit)
                else:
                    self.parameter_cache.make_resident(unit)
            # Bound when all are resident: an error in between leaves none half open.
            for unit in entered:
                unit.bind()

    @contextlib.contextmanager
    def opened(self, unit: Unit) -> Iterator[None]:
        """As `held`, for one unit; and unbind it afterwards if it was not bound before."""
        was_bound = unit.is_bound
        with self.held([unit]):
            yield
        if not was_bound:
            self.parameter_cache.unbind_unused([unit])

    @contextlib.contextmanager
    def replacing(self, unit: Unit) -> Iterator[None]:
        """Inside the ``with`` block the caller replaces stored weights, and those in the flat buffer if the unit has
        one."""
        with self.parameter_cache.lock:
            # A buffer that nobody looks at is dropped, which saves writing the new values there as well.
            if not unit.num_active and unit.flat is not None and not unit.flat.has_views:
                self.parameter_cache.evict(unit)
        with self.opened(unit) if unit.flat is not None else contextlib.nullcontext():
            unit.outdate()
            yield

    def copy_for_user(self, unit: Unit, slot: Slot) -> torch.Tensor:
        """As `copy_of`, for a state dict: a large one in a file, see ``infinity.tiers.user_copies``."""
        self.begin_outside_read()
        with self.opened(unit):
            return self.copies.copy(unit.weight(slot))

    def copy_of(self, unit: Unit, slot: Slot) -> torch.Tensor:
        """A copy of one parameter's model weight, on the compute device."""
        with self.opened(unit):
            return unit.weight(slot).clone()
