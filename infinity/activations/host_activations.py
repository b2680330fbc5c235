"""What autograd saves in the model's forward, in host memory: counted, and never more than the budget has for it.

Knows tensors and bytes; must not know what computes with them.
"""

from __future__ import annotations

from typing import NoReturn

from infinity.activations.saved_activations import SavedActivations
from infinity.activations.spill_space import SpillSpace
from infinity.errors import BudgetTooSmallError, format_bytes
from infinity.metrics.clock import StepClock

_KEY = "infinity.host_memory_budget"


class HostActivations(SavedActivations):
    """Keeps all of it. What is on a GPU is brought to host memory as soon as it is saved, and comes back when it is needed."""

    def __init__(self, clock: StepClock, capacity_bytes: int, budget_bytes: int) -> None:
        """
        Args:
            clock: counts the waiting.
            capacity_bytes: host memory that there is for it.
            budget_bytes: the budget of which that is a part, for messages.
        """
        super().__init__(SpillSpace(_no_drive), clock, capacity_bytes)
        self._budget_bytes = budget_bytes

    def _make_room(self) -> None:
        held, capacity = self._held_bytes, self._capacity_bytes
        if held > capacity:
            raise BudgetTooSmallError(
                _KEY,
                budget_bytes=self._budget_bytes,
                minimum_bytes=self._budget_bytes + 2 * (held - capacity),
                reason=f'infinity.activations is "cpu": {format_bytes(capacity)} of the budget are for what autograd saves, '
                f'which takes {format_bytes(held)} so far. "nvme" writes what exceeds its share to the drives, and '
                "infinity.activation_checkpointing keeps less",
            )
        stored = self._oldest_first.pop() if self._oldest_first else None
        if stored is not None and stored.source is not None and stored.device.type != "cpu":
            stored.bring_to_host()


def _no_drive(num_bytes: int) -> NoReturn:
    raise RuntimeError("activations in host memory are not written")
