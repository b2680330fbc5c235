"""Commands whose options argparse reads: what follows a script's name is the script's, and the profiler was there before."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from typing import NoReturn, TypeVar

import click

from infinity.cli.launch import add
from infinity.errors import ConfigError

_T = TypeVar("_T")
_RAW = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise click.UsageError(f"{message}.")


@click.command(add_help_option=False, context_settings=_RAW)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(arguments: tuple[str, ...]) -> None:
    """Start a training on the hosts of a DeepSpeed hostfile."""
    parser = _Parser(prog="infinity")
    add(parser.add_subparsers(required=True))
    parsed = _parsed(lambda: parser.parse_args(["launch", *arguments]))
    try:
        parsed.run(parsed)
    except UnicodeDecodeError as error:
        raise ConfigError(f"hostfile '{parsed.hostfile}': it is no text. Give lines like: worker-1 slots=8") from error


@click.command(add_help_option=False, context_settings=_RAW)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def profile(arguments: tuple[str, ...]) -> int:
    """Measure what drives do under the engine's requests."""
    from infinity.io_profile import program
    from infinity.io_profile.arguments import parse

    name = "infinity profile"
    if "-h" not in arguments and "--help" not in arguments:
        _parsed(lambda: parse(arguments, name, None))  # tells in its own way what is wrong
    return _parsed(lambda: program.main(arguments, prog=name), is_quiet=False)


def _parsed(parse: Callable[[], _T], *, is_quiet: bool = True) -> _T:
    """What a parser made, whose way of ending the process becomes click's; with ``is_quiet``, errors in one line."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told) if is_quiet else contextlib.nullcontext():
            return parse()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0
        if status and is_quiet:
            raise click.UsageError(told.getvalue().rpartition("error: ")[2].strip()) from None
        raise click.exceptions.Exit(status) from None
