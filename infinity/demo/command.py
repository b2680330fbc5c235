"""``infinity train``: the demo trainer as a command."""

from __future__ import annotations

import click

from infinity.cli.old_style import parsed, reads_by_itself


@reads_by_itself
def train(arguments: tuple[str, ...]) -> int:
    """Train a byte-level Llama from NVMe, on your text."""
    try:
        from infinity.demo.train import main, parse_arguments
    except ModuleNotFoundError as error:
        raise click.ClickException(f"it needs {error.name}: pip install 'infinity-offload[hf,plot]'") from error
    return main(parsed(lambda: parse_arguments(arguments, "infinity train")))
