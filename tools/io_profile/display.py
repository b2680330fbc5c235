"""What is seen while it runs: what is being done, how far it is, and the time left."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

_LINE_EVERY_SECONDS = 10.0


class Display:
    """A bar on a terminal, a line now and then elsewhere. It is drawn between measurements only: drawing takes a core."""

    def __init__(self, console: Console, expected_seconds: float) -> None:
        """
        Args:
            console: where to.
            expected_seconds: how long everything should take.
        """
        self._console = console
        self._expected_seconds = max(expected_seconds, 1e-3)
        self._done_seconds = 0.0
        self._began = time.monotonic()
        self._phase = ""
        self._last_line = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(None),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("", total=self._expected_seconds, left="")

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

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

    def phase(self, words: str) -> None:
        """Something new begins."""
        if words != self._phase:
            self._phase = words
            self._last_line = 0.0
        self.advance(0.0)

    def advance(self, expected_seconds: float, detail: str = "") -> None:
        """A step that was expected to take so long is done."""
        self._done_seconds += expected_seconds
        left = f"{self.seconds_left:.0f} s left"
        if self._console.is_terminal:
            words = f"{self._phase}: {detail}" if detail else self._phase
            done = min(self._done_seconds, self._expected_seconds)
            self._progress.update(self._task, completed=done, description=words, left=left, refresh=True)
        elif time.monotonic() - self._last_line > _LINE_EVERY_SECONDS:
            self._last_line = time.monotonic()
            percent = min(100.0, 100 * self._done_seconds / self._expected_seconds)
            self._console.print(f"[{percent:3.0f} %] {self._phase}; about {left}", markup=False, soft_wrap=True)

    def skip(self, expected_seconds: float) -> None:
        """A step that was expected to take so long will not be done."""
        self._expected_seconds = max(1e-3, self._expected_seconds - expected_seconds)
        self._progress.update(self._task, total=self._expected_seconds)
