"""``infinity profile``: how fast drives are under the engine's requests, and the settings for them."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click

from infinity.cli.checkpoint import size_in_bytes
from infinity.cli.output import STDOUT, PathType, json_or_file_option, table, write_json
from swapper.config import BackendName

if TYPE_CHECKING:
    from infinity.console import Console
    from infinity.machine.bandwidth_cache import BandwidthCache
    from infinity.machine.drive_profile import DriveProfile, Effort, Progress

_BACKENDS = [name for name in get_args(BackendName) if name != "auto"]
_FAILED, _MISUSED, _INTERRUPTED = 1, 2, 130
_LONGEST_SECONDS = 600.0
_LONGEST_MINUTES = 600.0
_WHY = "Of the settings within 3 % of the fastest mix of an optimizer step, this one takes the least processor time and memory."


@click.command()
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=PathType())
@click.option("--quick", is_flag=True, help="Fewer and shorter samples: under half a minute.")
@json_or_file_option
@click.option("--apply", type=PathType(), metavar="CONFIG", help="Write the settings into this config.")
@click.option("--size", type=size_in_bytes, metavar="SIZE", help="Of the test file in each directory, at most.")
@click.option(
    "--seconds", type=click.FloatRange(0, _LONGEST_SECONDS, min_open=True), metavar="SECONDS", help="Of a sample."
)
@click.option("--rounds", type=click.IntRange(min=1), help="Samples of each setting.")
@click.option(
    "--minutes",
    type=click.FloatRange(0, _LONGEST_MINUTES, min_open=True),
    help="Then keep the best setting going so long: where the drive's cache ends, and its heat. Writes all the while.",
)
@click.option("--backends", type=click.Choice(_BACKENDS), multiple=True, help="Once for each that is measured.")
def profile(**options: Any) -> int:
    """Measure how fast drives are under the engine's requests, and say which settings suit them.

    DIR is one directory on each drive. Ctrl-C ends it at any time, with a report of what was measured by then. The test
    files have no names, so that nothing is left in the directories, whatever ends the program. Plans know the speed of the
    drives afterwards.

    \b
    Examples:
      infinity profile /mnt/nvme                                   # about a minute
      infinity profile /mnt/nvme0 /mnt/nvme1 --quick               # several drives, striped
      infinity profile /mnt/nvme --minutes 10                      # does it hold its speed for an hour's training?
      infinity profile /mnt/nvme --json io.json --apply ds_config.json
      infinity profile /mnt/nvme --quick --json                    # results on stdout, all else on stderr
    """
    asked = ask(options)
    status = measure(asked)
    return finish(asked, status, {})


class Asked(NamedTuple):
    """What the options come to, and what is found."""

    options: dict[str, Any]
    effort: Effort
    found: DriveProfile
    console: Console


def ask(options: dict[str, Any]) -> Asked:
    """Check what can be checked before anything is measured.

    Raises:
        click.UsageError: a directory or a config cannot be used.
    """
    from infinity.console import Console
    from infinity.machine import config_file
    from infinity.machine.drive_profile import QUICK, DriveProfile, Effort, directories_of
    from infinity.machine.storage import writable_drive
    from swapper.errors import VolumeError

    console = Console(highlight=False, stderr=options["json_file"] == Path(STDOUT))
    try:
        directories = directories_of(options["directories"])
        drives = [writable_drive(each.path) for each in directories]
        if options["apply"] is not None:
            config_file.check(options["apply"])
    except (VolumeError, config_file.ConfigRefused) as error:
        raise click.UsageError(f"{error}.") from None
    for drive in drives:
        in_memory = ": files there are in memory, not on a drive" if drive.is_tmpfs else ""
        display = f"{drive.path}: {drive.words()}, {drive.free_bytes / 1e9:,.1f} GB free{in_memory}"
        console.print(display, markup=False, soft_wrap=True)
    names = {"size": "file_bytes", "seconds": "sample_seconds", "rounds": "num_rounds", "backends": "backends"}
    given = {name: options[option] for option, name in names.items() if options[option]}
    effort = replace(QUICK if options["quick"] else Effort(), **given)
    return Asked(options, effort, DriveProfile(directories), console)


def measure(asked: Asked) -> int:
    """Fill ``asked.found``.

    Returns:
        The exit status: 0, 1 if a drive failed, 2 if a directory is useless, 130 after Ctrl-C.
    """
    from infinity.machine.drive_profile import drive_test, hold_for, io_of, settings_for, sweep
    from swapper.errors import SwapperError, VolumeError

    found = asked.found
    try:
        with _progress(asked.console) as progress, drive_test(found, asked.effort, io_of({})) as test:
            sweep(test, found, asked.effort, settings_for(found, asked.effort), progress)
            if asked.options["minutes"]:
                hold_for(test, found, 60 * asked.options["minutes"], progress)
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


def finish(asked: Asked, status: int, more: dict[str, Any]) -> int:
    """Print, store and write what was found; ``more``: for the JSON. Returns the exit status."""
    from infinity.machine import autotune, config_file
    from infinity.machine.description import describe_machine
    from infinity.machine.drive_profile import io_of

    options, _, found, console = asked
    advice = found.advice()
    _print(console, found, advice)
    if advice is not None:
        autotune.keep(advice, found.directories, io_of({}))
    if options["json_file"] is not None:
        write_json(
            {"machine": describe_machine(found.directories[0].path), **_as_json(asked, advice), **more},
            options["json_file"],
        )
    if options["apply"] is None:
        return status
    if advice is None:
        told = " is left as it is: the measurement is not finished"
    else:
        names = ", ".join(str(each.path) for each in found.directories)
        note = f"{names}, {advice.bandwidth.mixed_bytes_per_second:.3g} B/s mixed"
        try:
            changes = config_file.apply(options["apply"], found.block(advice.setting), note)
        except config_file.ConfigRefused as error:
            raise click.ClickException(str(error)) from None
        told = f": {'; '.join(change.words() for change in changes) or 'was so already'}"
    console.print(f"{options['apply']}{told}", markup=False, soft_wrap=True)
    return status


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar with the time left; where there is no terminal, a line for each thing that begins.

    It is drawn between samples only: drawing takes a core.
    """
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    is_shown, told = console.is_terminal, [""]
    with Bar(*columns, console=console, transient=True, auto_refresh=False, disable=not is_shown) as bar:
        task = bar.add_task("", total=1.0)

        def tell(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share, refresh=True)
            if not is_shown and what != told[-1]:
                console.print(what, markup=False)
                told.append(what)

        yield tell


def _print(console: Console, found: DriveProfile, advice: BandwidthCache | None) -> None:
    from infinity.machine.drive_profile import WORKLOADS, default_setting

    if found.stopped_by is not None:
        console.print(f"Not finished: {found.stopped_by}", style="yellow", markup=False, soft_wrap=True)
    shown = table("requests", *(f"{each.value}, GB/s" for each in WORKLOADS), "CPU s/GB", keeps_first=True)
    for setting in found.settings:
        speeds = [_speed(found.rates(setting, each)) for each in WORKLOADS]
        chosen = " *" if advice is not None and setting == advice.setting else ""
        chosen += " (default)" if setting == default_setting() else ""
        shown.add_row(f"{setting.describe()}{chosen}", *speeds, f"{found.cores_per_gigabyte(setting):.3f}")
    if found.settings:
        console.print(shown)
    lines = [f"{name} cannot be used here: {reason}" for name, reason in found.unusable.items()]
    if found.verified:
        lines.append(f"Read back and found right through: {', '.join(found.verified)}")
    if found.written_bytes:
        lines.append(f"Written for this: {found.written_bytes / 1e9:.1f} GB")
    if found.long_run is not None:
        lines.append(found.long_run.words())
    if advice is not None:
        block = found.block(advice.setting)
        parts = ",\n".join(f'  "{name}": {json.dumps(values)}' for name, values in block.items())
        rate = found.rate(default_setting(), WORKLOADS[-1])
        lines += [f"\nSettings for the config (*):\n{{\n{parts}\n}}", _WHY]
        if rate is not None and (share := rate / advice.bandwidth.mixed_bytes_per_second):
            lines[-1] += f" A config that names none of them reaches {100 * share:.0f} % of the mixed rate."
        where = " ".join(f"--nvme-path {each.path}" for each in found.directories)
        lines.append(f"What that means for a model: infinity plan --params 7b {where}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _speed(rates: Sequence[float]) -> str:
    """`2.31 ±4`: the median, and half of smallest to largest in percent of it."""
    if not rates:
        return ""
    middle = statistics.median(rates)
    spread = f" ±{50 * (max(rates) - min(rates)) / middle:.0f}" if len(rates) > 1 else ""
    return f"{middle / 1e9:.2f}{spread}"


def _as_json(asked: Asked, advice: BandwidthCache | None) -> dict[str, Any]:
    """Plain values. Rates are bytes per second, of both directions together."""
    found = asked.found
    return {
        "partial": found.stopped_by is not None,
        "stopped_by": found.stopped_by,
        "directories": [str(each.path) for each in found.directories],
        "effort": asdict(asked.effort),
        "unusable": found.unusable,
        "verified": found.verified,
        "written_bytes": found.written_bytes,
        "samples": [
            {"setting": asdict(setting), "workload": workload.value, "median": found.rate(setting, workload)}
            | {"rates": found.rates(setting, workload)}
            for setting, workload in found.samples
        ],
        "long_run": None if found.long_run is None else found.long_run.as_json(),
        "best": None if advice is None else asdict(advice),
        "config": None if advice is None else found.block(advice.setting),
    }
