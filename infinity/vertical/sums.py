"""Sums the gradients of all micro-batches, unit by unit.

[Note: parts] An embedding that is also the head gets a gradient h from its use in the head, and e from the embedding.
One micro-batch after the other, the sum is (h0 + e0) + (h1 + e1): in the weight's dtype inside the brackets, in fp32
outside. In the vertical order h0 and h1 come before e0 and e1. So each h waits as an activation checkpoint, on the
drive if need be, and is added to its e when that comes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from infinity.activations.activation_checkpoints import ActivationCheckpoint, ActivationCheckpoints
from infinity.device.compute import ComputeDevice
from infinity.errors import StepError
from infinity.units.layout import Slot, in_slot_order
from infinity.units.unit import Unit
from infinity.updates.stepper import Stepper


@dataclass(eq=False)
class UnitSums:
    """Sums gradients in fp32, in the order in which they come, and delivers each unit's sum when it is complete."""

    # On the CPU they are added into the main gradients' own memory. On a GPU they are summed there, so that one
    # gradient per step goes to the host, and not one per micro-batch.
    _stepper: Stepper
    _device: ComputeDevice
    _updates_now: bool
    """Whether to update a unit as soon as its sum is complete."""
    _step: int
    """The number of the present step, for messages."""
    _open: dict[int, Unit] = field(default_factory=dict)
    """By index, units that got gradients in the present moment."""
    _on_device: dict[int, dict[Slot, torch.Tensor]] = field(default_factory=dict)
    """Unit index -> its sums in the present moment, on a GPU: fp32, in the parameter's shape and strides."""
    _complete: set[int] = field(default_factory=set)
    """Indices of units that must get no more gradients."""

    def add(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> None:
        """Add gradients of one micro-batch.

        Raises:
            StepError: the unit's sum was complete. Its update may have begun, so the gradient would be lost.
        """
        if not gradients:
            return
        if unit.index in self._complete:
            raise StepError.late_gradient(next(iter(gradients)).spec.fqn, unit=unit.name, step=self._step)
        if not self._device.uses_host_memory:
            sums = self._on_device.setdefault(unit.index, {})
            for slot, gradient in gradients.items():
                ordered = in_slot_order(gradient, slot)
                if slot in sums:
                    sums[slot].add_(ordered)
                else:
                    sums[slot] = ordered.to(torch.float32, copy=True)  # a copy: autograd may own the gradient
        else:
            if unit.index not in self._open:
                self._stepper.gradients.open_sum(unit)
            self._stepper.deliver(unit, gradients, updates_now=False)
        self._open[unit.index] = unit

    def end_moment(self, complete: Mapping[int, Unit]) -> None:
        """End a part of backward that all micro-batches have been through. ``complete``: units with all gradients."""
        for unit in self._open.values():
            self._close(unit, is_complete=unit.index in complete)
        for unit in complete.values():  # its last gradients may have come at an earlier moment
            if unit.index not in self._open and self._stepper.gradients.slots_with_gradient(unit):
                self._close(unit, is_complete=True)
        self._open.clear()
        self._complete.update(complete)

    def _close(self, unit: Unit, *, is_complete: bool) -> None:
        gradients = self._on_device.pop(unit.index, {})
        if is_complete and self._updates_now:
            self._stepper.deliver(unit, gradients, updates_now=True)
            self._stepper.gradients.offer(unit)
            return
        if gradients:
            self._stepper.deliver(unit, gradients, updates_now=False)
        if is_complete and not self._stepper.gradients.offer(unit):
            self._stepper.gradients.close_sum(unit)
        # Otherwise more gradients will come. The sum stays in memory unless the room is needed; then it is spilled.


Key = tuple[int, int]
"""A parameter: index of its unit, and of its slot there."""


class TiedParts:
    """Gradients of one step that wait for their second part: see [Note: parts]."""

    def __init__(self, checkpoints: ActivationCheckpoints, tied: Collection[Key]) -> None:
        """``tied``: parameters that two modules have."""
        self._checkpoints = checkpoints
        self.tied = frozenset(tied)
        self._waiting: dict[tuple[int, Key], ActivationCheckpoint] = {}

    def join(self, batch: int, key: Key, gradient: torch.Tensor | None, *, is_last: bool) -> torch.Tensor | None:
        """Add a part of a gradient.

        Args:
            batch: the number of the micro-batch.
            key: the parameter.
            gradient: the part, which this object owns from now on. None: no further part has come.
            is_last: whether this is the last moment at which a part may come.

        Returns:
            The whole gradient at the last moment, else None.
        """
        kept = self._waiting.pop((batch, key), None)
        if kept is not None:
            before = self._checkpoints.load(kept)
            gradient = before if gradient is None else before + gradient
            self._checkpoints.release(kept)
        if is_last or gradient is None:
            return gradient
        self._waiting[batch, key] = self._checkpoints.keep(gradient)
        return None

    def waiting_of(self, batch: int) -> list[Key]:
        """The parameters with a waiting part of this micro-batch."""
        return [key for number, key in self._waiting if number == batch]

    @property
    def kept(self) -> Iterator[ActivationCheckpoint]:
        """The waiting parts, in the order in which they came."""
        return iter(list(self._waiting.values()))
