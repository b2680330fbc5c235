"""Records spans of computing, waiting, transfers and updates in bounded memory, and writes them as a trace.

[Note: trace format] Perfetto (ui.perfetto.dev) and chrome://tracing open the file: a JSON object whose "traceEvents" are
complete events ("ph": "X", a begin and a duration in microseconds) on threads, and metadata events ("ph": "M") that name
process and threads. Complete events of one thread may nest but not overlap. Transfers do overlap, because several are at the
drive at once: so each row has as many threads as it needs, and a span goes to the first that is free.
"""

from __future__ import annotations

import bisect
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from infinity.errors import ConfigError
from infinity.metrics.report import StepReport
from swapper import Direction, TransferRecord
from swapper.volumes.publish import replacing

logger = logging.getLogger(__name__)
KEY = "infinity.timeline"
# The newest spans and steps are kept, about 15 MB together.
_MAX_SPANS = 1 << 16
_MAX_STEPS = 1 << 14
_THREADS_OF_A_ROW = 1000
"""Numbers of threads that a row has for itself in the file."""


class Row(IntEnum):
    """The row of a span: what was busy."""

    STEPS = 0
    COMPUTE = 1
    WAITING = 2
    READS = 3
    WRITES = 4
    OPTIMIZER = 5
    COPIES = 6


class Span(NamedTuple):
    """Time in which a row was busy.

    Attributes:
        row: Whose time.
        name: What was done: phase and unit, or the extent whose bytes moved.
        begin_seconds: When it began, as ``time.perf_counter`` counts.
        end_seconds: When it ended.
        num_bytes: Bytes that moved.
        queued_seconds: How long it had been ready before somebody took it.
    """

    row: Row
    name: str
    begin_seconds: float
    end_seconds: float
    num_bytes: int = 0
    queued_seconds: float = 0.0


class Timeline:
    """The last spans: each new one beyond a fixed number drops the oldest. Any thread may call it.

    All of them take about 15 MB, which the host memory budget does not cover.
    """

    def __init__(self, path: Path, max_spans: int = _MAX_SPANS) -> None:
        """``path``: the file that `save` writes.

        Raises:
            ConfigError: it cannot be written.
        """
        check_writable(path)
        self._path = path
        self._lock = threading.RLock()  # see [Note: coming in between] in swapper.sync.reentry
        # A deque with `maxlen` drops from its other end: nobody waits when it is full.
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._num_added = 0
        self._steps: deque[tuple[Span, StepReport]] = deque(maxlen=_MAX_STEPS)
        self.began_seconds = time.perf_counter()

    def add(
        self, row: Row, name: str, begin: float, end: float, *, num_bytes: int = 0, queued_seconds: float = 0.0
    ) -> None:
        """Record that ``row`` was busy with ``name`` from ``begin`` to ``end``. Spans of a row may overlap."""
        with self._lock:
            self._spans.append(Span(row, name, begin, end, num_bytes, queued_seconds))
            self._num_added += 1

    def on_transfer(self, record: TransferRecord) -> None:
        """Record a transfer. Swappers call it as an observer."""
        row = Row.READS if record.direction is Direction.READ else Row.WRITES
        span = record.began_seconds, record.ended_seconds
        self.add(row, record.extent_name, *span, num_bytes=record.num_bytes, queued_seconds=record.queued_seconds)

    def add_step(self, begin: float, end: float, report: StepReport) -> None:
        """Record a step, from the end of the one before (or its first forward) to its own end."""
        with self._lock:
            self._steps.append((Span(Row.STEPS, f"step {report.step}", begin, end), report))

    @property
    def num_dropped(self) -> int:
        """Number of spans that newer ones have replaced."""
        return self._num_added - len(self._spans)

    def spans(self) -> list[Span]:
        """Return all spans but the steps, sorted by their beginning."""
        with self._lock:
            # Copied under the lock: a deque must not change while it is iterated.
            kept = list(self._spans)
        return sorted(kept, key=lambda span: span.begin_seconds)

    # ------------------------------------------------------------------------------------------------------- the file

    def save(self, path: Path | None = None) -> None:
        """Write the spans recorded so far, to ``path`` or to the timeline's own file.

        Raises:
            OSError: it cannot be written. An older file is kept.
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
        """As `save`, but an error is only logged: the trained weights matter more."""
        try:
            self.save()
        except OSError as error:
            logger.error("the timeline could not be written to %s: %s", self._path, error)

    def _events(self) -> Iterator[dict[str, Any]]:
        """See [Note: trace format]."""
        with self._lock:
            steps = list(self._steps)
        # Ends of steps are sorted, so a binary search finds the step in which a span ended. None: it ended after the
        # last one.
        ends = [span.end_seconds for span, _ in steps]
        numbers = [*(report.step for _, report in steps), None]
        # Example: reads 0-3, 1-2, 2-4 (ns). The first takes thread 0, the second thread 1, because thread 0 is busy
        # until 3. The third takes thread 1 again, which is free at 2.
        free_at: dict[Row, list[int]] = {row: [] for row in Row}  # of each thread of a row, in nanoseconds
        yield {"ph": "M", "pid": os.getpid(), "name": "process_name", "tid": 0, "args": {"name": "infinity"}}
        for span, report in steps:
            yield self._event(span, _arguments_of_step(report), free_at[Row.STEPS])
        for span in self.spans():
            step = numbers[bisect.bisect_left(ends, span.end_seconds)]  # in which it ended
            yield self._event(span, _arguments(span, step), free_at[span.row])
        for row, threads in free_at.items():
            for number in range(max(len(threads), 1)):
                named = {"ph": "M", "pid": os.getpid(), "tid": _thread(row, number)}
                yield {**named, "name": "thread_name", "args": {"name": row.name.lower()}}
                yield {**named, "name": "thread_sort_index", "args": {"sort_index": _thread(row, number)}}

    def _event(self, span: Span, arguments: dict[str, object], free_at: list[int]) -> dict[str, Any]:
        # Whole nanoseconds: rounded apart, a begin and a duration could end behind the next begin.
        begin, end = (round((at - self.began_seconds) * 1e9) for at in (span.begin_seconds, span.end_seconds))
        number = next((number for number, until in enumerate(free_at) if until <= begin), len(free_at))
        # Replaces the entry of a thread, or appends one if `number` is the length.
        free_at[number : number + 1] = [end]
        what = {"ph": "X", "name": span.name, "cat": span.row.name.lower(), "pid": os.getpid()}
        when = {"tid": _thread(span.row, number), "ts": begin / 1e3, "dur": (end - begin) / 1e3}
        return {**what, **when, "args": arguments}


def _thread(row: Row, number: int) -> int:
    # Sorted by this number, rows are in the order of `Row`. 0 names the process.
    return 1 + row * _THREADS_OF_A_ROW + number


def _arguments(span: Span, step: int | None) -> dict[str, object]:
    arguments: dict[str, object] = {} if step is None else {"step": step}
    if span.row in (Row.READS, Row.WRITES):
        arguments["queued_ms"] = round(span.queued_seconds * 1e3, 3)
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
    """Check before training that a trace can be written.

    Raises:
        ConfigError: it cannot be written. No file is left behind.
    """
    cure = "Name a file in a directory that exists and may be written to, or set it to null"
    if os.path.exists(path) and not os.path.isfile(path):  # never raise, unlike the methods of `Path`
        raise ConfigError.value(KEY, str(path), "it is not a regular file", cure=cure)
    try:
        # The very thing that will happen in the end: permissions, read-only file systems and quotas all show up.
        # A name of this process alone. `replacing` writes the real trace in the same directory.
        beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
        beside.touch(exist_ok=False)
        beside.unlink()
    except OSError as error:
        problem = f"it cannot be written: {error.strerror or error}"
        raise ConfigError.value(KEY, str(path), problem, cure=cure) from error
