"""One step of a trace that `infinity.timeline` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.numerics.plain_data import UNREADABLE

_MOST_BYTES = 256 << 20
"""A larger trace is not read: Perfetto shows it."""


@dataclass(frozen=True)
class StepTrace:
    """Who was busy when.

    Attributes:
        step: its number.
        seconds: how long it took.
        rows: for each row its spans, begin and end in seconds of the step; those that touch are one.
    """

    step: int
    seconds: float
    rows: Mapping[str, list[tuple[float, float]]] = field(default_factory=dict)


def last_step(path: Path) -> StepTrace | None:
    """The last step of a trace; None if there is no such file, or if it is something else."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        spans = [event for event in events if event["ph"] == "X"]
        step = max((event for event in spans if names[event["tid"]] == "steps"), key=lambda event: event["ts"])
        return _cut(step, [(names[event["tid"]], event) for event in spans if event is not step])
    except (OSError, *UNREADABLE):
        return None


def _cut(step: Mapping[str, Any], spans: list[tuple[str, Any]]) -> StepTrace:
    begin, end = step["ts"], step["ts"] + step["dur"]
    least = (end - begin) / 2000  # narrower than a pixel
    rows: dict[str, list[tuple[float, float]]] = {}
    for row, event in sorted(spans, key=lambda each: float(each[1]["ts"])):
        first, last = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if row == "steps" or first >= last:
            continue
        found = rows.setdefault(row, [])
        if found and first - found[-1][1] < least:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    seconds = {row: [((a - begin) / 1e6, (b - begin) / 1e6) for a, b in found] for row, found in rows.items()}
    return StepTrace(int(step["name"].removeprefix("step ")), (end - begin) / 1e6, seconds)
