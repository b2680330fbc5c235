"""Detects when a unit's gradients are complete in backward: counts calls of modules and firings of autograd's hooks.

[Note: complete]
Outside of reentrant checkpointing autograd adds up all contributions to a leaf and fires its hook once per backward. A
reentrant checkpoint runs a backward of its own inside the backward, so a parameter that is used in several of them fires
several times, and only ``p.grad`` holds the sum, rounded the way autograd rounds it. So: a unit is complete when every
parameter that is expected to fire has fired, where
  * expected are those that fired in the micro-batch before (all, in the first one);
  * a parameter that is alone in its unit (an expert) is expected if it fires: others wait for nothing;
  * the rule holds only if each can fire just once: its module was called once in this forward and nobody else owns the
    parameter, or it fired once in the micro-batch before, with the same number of calls.
  * no backward used the unit's weights after its gradients were complete (a recomputation may, without a gradient).
All others are complete when backward ends. A parameter that fires though it was not expected is delivered at the end
too. One that fires after it was delivered is an error: the gradient that was delivered was not whole.
"""
# Example: a block with parameters q, k and e, where no token of the first micro-batch reaches e. As e might still fire,
# the block is complete when backward ends. In the second micro-batch q and k are expected, and the block is complete
# with their hooks. If e fires after that, its gradient is delivered when backward ends.

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from infinity.errors import OtherNumbersWarning, StepError
from infinity.gradients.live_gradients import LiveGradients
from infinity.torch_internals.names import backward_number, outside_modes, without_torch_function
from infinity.units.layout import Slot
from infinity.units.parameter import AUTOGRAD_FIELD, hook_gradient, plain_grad, set_plain_grad
from infinity.units.unit import Unit

Key = tuple[int, int]
"""Unit index, slot index."""


@dataclass(eq=False)
class GradientCollector:
    """Delivers each unit's gradients of one micro-batch, at most twice: when it is complete, and leftovers at the end."""

    _units: Sequence[Unit]
    """All units, by index."""
    _num_owners: Mapping[Key, int]
    """(unit, slot) -> number of modules that have the parameter as their own."""
    deliver: Callable[[Unit, dict[Slot, torch.Tensor]], None]
    """Takes a unit and the gradients of some of its parameters, which it owns from then on."""
    keep: Callable[[Unit, dict[Slot, torch.Tensor]], None]
    """Takes gradients that are looked at before their unit is complete."""
    notice: Callable[[], None]
    """Called with the first gradient of each backward, inside it."""
    step: Callable[[], int]
    """The number of the present step, for messages."""
    live: LiveGradients
    """Takes gradients that have a graph, before they are delivered without."""
    _calls: dict[Key, int] = field(default_factory=dict)
    _fired: dict[int, dict[int, int]] = field(default_factory=dict)
    _delivered: set[Key] = field(default_factory=set)
    _complete_units: set[int] = field(default_factory=set)
    _history: dict[Key, tuple[int, int]] | None = None
    _expected: dict[int, frozenset[int] | None] = field(default_factory=dict)
    _used_late: set[int] = field(default_factory=set)
    """Units of which something came, or was needed, after their gradients were complete: from then on they are so at the end."""
    _in_parts: set[int] = field(default_factory=set)
    """Units of which `on_partial_gradients` was told."""
    _noticed = -1
    """The number of the backward of which `notice` was told last."""
    _has_warned_of_sparse = False
    taker: int | None = None
    """The thread that takes gradients with `pop_gradients`; None: they are delivered."""
    _handles: list[Any] = field(default_factory=list)

    def watch(self, handles: list[Any]) -> None:
        """Hook the parameters. ``handles`` get those of the hooks, and may have others."""
        self._handles = handles
        for unit in self._units:
            # Frozen parameters can be trained later only if they were in a group: then they are trainable here.
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                if slot.spec.is_trainable:
                    # Weak: the hook lives as long as the parameter, and must not keep the engine alive.
                    hook = functools.partial(GradientCollector._on_gradient, weakref.ref(self), unit, slot)
                    handles.append(hook_gradient(parameter, hook))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def on_module_call(self, unit: Unit, slots: Sequence[Slot]) -> None:
        """A module that owns these parameters is called in a training forward."""
        for slot in slots:
            key = (unit.index, slot.index)
            self._calls[key] = self._calls.get(key, 0) + 1

    @property
    def has_history(self) -> bool:
        """Whether a whole micro-batch has been seen, so that it is known what to expect."""
        return self._history is not None

    def forget_history(self) -> None:
        """Other parameters are frozen than before: what to expect is not known until another micro-batch has been seen."""
        self._history = None

    def on_weight_use(self, unit: Unit, *, is_saved: bool, is_updated: bool) -> None:
        """Backward uses the unit's weights.

        Args:
            unit: which.
            is_saved: forward saved them for this, so the unit could not be updated yet; otherwise a recomputation asks.
            is_updated: the unit's update has begun nevertheless.

        Raises:
            StepError: the weights needed are gone.
        """
        if unit.index in self._complete_units and not is_saved:
            self._used_late.add(unit.index)
        if is_updated:
            self._used_late.add(unit.index)
            step = self.step()
            raise StepError(
                f"backward of step {step} uses the weights of unit '{unit.name}' again, after its gradients were "
                "complete and its update had begun. The model took another path than before, which the engine has "
                "recorded: call engine.reset() and repeat the step, or set config key 'infinity.update' to \"step\"",
                step=step,
            )

    @staticmethod
    def _on_gradient(
        collector: weakref.ref[GradientCollector], unit: Unit, slot: Slot, parameter: torch.Tensor
    ) -> None:
        # Runs once for each parameter in each backward: so the usual path reads attributes and calls nothing.
        self = collector()
        if self is None:
            return
        with without_torch_function():
            if AUTOGRAD_FIELD.__get__(parameter) is None:
                return  # the function that got the parameter has no gradient for it
            num_hooks = len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
        number = backward_number()
        if number != self._noticed:
            self.notice()
            self._noticed = number
        # Counted even while `taker` pops the gradients: `pop_gradients` finds by it which parameters have one.
        fired = self._fired.get(unit.index)
        if fired is None:
            fired = self._fired[unit.index] = {}
        fired[slot.index] = fired.get(slot.index, 0) + 1
        if self.taker is not None:
            return
        if (unit.index, slot.index) in self._delivered:
            self._used_late.add(unit.index)
            raise StepError.late_gradient(slot.spec.fqn, unit=unit.name, step=self.step())
        if num_hooks > 1:
            self.deliver_now(unit, slot)  # others' run after this, and see the whole gradient
            return
        if unit.index not in self._expected:
            self._expected[unit.index] = self._expect(unit)
        expected = self._expected[unit.index]
        if expected is None and self._is_added_in_parts(unit, slot):
            self.deliver_now(unit, slot)
            return
        # Comparing lengths first is cheaper than comparing sets, and false for all but the last hooks of a unit.
        if expected is not None and len(fired) >= len(expected) and slot.index in expected and expected <= fired.keys():
            self._complete_units.add(unit.index)
            self._complete(unit)

    def _is_added_in_parts(self, unit: Unit, slot: Slot) -> bool:
        # autograd adds each part to ``p.grad``, which has the sum of the micro-batches before: their sum alone is rounded
        # otherwise. In 16 bits, only the gradients of one micro-batch are autograd's to add up.
        fires, _ = (self._history or {}).get((unit.index, slot.index), (0, 0))
        return fires > 1 and slot.spec.dtype is torch.float32 and self.live.is_present(unit, slot)

    def on_partial_gradients(self, unit: Unit, *, by_script: bool) -> None:
        """Weights of the unit are used outside of the modules whose calls are counted, so a gradient may come in parts.

        Args:
            unit: which.
            by_script: a script has called a module inside a block, and may do so at any time: from now on the unit is complete
                when backward ends. Otherwise a checkpoint inside a block computes anew, one of several around the same layer
                maybe: so it is until a micro-batch has shown how often a gradient comes.
        """
        (self._used_late if by_script else self._in_parts).add(unit.index)
        # Before a whole micro-batch is known, no number of firings is: complete at the end.
        if by_script or self._history is None:
            self._expected[unit.index] = None

    @outside_modes
    def deliver_now(self, unit: Unit, slot: Slot) -> None:
        """Somebody looks at a parameter's gradient, or replaces it, inside backward: deliver what has come so far.

        The unit is then complete when backward ends, not before.
        """
        if (unit.index, slot.index) in self._delivered:
            return
        self._expected[unit.index] = None
        if plain_grad(unit.parameters[slot.index]) is not None:
            self.notice()  # a hook that was there before ours runs before it, and leaves nothing for it to find
            self._fired.setdefault(unit.index, {}).setdefault(slot.index, 1)
            self.keep(unit, self._pop_from(unit, [slot.index]))

    def _expect(self, unit: Unit) -> frozenset[int] | None:
        """The slots that will fire, each once; None if one of them may fire more often. See [Note: complete]."""
        if unit.index in self._used_late or (self._history is None and unit.index in self._in_parts):
            return None
        expected: list[int] = []
        is_alone = len(unit.layout.slots) == 1
        for slot in unit.layout.slots:
            # An empty parameter needs no gradient, so it is not waited for.
            if not slot.spec.is_trainable or slot.numel == 0:
                continue
            key = (unit.index, slot.index)
            calls = self._calls.get(key, 0)
            fires, calls_then = (self._history or {}).get(key, (0, 0))
            # The first micro-batch, or an expert that no token reached then: only the calls tell how often it fires.
            if self._history is None or (is_alone and fires == 0):
                fires_once = calls == 1 and self._num_owners.get(key, 0) == 1
            else:
                if fires == 0:  # it has not fired before: if it does, it is delivered at the end
                    continue
                # Called several times, it may fire several times: whether it does depends on the checkpointing.
                fires_once = fires == 1 and calls == calls_then and calls <= 1
            if not fires_once:
                return None
            expected.append(slot.index)
        return frozenset(expected)

    def begin_collecting(self) -> None:
        """From now on gradients are not delivered: the calling thread takes them with `pop_gradients`."""
        self.taker = get_ident()

    def end_collecting(self) -> None:
        """Deliver gradients again, in a new micro-batch."""
        self.taker = None
        self.reset()

    def pop_gradients(self) -> list[tuple[Unit, dict[Slot, torch.Tensor]]]:
        """The gradients that have come since the last time, by unit. They belong to the caller."""
        fired, self._fired = self._fired, {}
        return [(self._units[unit], self._pop_from(self._units[unit], slots)) for unit, slots in fired.items()]

    def _pop_from(self, unit: Unit, slots: Iterable[int]) -> dict[Slot, torch.Tensor]:
        gradients: dict[Slot, torch.Tensor] = {}
        with without_torch_function():
            for index in slots:
                gradient = AUTOGRAD_FIELD.__get__(unit.parameters[index])
                if gradient is not None:
                    # autograd must not add the next micro-batch to it: the tensor is the receiver's.
                    AUTOGRAD_FIELD.__set__(unit.parameters[index], None)
                    gradients[unit.layout.slots[index]] = gradient
        for slot, gradient in gradients.items():
            # create_graph=True: what users hold has the graph; main gradients have none.
            if gradient.requires_grad:
                self.live.add_with_graph(unit, slot, gradient)
                gradients[slot] = gradient.detach()
            if gradient.is_sparse and not self._has_warned_of_sparse:
                self._has_warned_of_sparse = True
                warnings.warn(OtherNumbersWarning.of_sparse_gradient(slot.spec.fqn), stacklevel=2)
        return gradients

    @outside_modes
    def _complete(self, unit: Unit) -> None:
        gradients = self._pop_from(unit, self._fired.get(unit.index, {}))
        if gradients:
            for slot in gradients:
                self._delivered.add((unit.index, slot.index))
            self.deliver(unit, gradients)

    @property
    def has_fired(self) -> bool:
        """Whether any gradient has come since the last `finish` or `reset`."""
        return bool(self._fired)

    def finish(self) -> None:
        """Backward has ended: deliver what is left, and expect the same the next time."""
        for index in list(self._fired):
            self._complete(self._units[index])
        # A backward without gradients (of a loss that needs none) says nothing about the next one.
        if self._fired:
            self._history = {
                (unit, slot): (fires, self._calls.get((unit, slot), 0))
                for unit, slots in self._fired.items()
                for slot, fires in slots.items()
            }
        self.reset()

    def reset(self) -> None:
        """Begin a new micro-batch; gradients not yet delivered stay in ``p.grad``."""
        self._calls.clear()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self._complete_units.clear()
        self._fired.clear()
        self._delivered.clear()
        self._expected.clear()

    def drop(self, kept: Container[Key] = ()) -> None:
        """Drop what autograd has accumulated, but for ``kept``. Calls still count: their backward may be yet to come."""
        self.taker = None
        self._forget_gradients()
        for unit in self._units:
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                if (unit.index, slot.index) not in kept and plain_grad(parameter) is not None:
                    set_plain_grad(parameter, None)


def have_hooks_of_others(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether hooks besides the collector's run when the gradient of one of them has been accumulated."""
    with without_torch_function():
        hooks = [getattr(parameter, "_post_accumulate_grad_hooks", None) or () for parameter in parameters]
    return max(map(len, hooks), default=0) > 1
