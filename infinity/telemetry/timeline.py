"""Who was busy when: spans of computing, waiting, transfers and updates, kept in bounded memory.

Knows names, seconds and bytes; must not know who records them, or how they are written down.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.telemetry.report import StepReport

_MAX_SPANS = 1 << 18
_MAX_STEPS = 1 << 14
_SPAN = np.dtype(
    [("begin", "f8"), ("end", "f8"), ("num_bytes", "i8"), ("queued_seconds", "f4"), ("name", "i4"), ("row", "i4")]
)


class Row(IntEnum):
    """Whose time a span is."""

    STEPS = 0
    COMPUTE = 1
    WAITING = 2
    READS = 3
    WRITES = 4
    OPTIMIZER = 5
    COPIES = 6

    @property
    def title(self) -> str:
        """What traces call it."""
        return self.name.lower()


@dataclass(frozen=True)
class Span:
    """One stretch of a row's time. The spans of a row do not overlap.

    Attributes:
        row: Whose time.
        name: What was done: phase and unit, or the extents whose bytes moved.
        begin_seconds: When it began, as ``time.perf_counter`` counts.
        end_seconds: When it ended.
        num_bytes: Bytes that moved.
        num_parts: So many transfers (or pieces of work) it stands for.
        queued_seconds: How long the first of them had been ready before somebody took it.
        step: In which step it ended, counted from 1; 0 if that is not known (any more).
    """

    row: Row
    name: str
    begin_seconds: float
    end_seconds: float
    num_bytes: int = 0
    num_parts: int = 1
    queued_seconds: float = 0.0
    step: int = 0


@dataclass(frozen=True)
class StepSpan:
    """One step: from the end of the one before (or its first forward) to its own end, and its report."""

    begin_seconds: float
    end_seconds: float
    report: StepReport


class Timeline:
    """A ring of spans: when it is full, every new one drops the oldest. Thread safe.

    A full ring takes about 10 MB, which the host memory budget does not cover.
    """

    def __init__(self, max_spans: int = _MAX_SPANS) -> None:
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        self._ring: npt.NDArray[Any] = np.zeros(max_spans, dtype=_SPAN)  # the system backs it as it is used
        self._num_added = 0
        self._names: dict[str, int] = {}
        self._steps: deque[StepSpan] = deque(maxlen=_MAX_STEPS)
        self.began_seconds = time.perf_counter()

    def add(
        self, row: Row, name: str, begin: float, end: float, *, num_bytes: int = 0, queued_seconds: float = 0.0
    ) -> None:
        """Record that ``row`` was busy with ``name`` from ``begin`` to ``end``; it may have been with other things too."""
        with self._lock:
            number = self._names.setdefault(name, len(self._names))
            place = self._num_added % len(self._ring)
            self._ring[place] = (begin, end, num_bytes, queued_seconds, number, row)
            self._num_added += 1

    def add_step(self, begin: float, end: float, report: StepReport) -> None:
        """Record a step that has ended."""
        with self._lock:
            self._steps.append(StepSpan(begin, end, report))

    @property
    def num_dropped(self) -> int:
        """Spans that are gone because newer ones needed their place."""
        return max(0, self._num_added - len(self._ring))

    def steps(self) -> list[StepSpan]:
        """The steps of which at least the end is still there, oldest first."""
        with self._lock:
            steps = list(self._steps)
            oldest = self._ring[self._num_added % len(self._ring)]["end"] if self.num_dropped else -np.inf
        return [step for step in steps if step.end_seconds > oldest]

    def spans(self) -> dict[Row, list[Span]]:
        """All rows but the steps', oldest span first, cut so that none overlaps the one before it: see `_cut`."""
        with self._lock:
            kept = np.roll(self._ring, -(self._num_added % len(self._ring))) if self.num_dropped else self._ring
            kept = kept[: self._num_added].copy()
            names = list(self._names)
        steps = self.steps()
        ends = np.array([step.end_seconds for step in steps])
        numbers = [step.report.step for step in steps]
        result: dict[Row, list[Span]] = {}
        for row in Row:
            if row is Row.STEPS:
                continue
            of_row = kept[kept["row"] == row]
            of_row = of_row[np.argsort(of_row["begin"], kind="stable")]
            places = np.searchsorted(ends, of_row["end"])
            at = [numbers[place] if place < len(numbers) else 0 for place in places]
            found = (
                Span(row, names[name], begin, end, num_bytes, 1, queued, step)
                for (begin, end, num_bytes, queued, name, _), step in zip(of_row.tolist(), at, strict=True)
            )
            result[row] = list(_cut(found))
        return result


def _cut(spans: Iterator[Span]) -> Iterator[Span]:
    """Spans in the order of their begin, made disjoint. What they cover together and their bytes stay the same.

    Transfers overlap, because several are at the drive at once. Each keeps the time that those before it leave: from
    their end on. One that leaves no time gives its bytes to the span that covers it; one that follows another of the same
    name and step without a gap is joined to it.
    """
    last: Span | None = None
    for span in spans:
        if last is not None and span.begin_seconds <= last.end_seconds:
            is_covered = span.end_seconds <= last.end_seconds
            if span.step == last.step and (is_covered or span.name == last.name):
                last = replace(
                    last,
                    end_seconds=max(last.end_seconds, span.end_seconds),
                    num_bytes=last.num_bytes + span.num_bytes,
                    num_parts=last.num_parts + span.num_parts,
                )
                continue
            span = replace(span, begin_seconds=last.end_seconds, end_seconds=max(last.end_seconds, span.end_seconds))
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
