"""Writes the log of a run, line by line. What each line holds: docs/reference/run-log.md.

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
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from io import FileIO
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.metrics.report import StepReport
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
        # `abandon` removes these again, the innermost first.
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        try:
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
