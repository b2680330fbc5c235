"""``infinity clean DIR``: remove the files of durable runs and of killed saves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click

from infinity.cli.output import PathType, display, json_option, print_json, table
from infinity.errors import size
from swapper.volumes.publish import remove_abandoned
from swapper.volumes.run_directory import LeftRun, LeftSave, left_runs, left_saves


@click.command()
@click.argument(
    "directories", metavar="DIR...", nargs=-1, required=True, type=PathType(exists=True, file_okay=False, readable=True)
)
@click.option("--yes", is_flag=True, help="Remove without asking.")
@json_option
def clean(directories: tuple[Path, ...], yes: bool, as_json: bool) -> int:
    """Remove files that durable runs (infinity.durable) and killed saves left behind in DIR and below it.

    Scratch files of other runs have no names and vanish with their process. Files that a process uses are kept. Removing a run
    is permanent. You are asked to confirm unless you pass --yes. Exit status 1 if something cannot be removed.

    \b
    Examples:
      infinity clean /mnt/nvme
      infinity clean /mnt/nvme0 /mnt/nvme1 --yes
      infinity clean /mnt/nvme --json                              # lists, and removes nothing
    """
    # By resolved path: DIRs may overlap (/mnt and /mnt/nvme), and each run counts once.
    runs = list({run.path.resolve(): run for directory in directories for run in left_runs(directory)}.values())
    saves = list({save.path.resolve(): save for directory in directories for save in left_saves(directory)}.values())
    # A run in use is shown, and kept.
    free = [run for run in runs if not run.is_in_use]
    if not as_json:
        _print(runs, saves)
    if (free or saves) and not yes and not as_json:
        # In a cron job or a pipe, a prompt would read EOF or wait for ever.
        if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
            raise click.UsageError(
                "stdin is not a terminal, so the command cannot ask you. Pass --yes to remove without asking."
            )
        click.confirm(f"Remove {_counted(free, saves)}, for good?", abort=True)
    # --json alone only reports: a program cannot be asked.
    gone, tried = (free, saves) if yes or not as_json else ([], [])
    for run in gone:
        run.remove()
    # `remove_abandoned` removes all killed saves of a folder, so it runs once per folder.
    for parent in {save.path.parent for save in tried}:
        remove_abandoned(parent)
    # It may fail for lack of permission without an exception. What is left on disk decides.
    ended = [save for save in tried if not save.path.exists()]
    stuck = [save for save in tried if save not in ended]
    if as_json:
        removed = [*(run.path for run in gone), *(save.path for save in ended)]
        print_json({"runs": [vars(run) for run in runs], "saves": [save.path for save in saves], "removed": removed})
    elif gone or ended:
        display(f"\nRemoved {_counted(gone, ended)}.", soft_wrap=True)
    for save in stuck:
        line = f"{save.path} cannot be removed: change its permissions, or remove it yourself."
        display(line, stderr=True, soft_wrap=True)
    return 1 if stuck else 0


def _counted(runs: Sequence[LeftRun], saves: Sequence[LeftSave]) -> str:
    counts = [(len(runs), "run"), (len(saves), "killed save")]
    words = [f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts if count]
    num_bytes = sum(run.num_bytes for run in runs) + sum(save.num_bytes for save in saves)
    return f"{' and '.join(words)}, {size(num_bytes)}"


def _print(runs: list[LeftRun], saves: list[LeftSave]) -> None:
    if not runs and not saves:
        display("Nothing is left here.")
        return
    shown = table("bytes", "commits", "last written", "", "directory")
    for run in runs:
        changed_at = min(max(run.changed_at, 0), 1 << 32)  # file systems store times that no calendar has
        when = datetime.fromtimestamp(changed_at).strftime("%Y-%m-%d %H:%M")
        shown.add_row(size(run.num_bytes), str(run.num_commits), when, "in use" if run.is_in_use else "", str(run.path))
    for save in saves:
        shown.add_row(size(save.num_bytes), "", "", "a killed save", str(save.path))
    display(shown)
