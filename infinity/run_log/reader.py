"""Reads the log of a run, whole or while it is being written.

Knows records; must not know how they are shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infinity.errors import CheckpointError, InfinityError
from infinity.numerics.plain_data import UNREADABLE
from infinity.run_log.writer import FILE_NAME, FORMAT
from infinity.telemetry.report import StepReport
from infinity.version import __version__

_FIELDS = {each.name: str(each.type) for each in fields(StepReport)}
_LAST_TIME = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
_GOES_BACK = ("rollback", "load")
_MARKS = ("lr", "spike", "note", "save", *_GOES_BACK)


@dataclass(frozen=True)
class Mark:
    """Something that happened.

    Attributes:
        kind: "restart", "end", "skipped", "lr", "spike", "note", "rollback", "load" or "save".
        step: the last step before it.
        seconds: when, as ``time.time`` counts.
        text: what, in words.
    """

    kind: str
    step: int
    seconds: float
    text: str


@dataclass
class Run:
    """What a log says.

    Attributes:
        directory: of the run.
        start: the record of the last start: "config", "machine".
        plan: the plan as it was known last.
        steps: of each step the report that counts: steps that were taken back, or made again, are not there.
        times: when each of `steps` ended, as ``time.time`` counts.
        marks: what happened, in order.
        num_starts: how many engines have written.
        num_damaged: lines that cannot be read: cut off by a full disk or a power cut.
        has_ended: whether the last engine was closed.
    """

    directory: Path
    start: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    steps: list[StepReport] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    num_starts: int = 0
    num_damaged: int = 0
    has_ended: bool = False

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in a record.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is not what this version writes.
        """
        kind, step, seconds = str(record["kind"]), _value("step", record["step"]), _time(record["time"])
        if kind == "start":
            self._begin(record, step, seconds)
        elif kind == "plan":
            self.plan = dict(record["plan"])
        elif kind == "step":
            report = StepReport(**{name: _value(name, record[name]) for name in _FIELDS if name in record})
            self._forget_after(step - 1)
            self.steps.append(report)
            self.times.append(seconds)
            if report.is_skipped:
                self._mark("skipped", step, seconds, "gradients were not finite: the step changed nothing")
        elif kind == "end":
            self.has_ended = True
        elif kind in _MARKS:
            self._mark(kind, step, seconds, str(record["text"]))
            if kind in _GOES_BACK:
                self._forget_after(_value("step", record["to"]))

    def _begin(self, record: Mapping[str, Any], step: int, seconds: float) -> None:
        if record["format"] != FORMAT:
            by = str(record.get("version", "an earlier version"))[:40]
            problem = f"has format {record['format']!r}, written by infinity {by}; this is infinity {__version__}, which reads"
            raise CheckpointError.of_log(self.directory / FILE_NAME, f"{problem} format {FORMAT}")
        for name in ("config", "machine"):
            if not isinstance(record.get(name, {}), Mapping):
                raise TypeError(f"'{name}' is a {type(record[name]).__name__}")
        self.start, self.plan = dict(record), dict(record["plan"])
        self.num_starts += 1
        self.has_ended = False
        if self.num_starts > 1:
            last = self.steps[-1].step if self.steps else 0
            lost = f"; the last one before was {last}" if last != step else ""
            self._mark("restart", step, seconds, f"started again from step {step}{lost}")
        if step:  # else the engine may still load a checkpoint, or begin anew: the next record says
            self._forget_after(step)

    def _mark(self, kind: str, step: int, seconds: float, text: str) -> None:
        self.marks.append(Mark(kind, step, seconds, text))

    def _forget_after(self, step: int) -> None:
        while self.steps and self.steps[-1].step > step:
            self.steps.pop()
            self.times.pop()


class RunReader:
    """Reads on where it stopped.

    Attributes:
        run: what has been read so far.
    """

    def __init__(self, directory: Path) -> None:
        """``directory``: of the run, or the log itself.

        Raises:
            CheckpointError: there is no log.
        """
        self._path = directory if directory.is_file() else directory / FILE_NAME
        if not self._path.is_file():
            problem = "there is no log of a run" if self._path.parent.is_dir() else "there is no such directory"
            cure = "Name the directory that the config's infinity.run_log names"
            raise CheckpointError.of_log(self._path, problem, cure=cure)
        self.run = Run(self._path.parent)
        self._offset = 0
        self._rest = b""

    def read_on(self) -> bool:
        """Read what has been written since; returns whether that was anything. An unfinished line waits for its end.

        Raises:
            CheckpointError: the file cannot be read, or is of a newer version.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            raise CheckpointError.of_log(self._path, f"cannot be read: {error.strerror or error}") from error
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in filter(None, lines):
            try:
                self.run.add(json.loads(line))
            except CheckpointError:  # of another version, not damaged
                raise
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self.run.num_damaged += 1
        return bool(data)

    @property
    def has_writer(self) -> bool:
        """Whether an engine holds the log: it trains, or is being built. Where there are no locks, whether none has ended."""
        with self._path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return not self.run.has_ended
        return False

    def finish(self) -> None:
        """There is no more to come: an unfinished line is a damaged one."""
        self.run.num_damaged += bool(self._rest)
        self._rest = b""


def read_run(directory: Path) -> Run:
    """Read a whole log. A last line that is cut off is left out, and counted unless somebody is writing it.

    Raises:
        CheckpointError: there is none, or it has no start.
    """
    reader = RunReader(directory)
    reader.read_on()
    if not reader.has_writer:
        reader.finish()
    if not reader.run.num_starts:
        raise CheckpointError.of_log(
            reader.run.directory / FILE_NAME, "has no start: it is empty, damaged, or no log of a run"
        )
    return reader.run


@contextlib.contextmanager
def showing(directory: Path) -> Iterator[None]:
    """What a log holds that no engine writes is a `CheckpointError` where it is shown."""
    try:
        yield
    except InfinityError:
        raise
    except UNREADABLE as error:
        problem = f"holds values that no engine writes ({type(error).__name__}: {str(error)[:100]})"
        raise CheckpointError.of_log(directory / FILE_NAME, problem) from error


def _time(value: Any) -> float:
    """As ``time.time`` counts.

    Raises:
        TypeError, ValueError: it is no time.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"no time: {value!r}")
    if not 0 <= value <= _LAST_TIME:
        raise ValueError(f"no time: {value!r}")
    return float(value)


def _value(name: str, value: Any) -> Any:
    """As it was before it became JSON."""
    if name == "lr":
        return tuple(float(each) for each in value)
    kind, _, optional = _FIELDS[name].partition(" | ")
    if value is None and optional:
        return None
    if kind == "float" and not isinstance(value, bool) and isinstance(value, int | float | str):
        return float(value)
    if type(value).__name__ != kind or (kind == "int" and not 0 <= value < 1 << 63):
        raise TypeError(f"'{name}' is {str(value)[:40]!r}, not a {kind}")
    return value
