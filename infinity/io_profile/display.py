"""What is seen while it runs: what is being done, how far it is, and the time left."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

_LINE_EVERY_SECONDS = 10.0


class Display:
    """A bar on a terminal, a line now and then elsewhere. It is drawn between measurements only: drawing takes a core.

    Inside its ``with`` block, warnings of `swapper` are kept for the report: a line in between would tear the bar.
    """

    def __init__(self, console: Console, expected_seconds: float, notes: list[str]) -> None:
        """
        Args:
            console: where to.
            expected_seconds: how long everything should take.
            notes: takes the warnings, each once.
        """
        self._console = console
        self._expected_seconds = max(expected_seconds, 1e-3)
        self._done_seconds = 0.0
        self._began = time.monotonic()
        self._phase = ""
        self._last_line = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn())
        self._progress = Progress(
            *columns,
            TextColumn("{task.fields[left]}"),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("", total=self._expected_seconds, left="")
        self._collector = _Collector(notes)

    def __enter__(self) -> Display:
        logging.getLogger("swapper").addHandler(self._collector)
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()
        logging.getLogger("swapper").removeHandler(self._collector)

    @property
    def seconds_passed(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float:
        """What is left of the expectation, at the pace so far."""
        left = max(0.0, self._expected_seconds - self._done_seconds)
        # A few steps tell nothing of the pace yet.
        trust = min(1.0, self._done_seconds / self._expected_seconds / 0.1)
        pace = self.seconds_passed / self._done_seconds if self._done_seconds else 1.0
        return left * (trust * pace + (1 - trust))

    def show(self, phase: str, detail: str = "") -> None:
        """Something begins."""
        if phase != self._phase:
            self._phase = phase
            self._last_line = 0.0
        left = f"{self.seconds_left:.0f} s left"
        done = min(self._done_seconds, self._expected_seconds)
        if self._console.is_terminal:
            words = f"{phase}: {detail}" if detail else phase
            self._progress.update(
                self._task, completed=done, total=self._expected_seconds, description=words, left=left, refresh=True
            )
        elif time.monotonic() - self._last_line > _LINE_EVERY_SECONDS:
            self._last_line = time.monotonic()
            percent = 100 * done / self._expected_seconds
            self._console.print(f"[{percent:3.0f} %] {phase}; about {left}", markup=False, soft_wrap=True)

    def advance(self, expected_seconds: float) -> None:
        """A step that was expected to take so long is done."""
        self._done_seconds += expected_seconds

    def skip(self, expected_seconds: float) -> None:
        """A step that was expected to take so long will not be done."""
        self._expected_seconds = max(1e-3, self._expected_seconds - expected_seconds)


class _Collector(logging.Handler):
    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        sentence = record.getMessage()
        if sentence not in self._notes:
            self._notes.append(sentence)
