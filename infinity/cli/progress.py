"""A bar on the terminal, with the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function that takes what is being done, bytes since its last call, and bytes in all.

    On a terminal there is a bar for each ``what``, else nothing.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with shown as progress:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, num_bytes: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.advance(tasks[what], num_bytes)

        yield advance
