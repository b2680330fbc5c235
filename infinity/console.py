"""Where commands write for people."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.text import Text

# Columns. rich drops columns of a table that find no room, so a terminal that reports width 0 would show nothing.
_LEAST_WIDTH = 40
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing: C0 (but for tab and newline), C1, and overrides of the direction."""


class Console(rich.console.Console):
    """rich's console for untrusted texts: control characters are shown as escapes (``\\x1b``).

    It is at least 40 columns wide. A closed pipe raises `BrokenPipeError`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.width = max(self.width, _LEAST_WIDTH)

    def on_broken_pipe(self) -> None:
        # rich's own method ends the process here. Callers have something to close first.
        raise BrokenPipeError

    def render_str(self, text: str, **settings: Any) -> Text:
        """As rich's, which is also called to measure a text."""
        # Escaped before rich measures it, because an escape is wider than the character that it stands for.
        return super().render_str(visible(text), **settings)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As rich's. Segments with ``control`` are rich's own, such as movements of the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def visible(text: str) -> str:
    """The text with control characters as escapes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
