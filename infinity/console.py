"""Where commands write for people."""

from __future__ import annotations

from typing import Any

import rich.console

_LEAST_WIDTH = 40


class Console(rich.console.Console):
    """One whose reader may go away: that is for the caller to handle.

    What a terminal is too narrow for, it breaks itself: tables would lose columns, down to nothing where its width is 0.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.width = max(self.width, _LEAST_WIDTH)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
