"""Takes the command line apart and runs one command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from infinity.cli.export import add as add_export
from infinity.cli.import_deepspeed import add as add_import_deepspeed
from infinity.cli.launch import add as add_launch
from infinity.errors import InfinityError
from swapper import SwapperError

_COMMANDS = (add_export, add_import_deepspeed, add_launch)
"""Each makes a parser of its own, and sets what runs the command as its default of ``run``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: those after ``python -m infinity``; None: this process's.
    """
    parser = argparse.ArgumentParser(
        prog="python -m infinity", description="Works on checkpoints, and starts trainings on several hosts."
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except (InfinityError, SwapperError) as error:
        Console(stderr=True, soft_wrap=True).print(f"{type(error).__name__}: {error}", markup=False, highlight=False)
        return 1
    return 0


__all__ = ["main"]
