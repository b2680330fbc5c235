"""Commands whose options argparse reads: they were scripts before, and still are."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import TypeVar

import click

_T = TypeVar("_T")


def reads_by_itself(function: Callable[[tuple[str, ...]], int]) -> click.Command:
    """Makes a function a command that takes all arguments as they are, help as well."""
    raw = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    taking = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(function)
    return click.command(add_help_option=False, context_settings=raw)(taking)


@reads_by_itself
def profile(arguments: tuple[str, ...]) -> int:
    """Measure what drives do under the engine's requests."""
    from infinity.io_profile import program
    from infinity.io_profile.arguments import parse

    return program.run(parsed(lambda: parse(arguments, "infinity profile", program.__doc__)))


def parsed(parse: Callable[[], _T]) -> _T:
    """What a parser made; how it ends the process becomes click's, with one line."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return parse()
    except SystemExit as ended:
        if ended.code:
            raise click.UsageError(told.getvalue().rpartition("error: ")[2].strip()) from None
        raise click.exceptions.Exit(0) from None


__all__ = ["parsed", "profile", "reads_by_itself"]
