"""Judges what bound a run, and predicts what would have made it faster.

It has no formula of its own. It changes the memory, drives or speed of a plan, and compares the predictions.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.errors import ConfigError, size
from infinity.metrics import Run
from infinity.metrics.report import StepReport
from infinity.numerics.plain_data import UNREADABLE
from infinity.plan.cost_model import place_for_schedule
from infinity.plan.plan import Plan, of_record

_WARM_UP = 2
"""Steps at the start of a run that are left out of averages."""
_WORTH = 1.05
"""Less than this is no gain."""
_SHARES = (0.25, 0.5, 1.0)
"""Fractions of the bytes on drives: so much more memory is tried."""


@dataclass(frozen=True)
class Alternative:
    """What a step would take with other means.

    Attributes:
        means: in words.
        seconds: of a step, as the plan predicts it.
        gain: how many times faster than with those that were there.
    """

    means: str
    seconds: float
    gain: float


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        words: all of it, in a few sentences.
        bound_by: "read", "write", "compute", "optimizer", "other", or empty without steps.
        share: of a step's time, what that took.
        predicted_seconds, measured_seconds: of a step; None where it is not known.
        alternatives: what was tried, the best first.
    """

    words: str
    bound_by: str = ""
    share: float = 0.0
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    alternatives: tuple[Alternative, ...] = ()


def steady_steps(steps: Sequence[StepReport]) -> list[StepReport]:
    """Return the steps without the first and skipped ones; all of them if no others are left."""
    return [step for step in steps[_WARM_UP:] if not step.is_skipped] or [*steps]


def judge(run: Run) -> Verdict:
    """Return the verdict on a run."""
    steps = steady_steps(run.steps)
    if not steps:
        return Verdict("No step has ended yet.")
    # The most frequent one: a mean of busy times would hide that some steps were bound otherwise.
    bound_by = Counter(step.bound_by for step in steps).most_common(1)[0][0]
    total = sum(step.seconds for step in steps) or 1.0
    share = sum(step.busy_seconds[bound_by] for step in steps) / total
    known = known_plan(run)
    subject = _subject(bound_by, known)
    words = [f"{subject} bound this run: {share:.0%} of the step.".replace("%", " %")]
    measured = total / len(steps)
    # Without a plan, or without steps after the first ones, there is nothing to compare.
    if known is None or len(run.steps) <= _WARM_UP:
        words.append("There are too few steps to say what would make them faster.")
        return Verdict(" ".join(words), bound_by, share, None, measured)
    found = alternatives(known)
    words.append(_in_words(found))
    return Verdict(" ".join(words), bound_by, share, known.predicted_step_seconds, measured, found)


def alternatives(plan: Plan) -> tuple[Alternative, ...]:
    """Return what the plan predicts with other means, the fastest first; none if it cannot predict a step."""
    now = plan.predicted_step_seconds
    if not now or plan.compute_seconds is None:
        return ()
    tried: list[tuple[str, Plan]] = []
    # Drives and memory only help a plan that moves bytes.
    if plan.predicted_read_bytes_per_step + plan.predicted_write_bytes_per_step:
        tried.append(("a second drive", _with_two_drives(plan)))
        tried += _with_memory(plan)
    tried.append(("twice the speed of computing", dataclasses.replace(plan, compute_seconds=plan.compute_seconds / 2)))
    timed = [(means, seconds) for means, other in tried if (seconds := other.predicted_step_seconds)]
    found = [Alternative(means, seconds, now / seconds) for means, seconds in timed]
    return tuple(sorted(found, key=lambda each: each.seconds))


def _with_two_drives(plan: Plan) -> Plan:
    """Return the plan with a second drive: stripes go to both, so each direction is twice as fast."""
    # `seen`: as steps reached it; `bandwidth`: as `infinity profile` measured it.
    seen, speed = plan.seen_bytes_per_second, plan.bandwidth
    if speed is not None:
        names = ("read_bytes_per_second", "write_bytes_per_second", "mixed_bytes_per_second")
        speed = dataclasses.replace(speed, **{name: 2 * getattr(speed, name) for name in names})
    return dataclasses.replace(plan, seen_bytes_per_second=None if seen is None else 2 * seen, bandwidth=speed)


def _with_memory(plan: Plan) -> list[tuple[str, Plan]]:
    """Return plans with a larger budget, and with `keep_in_memory` if the config switches it off."""
    found: list[tuple[str, Plan]] = []
    request, resting = plan.request, plan.states_bytes["nvme"]
    # More memory only helps if the plan may keep weights and states in it.
    keeping = dataclasses.replace(request, keeps_in_memory=True)
    # Example: 40 GB of states on NVMe: 10, 20 and 40 GB more are tried.
    options = [(f"{size(share * resting)} more RAM", round(share * resting)) for share in _SHARES]
    if not request.keeps_in_memory:
        options = [
            ("infinity.keep_in_memory: true", 0),
            *((f"{means} and keep_in_memory: true", more) for means, more in options),
        ]
    for means, more in options:
        wanted = dataclasses.replace(keeping, budget_bytes=request.budget_bytes + more)
        schedule = "vertical" if plan.traffic.is_vertical else "ordinary"
        try:
            placement, _ = place_for_schedule(schedule, plan.sizes, wanted, plan.order)
        # No placement fits with this option.
        except ConfigError:
            continue
        found.append((means, dataclasses.replace(plan, request=wanted, placement=placement).predicted()))
    return found


def _in_words(found: Sequence[Alternative]) -> str:
    if not found:
        return "What would make it faster is not known yet."
    best: dict[str, Alternative] = {}
    most: dict[str, float] = {}
    for each in found:  # of several amounts of memory, the least that gives nearly as much as the most
        kind = "RAM" if "RAM" in each.means else each.means
        known = best.get(kind)
        # `found` begins with the largest gain, and with the smaller of two amounts that gain the same.
        if known is None or 0.95 * most.setdefault(kind, known.gain) < each.gain < known.gain:
            best[kind] = each
    worth = [each for each in best.values() if each.gain >= _WORTH]
    if not worth:
        return "Neither a second drive, nor more RAM, nor faster computing alone would make a step faster."
    first, *others = sorted(worth, key=lambda each: -each.gain)
    first_words = f"{first.means[0].upper()}{first.means[1:]} would give {first.gain:.1f}x"
    return "; ".join([first_words, *(f"{each.means} {each.gain:.1f}x" for each in others)]) + "."


def known_plan(run: Run) -> Plan | None:
    """Return the last plan of the log; None if this version cannot read it."""
    try:
        return of_record(run.plan)
    # Then the report has figures of the steps alone.
    except UNREADABLE:  # of another version
        return None


def _subject(bound_by: str, plan: Plan | None) -> str:
    if bound_by in ("read", "write"):
        what = "Reads" if bound_by == "read" else "Writes"
        if plan is None:
            return what
        kinds = plan.prediction_of_bytes().kinds
        column = 0 if bound_by == "read" else 1
        # The kind with the most bytes: "Reads of the optimizer state bound this run".
        kind = max(kinds, key=lambda name: kinds[name][column])
        return f"{what} of {'the ' if kind == 'optimizer state' else ''}{kind}" if kinds[kind][column] else what
    words = {
        "compute": "Computing",
        "optimizer": "The optimizer's updates",
        "other": "Code outside of the model (a data loader, say, or the engine's paging)",
    }
    return words[bound_by]
