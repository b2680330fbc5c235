"""Prints the help of every command: the reference in docs/reference/commands.md.

python tools/commands_reference.py            # prints it
python tools/commands_reference.py --write    # puts it into docs/reference/commands.md, between its two marks
"""

from __future__ import annotations

from collections.abc import Iterator

import click
from pages import REFERENCE, print_or_write

from infinity.cli.main import PROGRAM, commands

PAGE = REFERENCE / "commands.md"
# Characters: click would take the width of the terminal, and the page would depend on it.
_WIDTH = 100


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            # A context for each command, as click builds it: usage lines name the whole path, "infinity checkpoint
            # verify".
            inner = click.Context(child, context, name, terminal_width=_WIDTH, **child.context_settings)
            yield from _sections(child, inner)
    else:
        text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        yield f"### `{context.command_path}`\n\n```text\n{text}\n```\n"


def reference() -> str:
    """Return the help of all commands as Markdown."""
    return "\n".join(_sections(commands, click.Context(commands, info_name=PROGRAM, **commands.context_settings)))


if __name__ == "__main__":
    print_or_write(__doc__, PAGE, reference)
