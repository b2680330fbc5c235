"""What placement has to know: the sizes of the units, and what the config asks for.

Pure data; must not know how a budget is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infinity.numerics.chunk_format import ChunkFormat

FP32_BYTES = 4


@dataclass(frozen=True)
class UnitSize:
    """What placement has to know of a unit. Bytes of its flat buffer, elements of its trainable segment (padding included)."""

    name: str
    weight_bytes: int
    trainable_numel: int
    num_states: int
    """Per-element optimizer states."""
    is_all_trainable: bool


@dataclass(frozen=True)
class Request:
    """What the config asks for."""

    budget_bytes: int
    device_budget_bytes: int | None
    param_tier: str
    optimizer_tier: str
    record_format: ChunkFormat
    shares_host_memory: bool
    update: str
    """When units are updated: "in_backward", "deferred" or "step"."""
    num_micro_batches: int
    page_bytes: int | None
    prefetches: bool
    can_spill: bool
    """Whether there is an NVMe tier that gradients could be spilled to."""
    gradient_itemsize: int = FP32_BYTES
    """Bytes per element of a gradient that waits."""
    rounds_gradients: bool = False
    """Whether sums of gradients keep that size; otherwise they are fp32."""
    used_together: tuple[frozenset[int], ...] = ()
    """For each block, the units in which its parameters lie."""
    keeps_in_memory: bool = True
    """Whether what the budgets leave is spent on keeping weights and states off the drives."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether a unit is updated as soon as its gradients are complete."""
        return self.update == "in_backward"

    @property
    def scratch_itemsize(self) -> int:
        """Bytes per element of a sum of gradients."""
        return self.gradient_itemsize if self.rounds_gradients else FP32_BYTES

    @property
    def weight_reads(self) -> int:
        """How often a step reads the weights of a unit that rests on NVMe."""
        return 2 * self.num_micro_batches

    @property
    def gradient_moves(self) -> int:
        """How often a step reads, and how often it writes, the gradients of a unit that are spilled."""
        # In backward, the last micro-batch's sum goes into the update without another detour.
        return self.num_micro_batches - 1 if self.updates_in_backward else self.num_micro_batches

    @property
    def keeps_all_weights(self) -> bool:
        """Whether the config wants all weights in memory, on the device or beside it."""
        return self.param_tier != "nvme"

    @property
    def keeps_all_records(self) -> bool:
        """Whether the config wants all optimizer state in host memory."""
        return self.optimizer_tier == "cpu" or (self.optimizer_tier == "none" and self.shares_host_memory)

    def record_bytes(self, unit: UnitSize) -> int:
        """Bytes of a unit's optimizer state as stored."""
        return self.record_format.record_bytes(unit.trainable_numel, unit.num_states)

    def trainable_bytes(self, unit: UnitSize) -> int:
        """Bytes of a unit's weights that a step writes."""
        return unit.trainable_numel * self.record_format.weight_dtype.itemsize

    def saved_by_weights(self, unit: UnitSize) -> int:
        """Bytes that a step does not move if the unit's weights stay in memory."""
        return self.weight_reads * unit.weight_bytes + self.trainable_bytes(unit)


def needed_together(units: Sequence[UnitSize], request: Request, moving: Iterable[int]) -> int:
    """Bytes that units which come and go need at once: the two largest, or those that a block uses and the largest other."""
    moves = set(moving)
    needed = sum(sorted((units[index].weight_bytes for index in moves), reverse=True)[:2])
    for together in request.used_together:
        if len(together & moves) > 1:
            others = [units[index].weight_bytes for index in moves - together]
            needed = max(needed, sum(units[i].weight_bytes for i in together & moves) + max(others, default=0))
    return needed


def spread(count: int) -> list[int]:
    """``range(count)`` in an order whose every beginning is spread evenly over it."""
    num_bits = max(count - 1, 1).bit_length()
    return sorted(range(count), key=lambda index: int(f"{index:0{num_bits}b}"[::-1], 2))
