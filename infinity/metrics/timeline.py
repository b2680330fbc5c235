"""Who was busy when: spans of computing, waiting, transfers and updates, in bounded memory; and their file.

[Note: trace format] Perfetto (ui.perfetto.dev) and chrome://tracing open the file: a JSON object whose "traceEvents" are
complete events ("ph": "X", a begin and a duration in microseconds) on one thread for each row, and metadata events
("ph": "M") that name process and threads. Complete events of one thread may nest but not overlap: the rows don't.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.errors import ConfigError
from infinity.metrics.report import StepReport
from swapper import Direction, TransferRecord
from swapper.volumes.publish import replacing

logger = logging.getLogger(__name__)
KEY = "infinity.timeline"
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


class Timeline:
    """A ring of spans: when it is full, every new one drops the oldest. Thread safe.

    A full ring takes about 10 MB, which the host memory budget does not cover. It does not know the engine, which may be
    gone when the file is written.
    """

    def __init__(self, path: Path, max_spans: int = _MAX_SPANS) -> None:
        """``path``: the file for the end.

        Raises:
            ConfigError: it cannot be written.
        """
        check_writable(path)
        self._path = path
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        self._ring: npt.NDArray[Any] = np.zeros(max_spans, dtype=_SPAN)  # the system backs it as it is used
        self._num_added = 0
        self._names: dict[str, int] = {}
        self._steps: deque[tuple[Span, StepReport]] = deque(maxlen=_MAX_STEPS)
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

    def on_transfer(self, record: TransferRecord) -> None:
        """An observer of swappers."""
        row = Row.READS if record.direction is Direction.READ else Row.WRITES
        span = record.began_seconds, record.ended_seconds
        self.add(row, record.extent_name, *span, num_bytes=record.num_bytes, queued_seconds=record.queued_seconds)

    def add_step(self, begin: float, end: float, report: StepReport) -> None:
        """Record a step that has ended, from the end of the one before (or its first forward)."""
        with self._lock:
            self._steps.append((Span(Row.STEPS, f"step {report.step}", begin, end), report))

    @property
    def num_dropped(self) -> int:
        """Spans that are gone because newer ones needed their place."""
        return max(0, self._num_added - len(self._ring))

    def steps(self) -> list[tuple[Span, StepReport]]:
        """The steps of which at least the end is still there, oldest first, with their reports."""
        with self._lock:
            steps = list(self._steps)
            oldest = self._ring[self._num_added % len(self._ring)]["end"] if self.num_dropped else -np.inf
        return [(span, report) for span, report in steps if span.end_seconds > oldest]

    def spans(self) -> dict[Row, list[Span]]:
        """All rows but the steps', oldest span first, cut so that none overlaps the one before it: see `_cut`."""
        with self._lock:
            kept = np.roll(self._ring, -(self._num_added % len(self._ring))) if self.num_dropped else self._ring
            kept = kept[: self._num_added].copy()
            names = list(self._names)
        steps = self.steps()
        ends = np.array([span.end_seconds for span, _ in steps])
        numbers = [*(report.step for _, report in steps), 0]
        result: dict[Row, list[Span]] = {}
        for row in list(Row)[1:]:
            of_row = kept[kept["row"] == row]
            of_row = of_row[np.argsort(of_row["begin"], kind="stable")]
            places = np.searchsorted(ends, of_row["end"])
            found = (
                Span(row, names[name], begin, end, num_bytes, 1, queued, numbers[place])
                for (begin, end, num_bytes, queued, name, _), place in zip(of_row.tolist(), places, strict=True)
            )
            result[row] = list(_cut(found))
        return result

    # ------------------------------------------------------------------------------------------------------- the file

    def save(self, path: Path | None = None) -> None:
        """Write what has been recorded so far; to the file for the end if no other is named.

        Raises:
            OSError: it cannot be written; what was there before stays.
        """
        path = path or self._path
        with replacing(path) as file:
            file.write(b'{"displayTimeUnit": "ms",\n')
            file.write(f'"otherData": {json.dumps({"dropped_spans": self.num_dropped})},\n"traceEvents": ['.encode())
            for number, event in enumerate(self._events()):  # one after the other: all of them take memory
                file.write(((",\n" if number else "\n") + json.dumps(event)).encode())
            file.write(b"\n]}\n")
        if self.num_dropped:
            logger.warning(
                "the timeline in %s begins late: its oldest %d spans were dropped, because memory for it is bounded",
                path,
                self.num_dropped,
            )

    def save_at_end(self) -> None:
        """As `save`; a file that cannot be written is no reason to lose what was trained."""
        try:
            self.save()
        except OSError as error:
            logger.error("the timeline could not be written to %s: %s", self._path, error)

    def _events(self) -> Iterator[dict[str, Any]]:
        """See [Note: trace format]."""
        dropped = f" (the oldest {self.num_dropped} spans were dropped)" if self.num_dropped else ""
        process = {"ph": "M", "pid": os.getpid()}
        yield {**process, "name": "process_name", "tid": 0, "args": {"name": f"infinity{dropped}"}}
        for row in Row:
            yield {**process, "name": "thread_name", "tid": row + 1, "args": {"name": row.name.lower()}}
            yield {**process, "name": "thread_sort_index", "tid": row + 1, "args": {"sort_index": row.value}}
        for span, report in self.steps():
            yield self._event(span, _arguments_of_step(report))
        for spans in self.spans().values():
            for span in spans:
                yield self._event(span, _arguments(span))

    def _event(self, span: Span, arguments: dict[str, object]) -> dict[str, Any]:
        # Whole nanoseconds: rounded apart, a begin and a duration could end behind the next begin.
        begin, end = (round((at - self.began_seconds) * 1e9) for at in (span.begin_seconds, span.end_seconds))
        event = {"ph": "X", "name": span.name, "cat": span.row.name.lower(), "pid": os.getpid(), "tid": span.row + 1}
        return {**event, "ts": begin / 1e3, "dur": (end - begin) / 1e3, "args": arguments}


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


def _arguments(span: Span) -> dict[str, object]:
    arguments: dict[str, object] = {"step": span.step} if span.step else {}
    if span.row in (Row.READS, Row.WRITES):
        queued = round(span.queued_seconds * 1e3, 3)
        return arguments | {"bytes": span.num_bytes, "transfers": span.num_parts, "queued_ms": queued}
    return arguments | {"bytes": span.num_bytes} if span.num_bytes else arguments


def _arguments_of_step(report: StepReport) -> dict[str, object]:
    is_number = report.loss is None or math.isfinite(report.loss)  # JSON has no NaN
    shares = ("compute_share", "drive_busy_share", "read_busy_share", "write_busy_share")
    return {
        "loss": report.loss if is_number else str(report.loss),
        **{name: round(getattr(report, name), 4) for name in shares},
        **{name: getattr(report, name) for name in ("read_bytes", "write_bytes", "bound_by")},
    }


def check_writable(path: Path) -> None:
    """See that a trace can be written there, before the training that it is to show.

    Raises:
        ConfigError: it cannot; says why. Nothing is left behind.
    """
    cure = "Name a file in a directory that exists and may be written to, or set it to null"
    if os.path.isdir(path):  # never raises, unlike `Path.is_dir`
        raise ConfigError.value(KEY, str(path), "it is a directory", cure="Name a file in it")
    try:
        # The very thing that will happen in the end: permissions, read-only file systems and quotas all show up.
        beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
        beside.touch(exist_ok=False)
        beside.unlink()
    except OSError as error:
        problem = f"it cannot be written: {error.strerror or error}"
        raise ConfigError.value(KEY, str(path), problem, cure=cure) from error
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError.value(KEY, str(path), "it is no regular file", cure=cure)
