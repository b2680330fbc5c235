"""The plan that is printed at start, with the inputs of its predictions; and as JSON.

A plan that is read from a file can predict again, with another placement or speed, when the engine is long gone.
`PlanTracker` keeps it up to date: bytes from the recorded prefetch schedule, times from the last steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from infinity.metrics import StepReport
from infinity.paging.prefetch_schedule import PrefetchSchedule
from infinity.plan.cost_model import Prediction, Traffic, predict
from infinity.plan.machine import Bandwidth
from infinity.plan.placement import Placement
from infinity.plan.sizes import KNOWN_FIELDS_ONLY, Request, UnitSize
from infinity.plan.volumes import Retention, megabytes, resting_bytes

# Words of the printed table for tiers, values of `infinity.update`, and kinds that need an explanation.
_STORED = {"device": "stored on the device", "host": "stored in RAM", "nvme": "stored on NVMe"}
_UPDATE = {"in_backward": "in backward", "deferred": "beside the next forward", "step": "in engine.step()"}
_KINDS = {"remainders": "remainders of main weights"}
# The first steps do not count: memory is touched for the first time, kernels are chosen, the prefetch schedule is
# recorded.
_WARM_UP = 2
_REMEMBERED = 15  # steps whose times are averaged: follows changes, and one slow step does not matter
# From so many steps on, their median tells how much time a script takes between steps. Before, the shortest time
# counts.
_ENOUGH = 4


@dataclass(frozen=True)
class Plan:
    """What the engine will do with memory and drives. Sizes are in bytes. Predictions are for one optimizer step in the
    steady state, in which every parameter gets a gradient."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    num_parameters: int
    num_trainable: int
    sizes: tuple[UnitSize, ...]
    """The size of each unit."""
    request: Request
    """What the config asks for."""
    placement: Placement
    order: tuple[int, ...]
    """Unit indices in the order in which a micro-batch (a whole step, if `traffic` is vertical) needs them."""
    backward_start: int
    """Place in `order` at which backward begins."""
    host_budget_source: str
    traffic: Traffic = field(default_factory=Traffic)
    """The kind of steps that the predictions are for."""
    predicted_read_bytes_per_step: int = 0
    predicted_write_bytes_per_step: int = 0
    predicted_upload_bytes_per_step: int = 0
    """Copied from host memory to a GPU."""
    predicted_download_bytes_per_step: int = 0
    """Copied from a GPU to host memory."""
    link_bytes_per_second: float | None = None
    """Speed of these copies, each way; None if it is unknown."""
    bandwidth: Bandwidth | None = None
    """Measured speed of the drives; None if it was not measured."""
    drive_tbw: float | None = None
    """Terabytes that the drives are rated to write."""
    retention: Retention | None = None
    """The space of a durable run on the drives, and how many commits fit."""
    seen_bytes_per_second: float | None = None
    """Bytes read and written per second while the drives were busy, in the last steps; None before those."""
    compute_seconds: float | None = None
    """The time of a step without waiting for drives, from the last steps; None before those."""
    overlap_factor: float = 1.0
    """Time of the last steps, divided by the longer of I/O and compute: those share processors and memory."""

    @property
    def units(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes of the flat buffer) of each unit."""
        return tuple((size.name, size.weight_bytes) for size in self.sizes)

    @property
    def update(self) -> str:
        """ "in_backward", "deferred" or "step"."""
        return self.request.update

    @property
    def host_budget_bytes(self) -> int:
        """The limit on the engine's host memory."""
        return self.request.budget_bytes

    @property
    def minimum_budget_bytes(self) -> int:
        """Smallest budget with which an engine can start."""
        return self.placement.minimum_bytes

    @property
    def durable_bytes(self) -> int:
        """Bytes that a durable run has reserved on the drives, for the states and for kept commits."""
        return 0 if self.retention is None else self.retention.num_bytes

    @functools.cached_property
    def resting_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes stored per tier ("device", "host", "nvme") and kind: "weights", "remainders" or "main weights",
        "states", "gradients"."""
        return resting_bytes(self.sizes, self.request, self.placement)

    # ----------------------------------------------------------------------------------------------------- predictions

    def prediction_of_bytes(self) -> Prediction:
        """The bytes that a step moves, without `Traffic.extra_bytes`."""
        request, is_vertical = self.request, self.traffic.is_vertical
        if is_vertical:  # the order is that of a whole step
            request = dataclasses.replace(request, num_micro_batches=1)
        found = predict(self.sizes, request, self.placement, self.order, self.backward_start)
        return found.in_vertical_order(self.sizes, self.request) if is_vertical else found

    def predicted(self) -> Plan:
        """A copy of the plan with its predicted bytes."""
        found, extra = self.prediction_of_bytes(), self.traffic.extra_bytes
        return dataclasses.replace(
            self,
            predicted_read_bytes_per_step=found.read_bytes + extra,
            predicted_write_bytes_per_step=found.write_bytes + extra,
            predicted_upload_bytes_per_step=found.upload_bytes,
            predicted_download_bytes_per_step=found.download_bytes,
        )

    @property
    def predicted_io_seconds(self) -> float | None:
        """Seconds that the drives need for a step's bytes; None if their speed is unknown."""
        read, write = self.predicted_read_bytes_per_step, self.predicted_write_bytes_per_step
        if not read and not write:
            return 0.0
        if self.seen_bytes_per_second is not None:
            return (read + write) / self.seen_bytes_per_second
        speed = self.bandwidth
        if speed is None:
            return None
        # The slowest of three limits: reading, writing, and both together. A drive whose mixed speed is the sum of the
        # others is limited by the longer direction, and most others by the sum.
        alone = max(read / speed.read_bytes_per_second, write / speed.write_bytes_per_second)
        return max(alone, (read + write) / speed.mixed_bytes_per_second)

    @property
    def predicted_link_seconds(self) -> float | None:
        """Seconds that a step's copies between host memory and a GPU take, both ways at once; None if it is unknown."""
        if self.link_bytes_per_second is None:
            return None
        longer = max(self.predicted_upload_bytes_per_step, self.predicted_download_bytes_per_step)
        return longer / self.link_bytes_per_second

    @property
    def predicted_step_seconds(self) -> float | None:
        """The longest of three times: drives, copies to and from a GPU, and compute. They overlap.

        Before the first steps compute is unknown and not counted, and so are copies whose speed is unknown. None if the
        speed of the drives is unknown.
        """
        if self.predicted_io_seconds is None:
            return None
        longest = max(self.predicted_io_seconds, self.predicted_link_seconds or 0.0, self.compute_seconds or 0.0)
        return longest * self.overlap_factor

    @property
    def prediction(self) -> tuple[int, int, float | None]:
        """Bytes read, bytes written, and seconds of a step."""
        return self.predicted_read_bytes_per_step, self.predicted_write_bytes_per_step, self.predicted_step_seconds

    @property
    def predicted_drive_life_steps(self) -> int | None:
        """The number of steps after which the drives' rating is used up; None without a rating, or without writes."""
        if self.drive_tbw is None or not self.predicted_write_bytes_per_step:
            return None
        return int(self.drive_tbw * 1e12 / self.predicted_write_bytes_per_step)

    # --------------------------------------------------------------------------------------------------------- in words

    def rows(self) -> list[tuple[str, str]]:
        """The rows of the printed table: (what, value). Two leading spaces mark a part of the row above."""
        request, placement = self.request, self.placement
        name, num_bytes = max(self.units, key=lambda unit: unit[1])
        rows = [
            (
                "parameters",
                f"{self.num_parameters:,} ({self.num_trainable:,} trainable) in {len(self.sizes)} units (parameters "
                "that are read together)",
            ),
            ("largest unit", f"{name or 'the model'}: {megabytes(num_bytes)}"),
            ("weights / optimizer state on", f"{request.param_tier} / {request.optimizer_tier}"),
            *((_STORED[tier], kinds) for tier in self.resting_bytes if (kinds := self._kinds(tier))),
        ]
        flats = megabytes(placement.weights_bytes)
        if not request.uses_host_memory:
            rows.append(("device memory for weights", flats))
        # Rounded up to the 0.1 MB that are printed: it may be copied into the config.
        minimum = f"minimum {megabytes(-(-placement.minimum_bytes // 100_000) * 100_000)}"
        rows.append(("host memory budget", f"{megabytes(request.budget_bytes)} ({self.host_budget_source}; {minimum})"))
        if request.uses_host_memory:
            rows.append(("  buffers for weights in use", flats))
        if number := placement.num_staging_buffers:
            rows.append(("  staging buffers", f"{number} x {megabytes(placement.staging_buffer_bytes)}"))
        if not placement.gradients_on_device:
            rest = ", the rest spilled to NVMe" if placement.spills and self.update != "in_backward" else ""
            rows.append(("  gradients", megabytes(placement.gradient_bytes) + rest))
        if placement.landing_bytes:
            rows.append(("  gradients from the GPU", megabytes(placement.landing_bytes)))
        if self.retention is not None:
            rows.append(("durable run", f"{megabytes(self.durable_bytes)} on the drives: {self.retention}"))
        if placement.kept_bytes:
            rows.append(("  weights and states in RAM", megabytes(placement.kept_bytes)))
        if placement.activation_bytes:
            beyond = "more is an error" if request.activations == "cpu" else "the rest spilled to NVMe"
            rows.append(("  activations", f"{megabytes(placement.activation_bytes)}, {beyond}"))
        return rows + self._rows_of_a_step()

    def _rows_of_a_step(self) -> list[tuple[str, str]]:
        request = self.request
        if not self.num_trainable:
            return [("predicted read per forward", self._moved(self.predicted_read_bytes_per_step))]
        workers = f", {request.update_workers} at a time" if request.update_workers > 1 else ""
        rows = [("optimizer update", _UPDATE[self.update] + workers)]
        if request.num_micro_batches > 1:
            order = "all through a unit before the next" if self.traffic.is_vertical else "one after the other"
            rows.append(("micro-batches", f"{request.num_micro_batches}, {order}"))
        return [
            *rows,
            ("predicted read per step", self._moved(self.predicted_read_bytes_per_step)),
            ("predicted written per step", self._moved(self.predicted_write_bytes_per_step)),
            ("predicted time of a step", self._time()),
            ("drive life", self._life()),
        ]

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
        if self.predicted_link_seconds is not None:
            computing = f"copies to and from the GPU {self.predicted_link_seconds:.2f} s, {computing}"
        return f"{'at least ' if compute is None else ''}{seconds:.2f} s: {reading}, {computing}"

    def _life(self) -> str:
        written = 1000 * self.predicted_write_bytes_per_step / 1e12
        steps = self.predicted_drive_life_steps
        if not written:
            return "nothing is written in a step"
        text = f"{written:,.3f} TB written per 1000 steps"
        return text if steps is None else f"{steps:,} steps until {self.drive_tbw:g} TB are written; {text}"

    @property
    def states_bytes(self) -> dict[str, int]:
        """Bytes stored per tier."""
        return {tier: sum(kinds.values()) for tier, kinds in self.resting_bytes.items()}

    def _kinds(self, tier: str) -> str:
        found = self.resting_bytes[tier]
        return ", ".join(f"{_KINDS.get(kind, kind)} {megabytes(size)}" for kind, size in found.items() if size)

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {value}" for what, value in rows)


_adapter = functools.cache(TypeAdapter)  # building one takes 16 ms, a hundred times as long as using it


def as_record(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values. `of_record` is the reverse."""
    record: dict[str, Any] = _adapter(Plan).dump_python(plan, mode="json")
    # A computed value, for other readers of the file; `of_record` drops it.
    return record | {"predicted_seconds": plan.predicted_step_seconds}


def of_record(record: Mapping[str, Any]) -> Plan:
    """Make a plan from the result of `as_record`.

    Raises:
        KeyError, TypeError, ValueError: ``record`` is not such a result.
    """
    known = {name: value for name, value in record.items() if name != "predicted_seconds"}
    found: Plan = _adapter(Plan).validate_python(known)
    return found


class PlanTracker:
    """Refines the plan that was made at start."""

    def __init__(self, plan: Plan) -> None:
        """``plan``: for the expected order of units, with predictions."""
        self._plan = plan
        self._reports: deque[StepReport] = deque(maxlen=_REMEMBERED)
        self._num_steps = 0
        self._least_pause = math.inf

    def plan(self, schedule: PrefetchSchedule, traffic: Traffic) -> Plan:
        """The plan for the recorded prefetch schedule and the kind of the last step, with times of the steps so far."""
        # Predicting simulates a step, so it is done only if something has changed.
        known = self._plan
        order, backward_start = schedule.record
        if (known.order, known.backward_start, known.traffic) != (order, backward_start, traffic):
            changed = dataclasses.replace(known, order=order, backward_start=backward_start, traffic=traffic)
            self._plan = changed.predicted()
        return self._plan

    def on_step(self, report: StepReport) -> None:
        """Take the times of a step that has ended. A skipped step has made no update, so it does not count."""
        if report.is_skipped:
            return
        self._num_steps += 1
        self._least_pause = min(self._least_pause, report.other_seconds)
        if self._num_steps <= _WARM_UP:
            return
        self._reports.append(report)
        steady = _steady(self._reports)
        usual = self._least_pause  # of all steps: the few counted ones may all have come after a pause
        if len(self._reports) >= _ENOUGH:
            usual = statistics.median([report.other_seconds for report in steady])
        # An unusual pause of the script before a step, such as an evaluation, is no part of it.
        steps = [(r, max(0.0, r.other_seconds - usual)) for r in steady]
        # The longest of three busy times, which overlap: the training thread's, the GPU's, and the update stream's.
        busy = [max(r.compute_seconds - pause, r.compute_busy_seconds, r.optimizer_seconds) for r, pause in steps]
        # Speed of the drives: all bytes by all busy time. Compute: the median. Overlap: how far a step is from the
        # ideal, in which the longer of compute and I/O hides the other. With I/O 2 s, compute 3 s and a step of 3.6 s,
        # it is 1.2.
        moved = sum([report.read_bytes + report.write_bytes for report in steady])
        drive_seconds = sum([report.drive_busy_seconds for report in steady])
        longest = [max(seconds, report.drive_busy_seconds) for seconds, report in zip(busy, steady, strict=True)]
        factors = [(r.seconds - pause) / most for (r, pause), most in zip(steps, longest, strict=True) if most]
        self._plan = dataclasses.replace(
            self._plan,
            seen_bytes_per_second=moved / drive_seconds if moved and drive_seconds else None,
            compute_seconds=statistics.median(busy),
            overlap_factor=statistics.median(factors) if factors else 1.0,
        )


def _steady(reports: Collection[StepReport]) -> list[StepReport]:
    """The half of the steps before which the script took least time: no pauses, evaluations or checkpoints."""
    return sorted(reports, key=lambda report: report.other_seconds)[: (len(reports) + 1) // 2]
