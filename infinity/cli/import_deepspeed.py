"""``python -m infinity import-deepspeed SOURCE TARGET``: go on from a checkpoint that DeepSpeed wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.checkpoint.deepspeed.conversion import convert
from infinity.cli.progress import bars
from infinity.errors import format_bytes


def add(subparsers: Any) -> None:
    """Add the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "import-deepspeed",
        help="turn a checkpoint of DeepSpeed (ZeRO stage 1 to 3, or universal) into one for engine.load_checkpoint",
        description="Writes a checkpoint that engine.load_checkpoint(TARGET) goes on from. DeepSpeed need not be installed, "
        "and no object in the source is run. Memory: a few MiB besides the page cache.",
    )
    parser.add_argument("source", type=Path, help="directory that DeepSpeed's save_checkpoint wrote to, or one tag's")
    parser.add_argument("target", type=Path, help="directory to write to; made if it is missing")
    parser.add_argument("--tag", help="which checkpoint of the source; the one that 'latest' names, if it is not given")
    parser.add_argument(
        "--skip-unknown",
        action="store_true",
        help="leave out what the script had added, where it is of classes that are neither torch's nor DeepSpeed's",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run it."""
    console = Console(soft_wrap=True, highlight=False)
    with bars(console) as progress:
        done = convert(
            arguments.source,
            arguments.target,
            tag=arguments.tag,
            skips_unknown=arguments.skip_unknown,
            progress=progress,
        )
    console.print(
        f"{done.folder}: {done.num_tensors} tensors, {format_bytes(done.num_bytes)}, after {done.num_steps} steps "
        f"with DeepSpeed {done.version}",
        markup=False,
    )
    for what in done.left_out:
        console.print(f"left out: {what}", markup=False)


__all__ = ["add", "run"]
