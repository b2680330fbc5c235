"""``infinity completion SHELL``."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from infinity.cli.main import COMPLETE, PROGRAM

_SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell, for commands, options and paths of `infinity`.

    \b
    Examples:
      infinity completion bash >> ~/.bashrc
      infinity completion fish > ~/.config/fish/completions/infinity.fish
    """
    # click's script for the shell. It calls `infinity` with the variable COMPLETE set, which `main` answers.
    click.echo(_SHELLS[shell](context.find_root().command, {}, PROGRAM, COMPLETE).source())
