"""Gradients of several micro-batches, one after the other, as one gradient per unit.

Knows units and gradients; must not know micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.device.compute import ComputeDevice
from infinity.errors import StepError
from infinity.gradients.sources import in_slot_order
from infinity.units.layout import Slot
from infinity.units.unit import Unit
from infinity.updates.stepper import Stepper


class UnitSums:
    """Adds up gradients in fp32, in the order in which they come, and delivers each unit's sum when it is complete.

    On the CPU that happens in the memory of the main gradients themselves. On a GPU it happens there, so that one
    gradient per step goes to the host and not one per micro-batch.
    """

    def __init__(self, stepper: Stepper, device: ComputeDevice, *, updates_now: bool, step: int) -> None:
        """
        Args:
            stepper: takes the sums.
            device: the compute device.
            updates_now: update a unit as soon as its sum is complete.
            step: the number of the present step, for messages.
        """
        self._stepper = stepper
        self._device = device
        self._updates_now = updates_now
        self._step = step
        self._open: dict[int, Unit] = {}
        self._on_device: dict[int, dict[Slot, torch.Tensor]] = {}
        self._complete: set[int] = set()

    def add(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> None:
        """Gradients of one micro-batch.

        Raises:
            StepError: the unit's sum had been complete.
        """
        if not gradients:
            return
        if unit.index in self._complete:
            raise StepError.late_gradient(next(iter(gradients)).spec.fqn, unit=unit.name, step=self._step)
        if not self._device.shares_host_memory:
            sums = self._on_device.setdefault(unit.index, {})
            for slot, gradient in gradients.items():
                ordered = in_slot_order(gradient, slot)
                if slot in sums:
                    sums[slot].add_(ordered)
                else:
                    sums[slot] = ordered.to(torch.float32, copy=True)
        else:
            if unit.index not in self._open:
                self._stepper.gradients.open_sum(unit)
            self._stepper.deliver(unit, gradients, updates_now=False)
        self._open[unit.index] = unit

    def end_moment(self, complete: Mapping[int, Unit]) -> None:
        """All micro-batches have been through some part of backward, and units are ``complete`` by that."""
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
        # Else more is to come: it stays in memory until somebody else needs the room.
