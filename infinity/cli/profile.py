"""``infinity profile``: how fast drives are under the engine's requests, and the settings for them."""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from infinity.cli.output import PathType, json_option, print_json, table

if TYPE_CHECKING:
    from types import FrameType

    from infinity.console import Console
    from infinity.machine.bandwidth_cache import BandwidthCache
    from infinity.machine.drive_profile import DriveProfile, Effort, Progress

# As in cli/main.py. A profile ends with its own status, because it prints a report first.
_FAILED, _MISUSED, _INTERRUPTED = 1, 2, 130
# Ten hours. Such a run writes all the while, and wears out the drive.
_LONGEST_MINUTES = 600.0
_WHY = "Of the settings within 3 % of the fastest mix of an optimizer step, this one takes the least processor time and memory."


@click.command()
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=PathType())
@click.option("--quick", is_flag=True, help="Fewer and shorter samples: under half a minute.")
@click.option(
    "--minutes",
    type=click.FloatRange(0, _LONGEST_MINUTES, min_open=True),
    help="Then run the best setting for this many minutes: shows when the drive's cache is full or the drive gets "
    "hot. It writes all that time.",
)
@json_option
def profile(directories: tuple[Path, ...], quick: bool, minutes: float | None, as_json: bool) -> int:
    """Measure how fast drives are under the engine's requests, and find the settings that suit them.

    DIR is one directory on each drive. Ctrl-C ends it at any time, with a report of what was measured by then. The test
    files have no names, so nothing is left in the directories even after a kill. The result is stored: from then on,
    plans use the speed of these drives, and engines use the settings unless the config has its own.

    \b
    Examples:
      infinity profile /mnt/nvme                                   # about a minute
      infinity profile /mnt/nvme0 /mnt/nvme1 --quick               # several drives, striped
      infinity profile /mnt/nvme --minutes 10                      # does it hold its speed for an hour's training?
      infinity profile /mnt/nvme --quick --json                    # results on stdout, all else on stderr
    """
    from infinity.console import Console
    from infinity.machine.bandwidth_cache import store
    from infinity.machine.drive_profile import QUICK, Effort
    from infinity.machine.here import describe_machine

    console = Console(highlight=False, stderr=as_json)
    # stdout is for the JSON, so tables and bars go to stderr with --json.
    found, effort = _checked(directories, console), QUICK if quick else Effort()
    status = _measure(found, effort, minutes, console)
    advice = found.advice()
    # Only a complete measurement is kept.
    if advice is not None:
        store([each.path for each in found.directories], advice)
    _print(console, found, advice)
    if as_json:
        print_json({"machine": describe_machine(found.directories[0].path), **_as_json(found, effort, advice)})
    return status


def _checked(paths: tuple[Path, ...], console: Console) -> DriveProfile:
    """Refuse what can be refused before anything is measured."""
    from infinity.machine.drive_profile import DriveProfile
    from infinity.machine.findings import writable_drive
    from swapper.errors import VolumeError
    from swapper.volumes.directory import Directory

    try:
        # By resolved path: a directory that is named twice is one drive.
        directories = list({path.resolve(): Directory(path) for path in paths}.values())
        drives = [writable_drive(each.path) for each in directories]
    except VolumeError as error:
        raise click.UsageError(f"{error}.") from None
    for drive in drives:
        in_memory = ": files there are in memory, not on a drive" if drive.is_tmpfs else ""
        text = f"{drive.path}: {drive.words()}, {drive.free_bytes / 1e9:,.1f} GB free{in_memory}"
        console.print(text, markup=False, soft_wrap=True)
    return DriveProfile(directories)


def _measure(found: DriveProfile, effort: Effort, minutes: float | None, console: Console) -> int:
    """Fill ``found``.

    Returns:
        The exit status: 0, 1 if a drive failed, 2 if a directory is useless, 130 after Ctrl-C.
    """
    from infinity.machine.drive_profile import drive_test, hold, settings_for, sweep
    from swapper.errors import SwapperError, VolumeError

    try:
        with _progress(console) as progress, drive_test(found, effort) as test:
            sweep(test, found, effort, settings_for(found.directories), progress)
            if minutes:
                hold(test, found, 60 * minutes, progress)
    # `found` is filled sample by sample, so whatever was measured is reported.
    except KeyboardInterrupt:
        found.stop("interrupted")
        return _INTERRUPTED
    except VolumeError as error:  # a directory that only its first use shows to be useless
        found.stop(str(error))
        return _FAILED if found.written_bytes else _MISUSED
    except (SwapperError, RuntimeError) as error:
        found.stop(f"{type(error).__name__}: {error}")
        return _FAILED
    return 0


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar with the time left; where there is no terminal, a line for each thing that begins.

    It is drawn between samples only: drawing takes a core. It also raises a KeyboardInterrupt that was dropped: Python
    ignores one that comes in a finalizer.
    """
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    is_shown, text = console.is_terminal, [""]
    interrupts: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # `auto_refresh=False`: rich would draw from a thread of its own, in the middle of a sample.
    bar = Bar(*columns, console=console, transient=True, auto_refresh=False, disable=not is_shown)
    task = bar.add_task("", total=1.0)

    def on_signal(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        if callable(handler):
            handler(number, frame)

    def show(what: str, share: float) -> None:
        if interrupts:
            raise KeyboardInterrupt
        bar.update(task, description=what, completed=share, refresh=True)
        # In a log file: one line per phase, not per sample.
        if not is_shown and what != text[-1]:
            console.print(what, markup=False)
            text.append(what)

    with bar, contextlib.ExitStack() as ends:
        if callable(handler):  # else it is ignored, as in a job that a shell has put into the background
            signal.signal(signal.SIGINT, on_signal)
            ends.callback(signal.signal, signal.SIGINT, handler)
        yield show


def _print(console: Console, found: DriveProfile, advice: BandwidthCache | None) -> None:
    from infinity.machine.drive_profile import default_setting

    if found.stopped_by is not None:
        console.print(f"Not finished: {found.stopped_by}", style="yellow", markup=False, soft_wrap=True)
    shown = table("requests", "mixed, GB/s", "CPU s/GB", keeps_first=True)
    for setting in found.samples:
        chosen = " *" if advice is not None and setting == advice.setting else ""
        chosen += " (default)" if setting == default_setting() else ""
        cores = f"{found.cores_per_gigabyte(setting):.3f}"
        shown.add_row(f"{setting.describe()}{chosen}", _speed(found.rates(setting)), cores)
    if found.samples:
        console.print(shown)
    lines = [f"{name} cannot be used here: {reason}" for name, reason in found.unusable.items()]
    lines += [f"{way.value} alone: {each.bytes_per_second / 1e9:.2f} GB/s" for way, each in found.alone.items()]
    if found.written_bytes:
        lines.append(f"Written for this: {found.written_bytes / 1e9:.1f} GB")
    if found.long_run is not None:
        lines.append(found.long_run.words())
    if advice is not None:
        lines += _settings_words(found, advice)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _settings_words(found: DriveProfile, advice: BandwidthCache) -> Iterator[str]:
    from infinity.machine.drive_profile import default_setting

    block = found.block(advice.setting)
    parts = ",\n".join(f'  "{name}": {json.dumps(values)}' for name, values in block.items())
    # Valid JSON, to be pasted into a config.
    yield f"\nSettings for the config (*):\n{{\n{parts}\n}}"
    rates, share = found.rates(default_setting()), ""
    if rates:
        reached = 100 * statistics.median(rates) / advice.bandwidth.mixed_bytes_per_second
        share = f" A config that names none of them reaches {reached:.0f} % of the mixed rate."
    yield f"{_WHY}{share}"
    where = " ".join(f"--nvme-path {each.path}" for each in found.directories)
    yield f"What that means for a model: infinity plan --params 7b {where}"


def _speed(rates: list[float]) -> str:
    """`2.31 ±4`: the median, and half of smallest to largest in percent of it."""
    middle = statistics.median(rates)
    spread = f" ±{50 * (max(rates) - min(rates)) / middle:.0f}" if len(rates) > 1 else ""
    return f"{middle / 1e9:.2f}{spread}"


def _as_json(found: DriveProfile, effort: Effort, advice: BandwidthCache | None) -> dict[str, Any]:
    """Plain values. Rates are bytes per second, of both directions together."""
    return {
        "partial": found.stopped_by is not None,
        "stopped_by": found.stopped_by,
        "directories": [str(each.path) for each in found.directories],
        "effort": asdict(effort),
        "unusable": found.unusable,
        "written_bytes": found.written_bytes,
        "samples": [{"setting": asdict(setting), "rates": found.rates(setting)} for setting in found.samples],
        "alone": {workload.value: each.bytes_per_second for workload, each in found.alone.items()},
        "long_run": None if found.long_run is None else found.long_run.as_json(),
        "best": None if advice is None else asdict(advice),
        "config": None if advice is None else found.block(advice.setting),
    }
