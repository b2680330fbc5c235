"""The plan that is printed at start, what its predictions are made from, and both as JSON.

Read again, they say what the plan would be with other means, long after the engine is gone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from infinity.plan.cost_model import Prediction, Traffic, predict
from infinity.plan.machine import Bandwidth
from infinity.plan.placement import Placement
from infinity.plan.sizes import KNOWN_FIELDS_ONLY, Request, UnitSize
from infinity.plan.volumes import Retention, megabytes


@dataclass(frozen=True)
class Plan:
    """What the engine will do with memory and drives. Bytes everywhere; predictions are for one optimizer step in the
    steady state in which every parameter gets a gradient."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    num_parameters: int
    num_trainable: int
    units: tuple[tuple[str, int], ...]
    """(name, bytes of the flat buffer) of each unit."""
    param_tier: str
    optimizer_tier: str
    update: str
    """"in_backward", "deferred" or "step"."""
    resting_bytes: dict[str, dict[str, int]]
    """Bytes at rest per tier ("device", "host", "nvme") and kind: "weights" (model weights), "remainders" or "main weights",
    "states" (of the optimizer), "gradients" (room for those that are spilled, or stay on a device)."""
    host_budget_bytes: int
    host_budget_source: str
    minimum_budget_bytes: int
    placement: Placement
    num_micro_batches: int
    predicted_read_bytes_per_step: int = 0
    predicted_write_bytes_per_step: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    """The order of the last step, which the predictions are for."""
    bandwidth: Bandwidth | None = None
    """What the drives were measured to do; None if they were not."""
    drive_tbw: float | None = None
    """Terabytes that the drives are rated to take."""
    durable_bytes: int = 0
    """Of the drives, what a durable run has reserved: the states, and room for what each kept commit differs in."""
    retention: Retention | None = None
    """What that is made of, and how many commits there would be room for."""
    seen_bytes_per_second: float | None = None
    """What the drives read and wrote while they were busy, in the steps so far; None before the first ones."""
    compute_seconds: float | None = None
    """What a step would take without waiting for drives, from the steps so far; None before the first ones."""
    activations_beyond: str = "the rest spilled to NVMe"
    """What becomes of activations for which the placement has no room."""
    update_workers: int = 1
    """Threads that run updates."""
    shares_host_memory: bool = True
    """Whether the device computes in host memory: flat buffers then are a part of the host's budget."""
    overlap_factor: float = 1.0
    """How much longer the steps so far took than the longer of I/O and compute, which share processors and memory."""

    @property
    def predicted_io_seconds(self) -> float | None:
        """How long the drives take for a step's bytes; None if nobody knows how fast they are."""
        read, write = self.predicted_read_bytes_per_step, self.predicted_write_bytes_per_step
        if not read and not write:
            return 0.0
        if self.seen_bytes_per_second is not None:
            return (read + write) / self.seen_bytes_per_second
        speed = self.bandwidth
        if speed is None:
            return None
        alone = max(read / speed.read_bytes_per_second, write / speed.write_bytes_per_second)
        return max(alone, (read + write) / speed.mixed_bytes_per_second)

    @property
    def predicted_step_seconds(self) -> float | None:
        """I/O and compute run beside each other, so it is the longer of them. Before the first steps it is that of I/O alone.

        None as long as nobody knows how fast the drives are.
        """
        if self.predicted_io_seconds is None:
            return None
        return max(self.predicted_io_seconds, self.compute_seconds or 0.0) * self.overlap_factor

    @property
    def prediction(self) -> tuple[int, int, float | None]:
        """Bytes read, bytes written, and seconds of a step."""
        return self.predicted_read_bytes_per_step, self.predicted_write_bytes_per_step, self.predicted_step_seconds

    @property
    def predicted_drive_life_steps(self) -> int | None:
        """After how many steps the drives have taken what they are rated for; None without a rating, or without writes."""
        if self.drive_tbw is None or not self.predicted_write_bytes_per_step:
            return None
        return int(self.drive_tbw * 1e12 / self.predicted_write_bytes_per_step)

    def rows(self) -> list[tuple[str, str]]:
        """The table as (what, value)."""
        placement = self.placement
        minimum = megabytes(self.minimum_budget_bytes)
        name, num_bytes = max(self.units, key=lambda unit: unit[1])
        rows = [
            ("parameters", f"{self.num_parameters:,} ({self.num_trainable:,} trainable) in {len(self.units)} units"),
            ("largest unit", f"{name or 'the model'}: {megabytes(num_bytes)}"),
            ("weights / optimizer state on", f"{self.param_tier} / {self.optimizer_tier}"),
            *((f"at rest: {tier}", kinds) for tier in self.resting_bytes if (kinds := self._kinds(tier))),
            (
                "host memory budget",
                f"{megabytes(self.host_budget_bytes)} ({self.host_budget_source}; minimum {minimum})",
            ),
        ]
        flats = megabytes(placement.weights_bytes)
        if self.shares_host_memory:
            rows.append(("  flat buffers for weights", flats))
        else:
            rows.insert(-1, ("device memory for weights", flats))
        if placement.num_pages:
            rows.append(("  pages", f"{placement.num_pages} x {megabytes(placement.page_bytes)}"))
        if not placement.gradients_on_device:
            rest = ", the rest spilled to NVMe" if placement.spills and self.update != "in_backward" else ""
            rows.append(("  gradients", megabytes(placement.gradient_bytes) + rest))
        if placement.landing_bytes:
            rows.append(("  gradients that arrive", megabytes(placement.landing_bytes)))
        if self.durable_bytes:
            detail = "" if self.retention is None else f": {self.retention}"
            rows.append(("durable run", f"{megabytes(self.durable_bytes)} on the drives{detail}"))
        if placement.kept_bytes:
            rows.append(("  weights and states at rest", megabytes(placement.kept_bytes)))
        if placement.activation_bytes:
            rows.append(("  activations", f"{megabytes(placement.activation_bytes)}, {self.activations_beyond}"))
        is_trained = self.num_trainable > 0
        if is_trained:
            workers = f", {self.update_workers} at a time" if self.update_workers > 1 else ""
            rows.append(("optimizer update", self.update.replace("_", " ") + workers))
        if is_trained and self.num_micro_batches > 1:
            order = "all through a unit before the next" if self.traffic.is_vertical else "one after the other"
            rows.append(("micro-batches", f"{self.num_micro_batches}, {order}"))
        pass_name = "step" if is_trained else "forward"
        rows.append((f"predicted read per {pass_name}", self._moved(self.predicted_read_bytes_per_step)))
        if not is_trained:
            return rows
        rows += [
            ("predicted written per step", self._moved(self.predicted_write_bytes_per_step)),
            ("predicted time of a step", self._time()),
            ("drive life", self._life()),
        ]
        return rows

    def _moved(self, num_bytes: int) -> str:
        return f"{megabytes(num_bytes)} ({num_bytes / max(self.num_parameters, 1):.2f} B per parameter)"

    def _time(self) -> str:
        seconds, io, speed = self.predicted_step_seconds, self.predicted_io_seconds, self.bandwidth
        compute = self.compute_seconds
        computing = "compute is known after the first steps" if compute is None else f"compute {compute:.2f} s"
        if seconds is None:
            return f"unknown, no speed of the drives is stored: run `infinity profile DIR`; {computing}"
        reading = f"I/O {io:.2f} s"
        if self.seen_bytes_per_second is not None:
            reading += f" at {self.seen_bytes_per_second / 1e6:,.0f} MB/s (both ways, as in the last steps)"
        elif speed is not None and io:
            rate = speed.mixed_bytes_per_second / 1e6
            reading += f" at {rate:,.0f} MB/s (both ways, measured on {speed.date})"
        return f"{'at least ' if compute is None else ''}{seconds:.2f} s: {reading}, {computing}"

    def _life(self) -> str:
        written = 1000 * self.predicted_write_bytes_per_step / 1e12
        steps = self.predicted_drive_life_steps
        if not written:
            return "nothing is written in a step"
        told = f"{written:,.3f} TB written per 1000 steps"
        return told if steps is None else f"{steps:,} steps until {self.drive_tbw:g} TB are written; {told}"

    @property
    def states_bytes(self) -> dict[str, int]:
        """Bytes at rest per tier."""
        return {tier: sum(kinds.values()) for tier, kinds in self.resting_bytes.items()}

    def _kinds(self, tier: str) -> str:
        found = self.resting_bytes[tier]
        return ", ".join(f"{kind} {megabytes(size)}" for kind, size in found.items() if size)

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {value}" for what, value in rows)


@dataclass(frozen=True)
class Workload:
    """Of one step.

    Attributes:
        units: all of them.
        request: what a placement was asked.
        order: in which a micro-batch (a whole step, if `traffic` is vertical) needs its units: forward, then backward.
        backward_start: place in `order` at which backward begins.
        traffic: the order of the last step.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    units: tuple[UnitSize, ...]
    request: Request
    order: tuple[int, ...]
    backward_start: int
    traffic: Traffic

    def prediction(self, placement: Placement) -> Prediction:
        """What a step moves with a placement, but for `Traffic.extra_bytes`."""
        request = self.request
        if self.traffic.is_vertical:  # the order is that of a whole step
            request = dataclasses.replace(request, num_micro_batches=1)
        return predict(self.units, request, placement, self.order, self.backward_start)

    def predicted(self, plan: Plan) -> Plan:
        """The plan with what its placement moves in a step."""
        found, extra = self.prediction(plan.placement), self.traffic.extra_bytes
        return dataclasses.replace(
            plan,
            predicted_read_bytes_per_step=found.read_bytes + extra,
            predicted_write_bytes_per_step=found.write_bytes + extra,
            traffic=self.traffic,
        )


_adapter = functools.cache(TypeAdapter)  # building one takes 16 ms, a hundred times as long as its use


def as_record(workload: Workload, plan: Plan) -> dict[str, Any]:
    """Both, in what JSON has. `of_record` makes them of it again."""
    known: dict[str, Any] = _adapter(Plan).dump_python(plan, mode="json")
    known["predicted_seconds"] = plan.predicted_step_seconds  # for whoever reads the file alone
    return {"plan": known, "workload": _adapter(Workload).dump_python(workload, mode="json")}


def of_record(record: Mapping[str, Any]) -> tuple[Workload, Plan]:
    """What `as_record` was given.

    Raises:
        KeyError, TypeError, ValueError: it is not what `as_record` gives.
    """
    known = {name: value for name, value in record["plan"].items() if name != "predicted_seconds"}
    return _adapter(Workload).validate_python(record["workload"]), _adapter(Plan).validate_python(known)
