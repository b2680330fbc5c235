"""Writes and reads the log of a run. What each line holds: docs/reference/run-log.md.

[Note: one call for a line]
Each record is one line, given to the system in one call as soon as it is there. So a killed process loses nothing, a power cut
at most the end of the file, and a reader that looks meanwhile sees whole lines, but for the last. A line that could be written
in part only (a full disk) is closed by the next one, and readers leave it out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import statistics
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from infinity.errors import CheckpointError, ConfigError, InfinityError
from infinity.metrics.report import StepReport
from infinity.numerics.plain_data import UNREADABLE
from infinity.secret_names import is_secret
from infinity.version import __version__
from swapper import VolumeError
from swapper.volumes.own_files import open_own
from swapper.volumes.publish import make_directory

logger = logging.getLogger(__name__)

KEY = "infinity.run_log"
FILE_NAME = "log.jsonl"
FORMAT = 2
# One second in all: readers (`RunReader.has_writer`) hold the lock for an instant.
_LOCK_ATTEMPTS = 20
_BETWEEN_SECONDS = 0.05
# Losses that say what is usual.
_REMEMBERED = 64
_ENOUGH = 10
"""Losses that are needed before one can be a spike."""
_WIDTHS = 8.0
"""So many times the usual deviation is a spike."""
_NORMAL = 1.4826
"""A normal distribution's standard deviation in units of its median absolute deviation."""
_LEAST_DEVIATION = 0.005
"""As a share of the loss: where losses hardly vary, a change in the third digit is none."""
# A step's line leaves out fields at their defaults; the reader's dataclass fills them in again.
_DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(StepReport) if each.default is not MISSING}
# A log may be damaged or edited, so records are validated before they become figures and dates on a page.
_REPORT = TypeAdapter(StepReport)
_STEP: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(strict=True, ge=0, lt=1 << 63)])
# `datetime.fromtimestamp` raises beyond year 9999.
_LAST_TIME = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
_TIME: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=_LAST_TIME)])
# Records with a "to": the step that the run has gone back to.
_GOES_BACK = ("rollback", "load")
_MARKS = ("lr", "spike", "note", "save", *_GOES_BACK)


class LossSpikes:
    """Finds losses that stand out of the last ones, by their median and median absolute deviation."""

    # A few outliers change neither of the two, unlike mean and standard deviation. Example: losses around 2.00 with a
    # median absolute deviation of 0.01. The deviation is 1.4826 * 0.01 = 0.0148, so a loss above 2.00 + 8 * 0.0148 =
    # 2.12 is a spike. If all losses are exactly 2.00, the deviation counts as 0.005 * 2.00 = 0.01, and 2.08 is the
    # limit.

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._is_in_spike = False

    def add(self, loss: float) -> str:
        """Return a description of a spike; empty if the loss is none, or if the one before was a spike as well."""
        was_in_spike, words = self._is_in_spike, self._words(loss)
        self._is_in_spike = bool(words)
        if math.isfinite(loss):
            # Spikes are remembered, too: a loss that stays high becomes the usual one.
            self._losses.append(loss)
        # One mark for a spike of several steps.
        return "" if was_in_spike else words

    def _words(self, loss: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(self._losses) < _ENOUGH:
            return ""
        usual = statistics.median(self._losses)
        deviation = _NORMAL * statistics.median(abs(each - usual) for each in self._losses)
        is_usual = loss <= usual + _WIDTHS * max(deviation, _LEAST_DEVIATION * abs(usual))
        return "" if is_usual else f"the loss is {loss:.4g}, and was {usual:.4g} before"


class RunLog:
    """Writes the log of one run, and holds a lock on it until it is closed."""

    _file: FileIO | None = None

    def __init__(self, directory: Path | None) -> None:
        """Open the log in ``directory`` for appending. A missing directory is made.

        None: nothing is written, as after `close`.

        Raises:
            ConfigError: it cannot be written, or another engine has it open.
        """
        if directory is None:
            return
        self.path = directory / FILE_NAME
        self._is_torn = False
        """Whether the last line has no end."""
        self._has_warned = False
        self._spikes = LossSpikes()
        self._lr: tuple[float, ...] | None = None
        self._has_changed_lr = False
        """In the step before."""
        try:
            # `abandon` removes these again, the innermost first.
            self._made = [path for path in (directory, *directory.parents) if not path.exists()]
            make_directory(directory)
            # O_APPEND and no buffer: each write is one system call to the end of the file, see [Note: one call for a
            # line].
            file = os.fdopen(open_own(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644), "ab", buffering=0)
        except VolumeError as error:
            raise ConfigError.value(KEY, str(directory), str(error), cure="Remove it if it is not yours") from error
        except OSError as error:
            cure = "Name a directory that may be written to, or set it to null"
            problem = f"it cannot be written: {error.strerror or error}"
            raise ConfigError.value(KEY, str(directory), problem, cure=cure) from error
        self._file = file
        # Before the lock: a fork in between must close this file, too.
        _open_logs.add(self)
        if not self._is_locked(file):
            file.close()
            problem = "another engine or process writes the log there"
            raise ConfigError.value(KEY, str(directory), problem, cure="Close that one, or name another directory")
        if file.tell():
            with self.path.open("rb") as written:
                # Was the process before cut off within a line? Then the first record begins with a line break.
                written.seek(-1, os.SEEK_END)
                self._is_torn = written.read() != b"\n"

    @property
    def is_open(self) -> bool:
        """Whether records are written. A forked child writes none: it is not the run."""
        return self._file is not None and not self._file.closed

    def _is_locked(self, file: FileIO) -> bool:
        for attempt in range(_LOCK_ATTEMPTS):  # a reader may try the lock for a moment
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                # EACCES: some systems say so in place of EWOULDBLOCK.
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return True  # there are no locks on this file system
            if attempt < _LOCK_ATTEMPTS - 1:
                time.sleep(_BETWEEN_SECONDS)
        return False

    # ---------------------------------------------------------------------------------------------------------- records

    def on_start(
        self,
        step: int,
        config: Mapping[str, Any],
        machine: Mapping[str, Any],
        plan: Mapping[str, Any],
        timeline: Path | None = None,
    ) -> None:
        """Record the start of an engine at ``step``. ``timeline``: path of its trace."""
        more = {"config": _without_secrets(config), "machine": machine, "plan": plan, "timeline": timeline}
        self.write("start", step, format=FORMAT, version=__version__, **more)

    def on_step(self, report: StepReport, scheduled_lr: Sequence[float] | None) -> None:
        """Record a step.

        Args:
            report: its report.
            scheduled_lr: the learning rates that the scheduler has set; None without a scheduler.
        """
        # A rate that is neither the one of the step before nor the scheduler's was set by the script.
        changed = self._lr is not None and report.lr != self._lr and report.lr != tuple(scheduled_lr or ())
        if changed and not self._has_changed_lr:  # one that changes at each step follows a schedule of the script's own
            words = f"{_numbers(self._lr or ())} to {_numbers(report.lr)}"
            self.write("lr", report.step, text=f"the learning rate was changed from {words}")
        self._lr, self._has_changed_lr = report.lr, changed
        # MISSING is equal to no value, so fields without a default are always written.
        record = {name: value for name, value in vars(report).items() if value != _DEFAULTS.get(name, MISSING)}
        self.write("step", record.pop("step"), **record)
        if report.loss is not None and (words := self._spikes.add(report.loss)):
            self.write("spike", report.step, text=words)

    def close(self, step: int) -> None:
        """Record the end of the run, and release the log."""
        self.write("end", step)
        self.release()

    def release(self) -> None:
        """Close the file, so that others may write the log. May be called again."""
        if self._file is not None:
            self._file.close()

    def abandon(self) -> None:
        """Release the log of an engine that failed to start, and remove it if it is empty."""
        if self._file is not None and not self._file.closed and not self._file.tell():
            # ENOTEMPTY: somebody has put a file there since.
            with contextlib.suppress(OSError):
                self.path.unlink()
                for directory in self._made:
                    directory.rmdir()
        self.release()

    def write(self, kind: str, step: int, **record: Any) -> None:
        """Write another record: the "plan", or with a ``text`` a "note", "rollback", "load" or "save"."""
        if self._file is None or self._file.closed:
            return
        try:
            line = _line({"kind": kind, "step": step, "time": round(time.time(), 3)} | record)
            data = (b"\n" if self._is_torn else b"") + line
            # A raw file may write less than it was given, without an error.
            self._is_torn = self._file.write(data) != len(data)
            problem = "the disk is full" if self._is_torn else ""
        except OSError as error:
            problem = error.strerror or str(error)
        # Once for a run: a full disk would fill the log of the training as well.
        if problem and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the log of the run, '%s', has gaps from step %d on: %s. Training continues", self.path, step, problem
            )


_open_logs: weakref.WeakSet[RunLog] = weakref.WeakSet()


def _close_in_child() -> None:
    # flock belongs to the open file, which parent and child share: the lock is held until both have closed it.
    # A forked child that outlives its parent, such as a data loader's worker, would otherwise hold the lock.
    for log in list(_open_logs):
        with contextlib.suppress(OSError):
            log.release()


os.register_at_fork(after_in_child=_close_in_child)


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":"), default=_plain)
    # `json` writes NaN and Infinity, so such a record is converted in a second pass. A text that only contains the word
    # costs that pass for nothing.
    if "NaN" in text or "Infinity" in text:  # which JSON does not have
        text = json.dumps(_finite(record), separators=(",", ":"), default=_plain)
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            # Names such as "api_key", and URLs with a password. An empty value is no secret.
            str(key): "(left out)" if item and is_secret(str(key), item) else _without_secrets(item)
            for key, item in value.items()
        }
    return [_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in dict.fromkeys(values)) or "none"


# -------------------------------------------------------------------------------------------------------------- reading


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
                # Readers leave it out and go on, see [Note: one call for a line].
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
