"""Puts the output of a tool into a page of docs/reference, between the two marks that the page has for it."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# For the tools that import this module: they print what this checkout has.
sys.path.insert(0, str(ROOT))
REFERENCE = ROOT / "docs" / "reference"
# Characters of a line in a page.
WIDTH = 118
_PRINTED = re.compile(r"(<!-- printed by [^\n]* -->\n\n).*(\n<!-- end of what is printed -->)", re.DOTALL)


def wrapped(text: str) -> str:
    """Break a text into lines at its spaces."""
    return "\n".join(textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def item(text: str) -> str:
    """Return an item of a list. Code may be broken at its spaces: Markdown joins the lines again."""
    lines = textwrap.wrap(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def with_printed(page: Path, printed: str) -> str:
    """Return the text of a page with ``printed`` between its two marks."""
    # Text before the first mark and behind the second one is written by hand, and stays.
    text, found = _PRINTED.subn(lambda found: f"{found[1]}{printed}{found[2]}", page.read_text())
    if found != 1:
        raise ValueError(f"{page} has {found} places for what is printed")
    return text


def print_or_write(description: str | None, page: Path, reference: Callable[[], str]) -> None:
    """The command line of a tool: without ``--write`` it prints the reference; with it, that goes into the page."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put it into {page.parent.name}/{page.name}")
    if parser.parse_args().write:
        page.write_text(with_printed(page, reference()))
    else:
        print(reference(), end="")
