"""Reads the log of a run, whole or while it is being written."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from infinity.errors import CheckpointError, InfinityError
from infinity.metrics.report import StepReport
from infinity.metrics.run_log import FILE_NAME, FORMAT
from infinity.numerics.plain_data import UNREADABLE
from infinity.version import __version__

# A log may be damaged or edited, so records are validated before they become figures and dates on a page.
_REPORT = TypeAdapter(StepReport)
_STEP: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(strict=True, ge=0, lt=1 << 63)])
# `datetime.fromtimestamp` raises beyond year 9999.
_LAST_TIME = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
_TIME: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=_LAST_TIME)])
# Records with a "to": the step that the run has gone back to.
_GOES_BACK = ("rollback", "load")
_MARKS = ("lr", "spike", "note", "save", *_GOES_BACK)


@dataclass(frozen=True)
class Mark:
    """An event of a run.

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
    """The content of a log.

    Attributes:
        directory: of the run.
        start: the record of the last start: "config", "machine".
        plan: the plan as it was known last.
        steps: of each step the report that counts: steps that were taken back, or made again, are not there.
        marks: what happened, in order.
        num_starts: how many engines have written.
        num_damaged: lines that cannot be read: cut off by a full disk or a power cut.
        has_ended: whether the last engine was closed.
    """

    directory: Path
    start: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    steps: list[StepReport] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    num_starts: int = 0
    num_damaged: int = 0
    has_ended: bool = False

    def add(self, record: Mapping[str, Any]) -> None:
        """Apply a record.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is not what this version writes.
        """
        kind, step = str(record["kind"]), _STEP.validate_python(record["step"])
        seconds = _TIME.validate_python(record["time"])
        if kind == "start":
            self._begin(record, step, seconds)
        elif kind == "plan":
            self.plan = dict(record["plan"])
        elif kind == "step":
            report = _REPORT.validate_python(dict(record))
            # A run that was killed and resumed makes some steps again. Example: steps 1 to 7, then a restart from step
            # 5: its steps 6 and 7 replace the old ones.
            self._forget_after(step - 1)
            self.steps.append(report)
            if report.is_skipped:
                self.marks.append(Mark("skipped", step, seconds, "gradients were not finite: the step changed nothing"))
        elif kind == "end":
            self.has_ended = True
        elif kind in _MARKS:
            self.marks.append(Mark(kind, step, seconds, str(record["text"])))
            if kind in _GOES_BACK:
                self._forget_after(_STEP.validate_python(record["to"]))

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
            self.marks.append(Mark("restart", step, seconds, f"started again from step {step}{lost}"))
        # Step 0: nothing is dropped yet.
        if step:  # else the engine may still load a checkpoint, or begin anew: the next record says
            self._forget_after(step)

    def _forget_after(self, step: int) -> None:
        while self.steps and self.steps[-1].step > step:
            # Steps are in order, so only the end of the list can be newer.
            self.steps.pop()


class RunReader:
    """Reads a log piece by piece, while it is written.

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
        # The begin of a line whose end is not written yet.
        self._rest = b""

    def read_on(self) -> bool:
        """Read what was written since the last call, and return whether there was anything. Keeps an unfinished line.

        Raises:
            CheckpointError: the file cannot be read, or is of a newer version.
        """
        try:
            with self._path.open("rb") as file:
                # Opened anew each time: a log that was removed is an error then, and no handle is kept.
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            raise CheckpointError.of_log(self._path, f"cannot be read: {error.strerror or error}") from error
        self._offset += len(data)
        # Example: b'{"a":1}\n{"b' gives one line, and the rest b'{"b'.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in filter(None, lines):
            try:
                self.run.add(json.loads(line))
            except CheckpointError:  # of another version, not damaged
                raise
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                # Readers leave it out and go on, see [Note: one call for a line] in run_log.py.
                self.run.num_damaged += 1
        return bool(data)

    @property
    def has_writer(self) -> bool:
        """Whether an engine has the log open. On a file system without locks: whether the last engine has not ended."""
        with self._path.open("rb") as file:
            try:
                # The writer holds an exclusive lock. A shared one fails as long as it does, and is released when the
                # file is closed.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return not self.run.has_ended
        return False

    def finish(self) -> None:
        """Count an unfinished line as damaged: nothing follows any more."""
        self.run.num_damaged += bool(self._rest)
        self._rest = b""


def read_run(directory: Path) -> Run:
    """Read a whole log. A last line that is cut off is left out, and counted unless somebody is writing it.

    Raises:
        CheckpointError: there is none, or it has no start.
    """
    reader = RunReader(directory)
    reader.read_on()
    # With a writer, an unfinished line is not damaged: its end is to come.
    if not reader.has_writer:
        reader.finish()
    if not reader.run.num_starts:
        problem = "has no start: it is empty, damaged, or no log of a run"
        raise CheckpointError.of_log(reader.run.directory / FILE_NAME, problem)
    return reader.run


@contextlib.contextmanager
def showing(directory: Path) -> Iterator[None]:
    """Put around code that shows a log: errors from values that no engine writes become a `CheckpointError`."""
    try:
        yield
    except InfinityError:
        raise
    except UNREADABLE as error:
        problem = f"holds values that no engine writes ({type(error).__name__}: {str(error)[:100]})"
        raise CheckpointError.of_log(directory / FILE_NAME, problem) from error
