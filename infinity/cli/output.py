"""How commands write: a table for people, JSON for programs, and never a traceback because nobody reads on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
import rich.console
from rich.table import Table

_F = TypeVar("_F", bound=Callable[..., Any])


class Console(rich.console.Console):
    """One whose reader may go away: that is for the caller to handle."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def json_option(function: _F) -> _F:
    """``--json`` for a command; the parameter is ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")(function)


def print_json(value: Any) -> None:
    """Print plain values; paths and the like as texts."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def table(*columns: str, has_header: bool = True, keeps_first: bool = False) -> Table:
    """An empty table in the style of all others; cells fold, the first column's not with ``keeps_first``."""
    made = Table(box=None, pad_edge=False, show_header=has_header)
    for place, name in enumerate(columns):
        made.add_column(name, overflow="fold", header_style="bold", no_wrap=keeps_first and not place)
    return made


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print (what, value) below each other."""
    made = table("", "", has_header=False, keeps_first=True)
    for what, value in facts:
        made.add_row(what, value)
    console = Console(highlight=False)
    console.print(made, markup=False)


def first_line(text: str) -> str:
    """A message without line breaks."""
    return " ".join(text.split())


def path_type(*, is_dir: bool) -> click.Path:
    """An existing file or directory, as a `Path`."""
    return click.Path(exists=True, dir_okay=is_dir, file_okay=not is_dir, readable=True, path_type=Path)


__all__ = ["Console", "first_line", "json_option", "path_type", "print_facts", "print_json", "table"]
