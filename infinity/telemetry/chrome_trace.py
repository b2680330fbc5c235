"""A timeline as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format: a JSON object whose "traceEvents" are complete events ("ph": "X", a begin and a duration in microseconds) on
one thread for each row, and metadata events ("ph": "M") that name process and threads. Complete events of one thread may
nest but not overlap: the rows of a timeline don't.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.telemetry.timeline import Row, Span, StepSpan, Timeline
from swapper.volumes.publish import replacing

KEY = "infinity.timeline"


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
        raise ConfigError.value(
            KEY, str(path), f"it cannot be written: {error.strerror or error}", cure=cure
        ) from error
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError.value(KEY, str(path), "it is no regular file", cure=cure)


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the timeline as it is now. ``path`` is replaced at once, or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as file:
        file.write(b'{"displayTimeUnit": "ms",\n')
        file.write(f'"otherData": {json.dumps({"dropped_spans": timeline.num_dropped})},\n'.encode())
        file.write(b'"traceEvents": [')
        separator = "\n"
        for event in _events(timeline):
            file.write((separator + json.dumps(event)).encode())
            separator = ",\n"
        file.write(b"\n]}\n")


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    process = os.getpid()
    dropped = f" (the oldest {timeline.num_dropped} spans were dropped)" if timeline.num_dropped else ""
    yield _metadata("process_name", process, 0, {"name": f"infinity{dropped}"})
    for row in Row:
        yield _metadata("thread_name", process, row + 1, {"name": row.title})
        yield _metadata("thread_sort_index", process, row + 1, {"sort_index": row.value})
    zero = timeline.began_seconds
    for step in timeline.steps():
        yield _event(f"step {step.report.step}", process, Row.STEPS, step, zero, _step_arguments(step))
    for row, spans in timeline.spans().items():
        for span in spans:
            yield _event(span.name, process, row, span, zero, _arguments(span))


def _metadata(name: str, process: int, thread: int, arguments: dict[str, object]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _event(
    name: str, process: int, row: Row, span: Span | StepSpan, zero: float, arguments: dict[str, object]
) -> dict[str, Any]:
    # Whole nanoseconds: rounded apart, a begin and a duration could end behind the next begin.
    begin, end = round((span.begin_seconds - zero) * 1e9), round((span.end_seconds - zero) * 1e9)
    return {
        "ph": "X",
        "name": name,
        "cat": row.title,
        "pid": process,
        "tid": row + 1,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "args": arguments,
    }


def _arguments(span: Span) -> dict[str, object]:
    arguments: dict[str, object] = {"step": span.step} if span.step else {}
    if span.row in (Row.READS, Row.WRITES):
        arguments |= {
            "bytes": span.num_bytes,
            "transfers": span.num_parts,
            "queued_ms": round(span.queued_seconds * 1e3, 3),
        }
    elif span.num_bytes:
        arguments["bytes"] = span.num_bytes
    return arguments


def _step_arguments(step: StepSpan) -> dict[str, object]:
    report = step.report
    is_number = report.loss is None or math.isfinite(report.loss)  # JSON has no NaN
    shares = ("compute_share", "drive_busy_share", "read_busy_share", "write_busy_share")
    return {
        "loss": report.loss if is_number else str(report.loss),
        **{name: round(getattr(report, name), 4) for name in shares},
        "read_bytes": report.read_bytes,
        "write_bytes": report.write_bytes,
        "bound_by": report.bound_by,
    }
