"""The plan that is printed at start: what rests where, what the budget is divided into, what a step will move."""

from __future__ import annotations

from dataclasses import dataclass, field

from infinity.placement import Placement
from infinity.traffic import Traffic

_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Plan:
    """What the engine will do with memory and drives. Bytes everywhere; predictions are for one optimizer step in the
    steady state in which every parameter gets a gradient."""

    num_parameters: int
    num_trainable: int
    units: tuple[tuple[str, int], ...]
    """(name, bytes of the flat buffer) of each unit."""
    param_tier: str
    optimizer_tier: str
    update: str
    """"in_backward", "deferred" or "step"."""
    resting_bytes: dict[str, dict[str, int]]
    """Bytes at rest per tier ("device", "host", "nvme") and kind: "weights" (model weights), "states" (optimizer state with
    main weights or remainders), "gradients" (those that are spilled)."""
    host_budget_bytes: int
    host_budget_source: str
    minimum_budget_bytes: int
    placement: Placement
    predicted_read_bytes_per_step: int
    predicted_write_bytes_per_step: int
    traffic: Traffic = field(default_factory=Traffic)
    """The order of the last step, which the predictions are for."""

    def rows(self) -> list[tuple[str, str]]:
        """The table as (what, value)."""
        placement = self.placement
        per = max(self.num_parameters, 1)
        rows = [
            ("parameters", f"{self.num_parameters:,} ({self.num_trainable:,} trainable) in {len(self.units)} units"),
            ("largest unit", "{}: {}".format(*_largest(self.units))),
            ("weights / optimizer state on", f"{self.param_tier} / {self.optimizer_tier}"),
            *((f"at rest: {tier}", kinds) for tier in self.resting_bytes if (kinds := self._kinds(tier))),
            (
                "host memory budget",
                f"{_size(self.host_budget_bytes)} ({self.host_budget_source}; minimum {_size(self.minimum_budget_bytes)})",
            ),
            ("  flat buffers for weights", _size(placement.weights_bytes)),
            ("  pages", f"{placement.num_pages} x {_size(placement.page_bytes)}"),
            (
                "  gradients",
                _size(placement.gradient_bytes)
                + (", the rest spilled to NVMe" if placement.spills and self.update != "in_backward" else ""),
            ),
        ]
        if placement.kept_bytes:
            rows.append(("  weights and states at rest", _size(placement.kept_bytes)))
        rows += [
            ("optimizer update", self.update.replace("_", " ")),
            (
                "predicted read per step",
                f"{_size(self.predicted_read_bytes_per_step)} ({self.predicted_read_bytes_per_step / per:.2f} B per parameter)",
            ),
            (
                "predicted written per step",
                f"{_size(self.predicted_write_bytes_per_step)} ({self.predicted_write_bytes_per_step / per:.2f} B per parameter)",
            ),
        ]
        return rows

    @property
    def states_bytes(self) -> dict[str, int]:
        """Bytes at rest per tier."""
        return {tier: sum(kinds.values()) for tier, kinds in self.resting_bytes.items()}

    def _kinds(self, tier: str) -> str:
        found = self.resting_bytes[tier]
        return ", ".join(f"{kind} {_size(size)}" for kind, size in found.items() if size)

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {value}" for what, value in rows)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MEGABYTE:,.1f} MB"


def _largest(units: tuple[tuple[str, int], ...]) -> tuple[str, str]:
    name, size = max(units, key=lambda unit: unit[1])
    return name or "the model", _size(size)
