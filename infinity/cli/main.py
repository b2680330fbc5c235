"""Runs one command, and prints an error as one line.

A command is a `click.Command` in a file of this folder, and a line in `COMMANDS`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import shell_complete

from infinity.cli.output import display, first_line
from infinity.errors import InfinityError
from infinity.version import __version__
from swapper import SwapperError

PROGRAM = "infinity"
COMPLETE = "_INFINITY_COMPLETE"
FAILED, MISUSED, INTERRUPTED, UNHEARD = 1, 2, 130, 141
"""Exit statuses: an error; a wrong command line; Ctrl-C; nobody reads the output any more. The last two are those that
a shell shows after SIGINT and SIGPIPE."""


COMMANDS = {
    "doctor": "check whether this machine can train, and name what would help",
    "plan": "predict whether a model fits, how fast it trains, and what makes it fit",
    "config": "check a config, show its resolved values, or print its JSON schema",
    "profile": "measure how fast drives are, and find the settings that suit them",
    "report": "write one HTML page about a run, and what bound it",
    "watch": "show a run in the terminal while it trains",
    "launch": "start a training on this host, or on those of a DeepSpeed hostfile",
    "checkpoint": "look at a checkpoint, verify it, or export its weights",
    "export": "the same as `checkpoint export`",
    "import-deepspeed": "convert a DeepSpeed checkpoint",
    "clean": "remove files that durable runs and killed saves left behind",
    "completion": "print the completion script of a shell",
}
"""One line for each command: a `click.Command` of that name, with ``_`` for ``-``, in the module of that name."""
# Commands whose module has another name.
_IN_MODULES_OF_OTHERS = {"watch": "report", "export": "checkpoint", "import-deepspeed": "checkpoint"}

# By errno. Other errors get the system's text alone.
_CURES = {
    errno.ENOENT: "give a path that exists",
    errno.EACCES: "change its permissions, or name another one",
    errno.EPERM: "change its permissions, or name another one",
    errno.EROFS: "name a directory on a file system that can be written to",
    errno.ENOSPC: "make room, or name a directory with more",
    errno.EISDIR: "name a file in it",
    errno.ENOTDIR: "name a directory",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EEXIST: "name a file",
}


class _Commands(click.Group):
    """Imports a command's module only when the command is used, so that `--help` and completion stay quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        # In the order of the table, and not sorted as in click.
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = _IN_MODULES_OF_OTHERS.get(cmd_name, cmd_name).replace("-", "_")
        module = importlib.import_module(f"infinity.cli.{name}")
        found: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            # click would import every command for its help line.
            formatter.write_dl([*COMMANDS.items()])


@click.group(
    cls=_Commands,
    commands=dict.fromkeys(COMMANDS, click.Command(None)),  # click reads the names, to suggest one for a misspelt name
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`infinity COMMAND --help` has examples. Exit status: 0; 1 if something failed or was found; 2 after a wrong "
    "command line; 130 after Ctrl-C.",
)
@click.version_option(__version__, prog_name=PROGRAM)
def commands() -> None:
    """Trains models that are larger than memory, by paging their states to NVMe."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: those after ``infinity``; None: this process's.
    """
    # The shell's completion script calls us with this variable: click prints the candidates.
    if instruction := os.environ.get(COMPLETE):
        with contextlib.suppress(KeyError, ValueError):  # COMP_WORDS or COMP_CWORD is missing, or no shell's
            if not shell_complete(commands, {}, PROGRAM, COMPLETE, instruction):
                return 0
        return _print_error(f"{COMPLETE}={instruction} is for completion scripts of shells: unset it", MISUSED)
    return run(commands, PROGRAM, sys.argv[1:] if arguments is None else arguments)


_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What a command without arguments raises; before click 8.2 it prints its help, and exits."""


def run(command: click.Command, name: str, arguments: Sequence[str]) -> int:
    """Run a command, print an error as one line, and return the exit status."""
    # Exit statuses of all commands are decided here, so that they are the same everywhere.
    _let_streams_take_all()
    try:
        # Not `command.main`: that one prints errors by itself, on several lines, and calls sys.exit.
        with command.make_context(name, list(arguments)) as context:
            status = command.invoke(context)
        # Inside the `try`: with `| head`, the BrokenPipeError may only come now.
        sys.stdout.flush()
    except _NO_ARGUMENTS as error:
        click.echo(error.format_message(), err=True)
        return MISUSED
    except click.exceptions.Exit as ended:
        # `--help` ends this way with 0. Without arguments click prints the help, and that is misuse.
        return ended.exit_code if arguments else MISUSED
    except click.UsageError as error:
        # click leaves the context out where an option lacks its value.
        words = [name, *(word for word in arguments[:1] if word in COMMANDS)]
        where = error.ctx.command_path if error.ctx is not None else " ".join(words)
        what = first_line(error.format_message()).removesuffix(".")
        return _print_error(f"{where}: {what}{'' if what.endswith('?') else '.'} See `{where} --help`.", MISUSED)
    except click.ClickException as error:
        return _print_error(first_line(error.format_message()), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _print_error("Interrupted.", INTERRUPTED)
    except (InfinityError, SwapperError) as error:
        return _print_error(f"{type(error).__name__}: {error}", FAILED)
    except BrokenPipeError:  # whoever read the output has gone: `| head`
        _discard_stdout()
        return UNHEARD
    except OSError as error:
        # BrokenPipeError is an OSError, so it comes before this one.
        return _print_error(_words(error), FAILED)
    # Commands without findings return None.
    return status if isinstance(status, int) else 0


def _let_streams_take_all() -> None:
    """Make printing safe: to streams that are closed, and to terminals with a small encoding."""
    for name in ("stdout", "stderr"):
        # Python sets a stream to None if its descriptor is closed (`>&-`).
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # With LANG=C, a "±" would raise UnicodeEncodeError. stderr replaces such characters anyway.
        sys.stdout.reconfigure(errors="replace")


def _print_error(line: str, status: int) -> int:
    display(line, stderr=True, soft_wrap=True)
    return status


def _words(error: OSError) -> str:
    """Describe an error of the system: the file, the reason, and the cure."""
    if error.errno is None or error.strerror is None:
        return f"{type(error).__name__}: {first_line(str(error))}"
    where = "" if error.filename is None else f"{os.fspath(error.filename)}: "
    cure = _CURES.get(error.errno)
    return f"{where}{error.strerror}{f'; {cure}' if cure else ''}"


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null. Python flushes it at exit, and would report the broken pipe again."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # a test's, in memory
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), number)
