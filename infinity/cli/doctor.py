"""``infinity doctor``: check memory, GPU, drives and packages of this machine, with advice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from infinity.cli.config import loaded_for_one
from infinity.cli.output import PathType, json_option, print_json, table

if TYPE_CHECKING:
    from infinity.machine.findings import Finding

_SIGNS = {"good": ("ok", "green"), "note": ("-", "dim"), "poor": ("!", "yellow"), "bad": ("X", "bold red")}
"""For each value of `Verdict`."""


@click.command()
@click.option(
    "--nvme-path",
    "directories",
    multiple=True,
    type=PathType(),
    help="Directory on a drive for weights and states; repeat the option for each drive. Default: the current "
    "directory.",
)
@click.option("--config", "file", type=PathType(), help="Check the directories that this config names.")
@click.option(
    "--no-measure",
    is_flag=True,
    help="Skip the measurements: I/O backends (writes about 100 MB), and copies to and from the GPU.",
)
@json_option
def doctor(directories: tuple[Path, ...], file: Path | None, no_measure: bool, as_json: bool) -> int:
    """Check whether this machine can train, and name what would help.

    Each line is fine (ok), for information (-), worth a change (!), or prevents training (X). With an X, the exit
    status is 1.

    \b
    Examples:
      infinity doctor
      infinity doctor --nvme-path /mnt/nvme0 --nvme-path /mnt/nvme1
      infinity doctor --config ds_config.json --json
    """
    from infinity.console import Console
    from infinity.machine.findings import Verdict, computing_findings, storage_findings

    wanted = list(directories)
    if file is not None:
        wanted += loaded_for_one(file, {}).nvme_paths
    findings = list(computing_findings(measures=not no_measure))
    with Console(stderr=True).status("looking at the drives"):
        # `dict.fromkeys` drops duplicates in order: a config often has one directory in both offload blocks.
        findings += storage_findings(list(dict.fromkeys(wanted or [Path.cwd()])), measures=not no_measure)
    # Only BAD prevents a training. POOR makes it slower.
    is_ready = all(finding.verdict is not Verdict.BAD for finding in findings)
    if as_json:
        print_json({"is_ready": is_ready, "findings": [vars(finding) for finding in findings]})
    else:
        _print(findings, is_ready=is_ready)
    return 0 if is_ready else 1


def _print(findings: list[Finding], *, is_ready: bool) -> None:
    from rich.markup import escape

    from infinity.console import Console

    shown = table("", "what", "found")
    directory = ""
    for finding in findings:
        # Findings of one directory follow each other: a new directory begins a section of the table.
        if finding.directory != directory:
            directory = finding.directory
            shown.add_row("", "", "")
            shown.add_row("", "[bold]directory[/]", f"[bold]{escape(directory)}[/]")
        sign, style = _SIGNS[finding.verdict]
        cure = f"\n-> {finding.cure}" if finding.cure else ""
        shown.add_row(f"[{style}]{sign}[/]", escape(finding.what), escape(finding.text + cure))
    console = Console(highlight=False)
    console.print(shown)
    num_cures = sum(bool(finding.cure) for finding in findings)
    text = "This machine can train." if is_ready else "This machine cannot train as it is: see the lines with an X."
    if num_cures:
        many = "1 change would help: the line" if num_cures == 1 else f"{num_cures} changes would help: the lines"
        text += f" {many} with ->."
    console.print(f"\n{text}", markup=False)
