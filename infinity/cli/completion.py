"""``infinity completion SHELL``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(
    epilog="""\b
Examples:
  infinity completion bash >> ~/.bashrc
  infinity completion fish > ~/.config/fish/completions/infinity.fish"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes a shell complete commands, options and paths of `infinity`."""
    root = context.find_root()
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    click.echo(found(root.command, {}, "infinity", "_INFINITY_COMPLETE").source())
