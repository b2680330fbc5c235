"""The plan that is printed at start: what rests where, what the budget is divided into, what a step will move."""

from __future__ import annotations

from dataclasses import dataclass

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
    """"in_backward" or "step"."""
    states_bytes: dict[str, int]
    """Bytes at rest per tier ("device", "host", "nvme"): model weights, main weights, optimizer state, spilled gradients."""
    host_budget_bytes: int
    host_budget_source: str
    minimum_budget_bytes: int
    placement: Placement
    predicted_read_bytes_per_step: int
    predicted_write_bytes_per_step: int
    traffic: Traffic = Traffic()
    """The order of the last step, which the predictions are for."""

    def rows(self) -> list[tuple[str, str]]:
        """The table as (what, value)."""
        placement = self.placement
        per = max(self.num_parameters, 1)
        rows = [
            ("parameters", f"{self.num_parameters:,} ({self.num_trainable:,} trainable) in {len(self.units)} units"),
            ("largest unit", "{}: {}".format(*_largest(self.units))),
            ("weights / optimizer state on", f"{self.param_tier} / {self.optimizer_tier}"),
            *((f"states on {tier}", _size(size)) for tier, size in self.states_bytes.items() if size),
            (
                "host memory budget",
                f"{_size(self.host_budget_bytes)} ({self.host_budget_source}; minimum {_size(self.minimum_budget_bytes)})",
            ),
            ("  flat buffers for weights", _size(placement.weights_bytes)),
            ("  pages", f"{placement.num_pages} x {_size(placement.page_bytes)}"),
            (
                "  gradients",
                _size(placement.gradient_bytes)
                + (", the rest spilled to NVMe" if placement.spills and self.update == "step" else ""),
            ),
        ]
        if placement.fixed_bytes:
            rows.append(("  states kept in RAM", _size(placement.fixed_bytes)))
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

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {value}" for what, value in rows)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MEGABYTE:,.1f} MB"


def _largest(units: tuple[tuple[str, int], ...]) -> tuple[str, str]:
    name, size = max(units, key=lambda unit: unit[1])
    return name or "the model", _size(size)
