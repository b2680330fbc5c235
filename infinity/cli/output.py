"""Output of commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swapper.volumes.publish import opener

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

STDOUT = "-"


class PathType(click.Path):
    """A `Path` that may not be empty."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(path_type=Path, **rules)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # "$DIR" with an unset DIR. Path("") would be the present directory.
        if value == "":
            self.fail("it is empty; the current directory is '.'.", param, ctx)
        return super().convert(value, param, ctx)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
"""``--json`` for a command; the parameter is ``as_json``."""


def print_json(value: Any) -> None:
    """Print plain values as JSON. Other objects become texts, and numbers that are not finite become null."""
    click.echo(_as_json(value))


def print_result(as_json: bool, facts: Any, *lines: str) -> None:
    """Print the result of a command: ``facts`` as JSON, or else ``lines`` for people."""
    if as_json:
        print_json(facts)
    for line in () if as_json else lines:
        display(line, soft_wrap=True)


def write_json(value: Any, path: Path) -> None:
    """As `print_json`, to a file, or to stdout if `path` is "-"."""
    if path == Path(STDOUT):
        print_json(value)
    else:
        # `opener`: only the owner may write a new file, whatever the umask.
        with open(path, "w", opener=opener) as file:
            file.write(f"{_as_json(value)}\n")


def _as_json(value: Any) -> str:
    # `allow_nan=False` raises if `_finite` has missed a number.
    return json.dumps(_finite(value), indent=2, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(*columns: str, has_header: bool = True, keeps_first: bool = False, is_dense: bool = False) -> Table:
    """Return an empty table. Long cells fold; with ``keeps_first``, those of the first column only in narrow terminals.

    ``is_dense``: one space between columns, where ten have to fit into a terminal of 80.
    """
    from rich.table import Table  # here, since `--help` and completion import this file

    # rich would give the first column all of 40 columns, and drop the others.
    keeps_first = keeps_first and shutil.get_terminal_size().columns >= 60
    made = Table(box=None, pad_edge=False, show_header=has_header, collapse_padding=is_dense)
    for place, name in enumerate(columns):
        # "fold" breaks long cells in place of cutting them off: paths stay whole.
        made.add_column(name, overflow="fold", header_style="bold", no_wrap=keeps_first and not place)
    return made


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print (what, value) below each other."""
    made = table("", "", has_header=False, keeps_first=True)
    for what, value in facts:
        made.add_row(what, value)
    display(made)


def display(what: RenderableType, *, style: str | None = None, **settings: Any) -> None:
    """Print a table, or a text without interpreting markup in it. ``settings``: of the `Console`."""
    from infinity.console import Console

    Console(highlight=False, **settings).print(what, style=style, markup=False)


def first_line(text: str) -> str:
    """A message without line breaks."""
    return " ".join(text.split())
