"""Shows a run in a terminal for as long as it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from infinity.errors import CheckpointError
from infinity.metrics import Run, RunReader, showing
from infinity.metrics.report import StepReport
from infinity.reporting.page import facts
from infinity.reporting.verdict import judge, known_plan, steady_steps
from swapper import Latch

# How late a step may be shown.
_BETWEEN_SECONDS = 0.5
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 48
# The newest marks, and the steps over which the bar averages.
_MOST_MARKS = 6
_RECENT = 20


def watch(directory: Path, console: Console, *, once: bool = False) -> bool:
    """Show a run until it has ended; in a terminal all of it at one place, else a line for each step.

    Args:
        directory: of the run's log.
        console: where to.
        once: show it as it is now, and return.

    Returns:
        Whether the run has ended, by its engine being closed. False: its process is gone without that, or it goes on.

    Raises:
        CheckpointError: there is no log, or it cannot be read.
    """
    # A generator, so that the three ways of showing below share one loop.
    reader = RunReader(directory)
    news = _news(reader)
    with showing(reader.run.directory):
        if once:
            console.print(show(reader.run, goes_on=next(news)))
        elif not console.is_terminal:
            _as_lines(reader, news, console)
        else:
            # Drawn only if something is new: a thread of rich's would redraw all the time.
            with Live(console=console, auto_refresh=False) as live:
                for goes_on in news:
                    live.update(show(reader.run, goes_on=goes_on), refresh=True)
    return reader.run.has_ended


def _news(reader: RunReader) -> Iterator[bool]:
    """Yield whether the run goes on, each time that the log has something new, until it has ended."""
    is_first = True
    while True:
        goes_on = reader.has_writer  # asked first: what was written before its end is read
        is_new = reader.read_on()
        if not reader.run.num_starts and not goes_on:
            problem = "its log has no start: it is empty, damaged, or no log of a run"
            raise CheckpointError.of_log(reader.run.directory, problem)
        if is_new or is_first or not goes_on:
            yield goes_on
        if not goes_on:
            return
        is_first = False
        Latch().wait(_BETWEEN_SECONDS)


def _as_lines(reader: RunReader, news: Iterator[bool], console: Console) -> None:
    shown: list[StepReport] = []
    for goes_on in news:
        steps = reader.run.steps
        # After a rollback the reader has dropped steps. Reports are compared by identity: a step that was made again is
        # a new object.
        while shown and (len(shown) > len(steps) or shown[-1] is not steps[len(shown) - 1]):
            shown.pop()  # the run went back
        for step in steps[len(shown) :]:
            loss = "" if step.loss is None else f" | loss {step.loss:.4f}"
            console.print(f"{step.describe()}{loss}", markup=False, highlight=False, soft_wrap=True)
            shown.append(step)
        if not goes_on:
            console.print(_state(reader.run, goes_on=False), markup=False, highlight=False)


def show(run: Run, *, goes_on: bool) -> RenderableType:
    """Return what a terminal shows of a run."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("run", Text(str(run.directory.absolute()), overflow="fold"))
    for name, value in facts(run, known_plan(run), _state(run, goes_on=goes_on)).items():
        table.add_row(name, Text(value))
    # One character of the sparkline for each loss.
    losses = [step.loss for step in run.steps[-_WIDTH:] if step.loss is not None]
    if losses:
        table.add_row("loss", f"{losses[-1]:.4f}  {_sparkline(losses)}")
    if run.steps:
        # Skipped steps and the first ones are left out, see `steady_steps`.
        table.add_row("time", _bar(steady_steps(run.steps[-_RECENT:])))
    for mark in run.marks[-_MOST_MARKS:]:
        style = "red" if mark.kind in ("spike", "skipped") else "yellow"
        table.add_row(Text(f"step {mark.step}", style=style), Text(f"{mark.kind}: {mark.text}"))
    return Group(table, Text(judge(run).words))


def _state(run: Run, *, goes_on: bool) -> str:
    if goes_on:
        return "running"
    return "ended" if run.has_ended else "its process is gone, and the engine was not closed: it was killed, or failed"


def _sparkline(values: Sequence[float]) -> str:
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    # 8 blocks: the lowest loss is block 0, the highest block 7. If all are equal, all are block 0.
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] if abs(value) < float("inf") else "!" for value in values)


def _bar(steps: Sequence[StepReport]) -> Text:
    total, left = sum(step.seconds for step in steps) or 1.0, 1.0
    bar, words = Text(), []
    for name, style, seconds in (
        ("computing", "blue", "compute_busy_seconds"),
        ("waiting for reads", "red", "read_wait_seconds"),
        ("for the optimizer", "magenta", "update_wait_seconds"),
        ("other", "bright_black", ""),  # gets what the three leave
    ):
        share = sum(getattr(step, seconds) for step in steps) / total if seconds else 1.0
        # A damaged log can tell of more waiting than time: the bar ends at its width.
        fraction = min(max(0.0, share), left)
        left -= fraction
        bar.append("█" * round(fraction * _WIDTH), style=style)
        if round(100 * fraction):
            words.append(f"{name} {100 * fraction:.0f} %")
    return bar.append(f"\n{', '.join(words)}")
