"""The printed report: one row per participant, and the figures the step is held against."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from bench.case import CaseResult, Outcome

IN_MEMORY = "in_memory"
RECOMPUTING = "in_memory_recomputing"
"""Names of the participants that are compute alone. The second computes what a vertical step does."""

_GIGA = 1e9
# Bytes are per parameter and step. `peak` is the group's from start to end, `steady` that of the counted turns.
_COLUMNS = ("step (min-max)", "bound", "step/bound", "read", "written", "predicted", "peak", "steady", "VmHWM")


def machine_table(facts: Mapping[str, Any]) -> Table:
    """Machine and versions, one per line."""
    table = Table(title="Machine", show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), f"{value / _GIGA:.1f} GB" if name == "memory_bytes" else str(value))
    return table


def case_table(result: CaseResult, alone: Outcome | None) -> Table:
    """Step times, bytes and memory of every participant of one case."""
    table = Table(title=result.case.label, title_justify="left")
    table.add_column("")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    # Compute alone may have been measured in a case before this one.
    before = [alone] if alone is not None and alone not in result.outcomes else []
    for outcome in [*before, *result.outcomes]:
        if not outcome.seconds_per_step:
            table.add_row(outcome.name, "failed", *[""] * 8)
            continue
        # They move no bytes, so they have no bound.
        if outcome.name in (IN_MEMORY, RECOMPUTING):
            table.add_row(outcome.name, _times(outcome), "", "", "", "", "", *_memory(outcome))
            continue
        bound = bound_seconds(result, outcome, alone)
        parameters = outcome.description["num_parameters"]
        table.add_row(
            outcome.name,
            _times(outcome),
            "" if bound is None else f"{bound:.2f} s",
            "" if bound is None else f"{outcome.median_seconds / bound:.2f}",
            f"{outcome.read_bytes_per_step / parameters:.2f} B",
            f"{outcome.write_bytes_per_step / parameters:.2f} B",
            _predicted(outcome, parameters),
            *_memory(outcome),
        )
    return table


def remarks(result: CaseResult, alone: Outcome | None) -> list[str]:
    """Sentences under the table: what bounds the step, deviation from the prediction, ratios to the peers, failures."""
    lines = []
    ours = result.outcome("ours")
    if ours is not None:
        lines += _ours_remarks(result, ours, alone)
    if result.drive_samples:
        speeds = [sample.total_bytes_per_second / _GIGA for sample in result.drive_samples]
        lines.append(
            f"fio in the same proportion, between the turns: {statistics.median(speeds):.2f} GB/s read and written "
            f"together ({min(speeds):.2f}-{max(speeds):.2f})"
        )
    lines += [f"{outcome.name} failed: {outcome.error}" for outcome in result.outcomes if outcome.error]
    return lines


def bound_seconds(result: CaseResult, outcome: Outcome, alone: Outcome | None) -> float | None:
    """The slower of the outcome's bytes at the drive's speed and compute alone; None where one of them is unknown."""
    at_drive_speed = result.bytes_bound_seconds(outcome)
    if at_drive_speed is None or alone is None:
        return None
    # Drive and compute work side by side in the best case, so the slower one is the bound.
    return max(at_drive_speed, alone.median_seconds)


def find_alone(results: Sequence[CaseResult], result: CaseResult) -> Outcome | None:
    """The compute-alone run that `result` is held against, from the same case or from one before it.

    The one that recomputes, if our steps went vertically and so had to.
    """
    ours = result.outcome("ours")
    is_vertical = ours is not None and ours.schedule == "vertical"
    # A vertical step computes each block once more in backward.
    wanted = (RECOMPUTING, IN_MEMORY) if is_vertical else (IN_MEMORY,)
    # Compute does not depend on the drive: the same workload at another speed will do.
    same = [each for each in results if each.case.workload == result.case.workload and each is not result]
    for name in wanted:
        for each in [result, *same]:
            if (outcome := each.outcome(name)) is not None:
                return outcome
    return None


def _ours_remarks(result: CaseResult, ours: Outcome, alone: Outcome | None) -> list[str]:
    lines = []
    at_drive_speed = result.bytes_bound_seconds(ours)
    if at_drive_speed is not None and alone is not None:
        lines.append(
            f"bound of ours: bytes at the drive's speed {at_drive_speed:.2f} s, "
            f"compute alone ({alone.name}) {alone.median_seconds:.2f} s"
        )
    for word, measured in (("read", ours.read_bytes_per_step), ("write", ours.write_bytes_per_step)):
        predicted = ours.description.get(f"predicted_{word}_bytes")
        if predicted:
            lines.append(f"{word}: measured is {100 * (measured / predicted - 1):+.2f} % off the engine's prediction")
    off = [
        report["seconds"] / report["predicted_seconds"] - 1
        for turn in ours.turns
        for report in turn.get("reports", [])
        if report.get("predicted_seconds")
    ]
    if off:
        lines.append(
            f"step time: measured is {100 * statistics.median(off):+.1f} % off what the plan had said before each step "
            f"({100 * min(off):+.1f} to {100 * max(off):+.1f} %)"
        )
    if ours.busy_shares:
        shares = {name.removesuffix("_share"): f"{100 * share:.0f} %" for name, share in ours.busy_shares.items()}
        lines.append(
            f"busy, as a share of a step (median of the engine's reports): compute {shares['compute']}, "
            f"drive {shares['drive_busy']} (reads {shares['read_busy']}, writes {shares['write_busy']}), "
            f"optimizer {shares['optimizer']}; bound by: {ours.bound_by}"
        )
    for outcome in result.outcomes:
        if outcome.name in ("ours", IN_MEMORY, RECOMPUTING) or not outcome.seconds_per_step:
            continue
        ratio = f"{outcome.name} / ours: step {outcome.median_seconds / ours.median_seconds:.2f}"
        if outcome.peak_bytes and ours.peak_bytes:
            ratio += f", peak host memory {outcome.peak_bytes / ours.peak_bytes:.2f}"
        lines.append(ratio)
    return lines


def _times(outcome: Outcome) -> str:
    times = outcome.seconds_per_step
    return f"{outcome.median_seconds:.2f} s ({min(times):.2f}-{max(times):.2f})"


def _predicted(outcome: Outcome, parameters: int) -> str:
    read, written = (outcome.description.get(f"predicted_{word}_bytes") for word in ("read", "write"))
    return "" if read is None or written is None else f"{read / parameters:.2f} / {written / parameters:.2f}"


def _memory(outcome: Outcome) -> list[str]:
    sizes = (outcome.peak_bytes, outcome.steady_peak_bytes, outcome.high_water_bytes)
    return ["" if size is None else f"{size / _GIGA:.2f} GB" for size in sizes]
