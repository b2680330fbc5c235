"""The report of a run: one page of HTML without scripts, which needs no network."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from infinity.errors import size
from infinity.metrics import Run
from infinity.plan.plan import Plan
from infinity.reporting import charts
from infinity.reporting.verdict import Verdict, judge, known_plan, steady_steps

_TEMPLATE = "page.html.j2"
# The newest marks and steps. A table of 100,000 steps would make the page slow to open; the charts have all of them.
_MOST_MARKS = 200
_MOST_ROWS = 50


def render(run: Run) -> str:
    """Return the page as text.

    Raises:
        LibraryError: matplotlib is not installed.
    """
    from jinja2 import Environment, PackageLoader

    plan = known_plan(run)
    verdict = judge(run)
    steps = run.steps
    # Charts of no steps would be empty axes.
    drawn = []
    if steps:
        drawn = [charts.losses(steps, run.marks), charts.breakdown(steps)]
        drawn += [charts.throughput(steps, plan), charts.memory(steps, plan)]
    # `autoescape`: names of runs and notes are anybody's text.
    environment = Environment(loader=PackageLoader("infinity.reporting", "."), autoescape=True, trim_blocks=True)
    return environment.get_template(_TEMPLATE).render(
        name=str(run.directory.absolute()),
        verdict=verdict,
        accuracy=_accuracy(verdict, run),
        facts=facts(run, plan, "ended" if run.has_ended else "not ended"),
        charts=drawn,
        marks=run.marks[-_MOST_MARKS:],
        time_of=lambda mark: datetime.fromtimestamp(mark.seconds).strftime("%Y-%m-%d %H:%M:%S"),
        num_more_marks=max(0, len(run.marks) - _MOST_MARKS),
        steps=steps[-_MOST_ROWS:],
        plan=None if plan is None else str(plan),
        config=_json(run.start.get("config")),
        machine=_json(run.start.get("machine")),
    )


def _accuracy(verdict: Verdict, run: Run) -> str:
    measured = verdict.measured_seconds
    if measured is None:
        return ""
    text = f"A step took {measured:.3g} s on average"
    if verdict.predicted_seconds is not None:
        text += f"; the plan predicts {verdict.predicted_seconds:.3g} s"
    # The plan predicts steady steps.
    steps = steady_steps(run.steps)
    moved = sum(step.read_bytes + step.write_bytes for step in steps)
    predicted = sum(step.predicted_read_bytes + step.predicted_write_bytes for step in steps)
    if moved and predicted:
        text += f", and {(predicted / moved - 1):+.1%} of the bytes that were moved".replace("%", " %")
    return f"{text}."


def facts(run: Run, plan: Plan | None, state: str) -> dict[str, str]:
    """Return the figures of a run, by name."""
    steps = steady_steps(run.steps)
    found = {"steps": str(run.steps[-1].step if run.steps else 0), "state": state}
    if run.num_starts > 1:
        found["starts"] = str(run.num_starts)
    if plan is not None:
        found["parameters"] = f"{plan.num_parameters:,}"
    if steps:
        # A damaged log may have steps without a duration.
        seconds = sum(step.seconds for step in steps) or 1.0
        found["step"] = f"{seconds / len(steps):.3g} s"
        if tokens := sum(step.num_tokens or 0 for step in steps):
            found["tokens per second"] = f"{tokens / seconds:,.0f}"
        elif samples := sum(step.num_samples or 0 for step in steps):
            found["samples per second"] = f"{samples / seconds:,.3g}"
        budget = "" if plan is None else f", of a budget of {size(plan.host_budget_bytes)}"
        # Peaks are of all steps, averages of the steady ones.
        buffers = max(step.buffers_peak_bytes for step in run.steps)
        found["engine's host buffers, peak"] = f"{size(buffers)}{budget}"
        found["process memory, peak"] = size(max(step.host_peak_bytes for step in run.steps))
        device = [step.device_peak_bytes for step in run.steps if step.device_peak_bytes is not None]
        if device:
            found["GPU memory, peak"] = size(max(device))
        last = run.steps[-1]
        found["last step"] = f"{size(last.read_bytes)} read, {size(last.write_bytes)} written"
        found["written to drives"] = size(sum(step.write_bytes for step in run.steps))
    if plan is not None and plan.predicted_drive_life_steps is not None:
        found["drive life"] = f"{plan.predicted_drive_life_steps:,} steps"
    if run.num_damaged:
        found["damaged lines of the log"] = str(run.num_damaged)
    return found


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)
