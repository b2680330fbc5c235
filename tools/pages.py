"""Puts the output of a tool into a page of Markdown."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path

# Characters of a line in a page.
WIDTH = 118


def wrapped(text: str) -> str:
    """Break a text into lines at its spaces."""
    return "\n".join(textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def item(text: str) -> str:
    """Return an item of a list. Code may be broken at its spaces: Markdown joins the lines again."""
    lines = textwrap.wrap(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def between(marks: tuple[str, str], printed: str, page: Path) -> str:
    """Return the text of a page, with ``printed`` between its two marks."""
    text = page.read_text()
    # Text before the first mark and behind the second one is written by hand, and stays.
    return f"{text.partition(marks[0])[0]}{marks[0]}\n\n{printed}\n{marks[1]}{text.partition(marks[1])[2]}"


def print_or_write(description: str | None, page: Path, printed: Callable[[], str], written: Callable[[], str]) -> None:
    """The command line of a tool: without ``--write`` it prints; with it, all of the page is written anew."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put it into {page.parent.name}/{page.name}")
    if parser.parse_args().write:
        page.write_text(written())
    else:
        print(printed(), end="")
