"""What has to happen although somebody presses Ctrl-C in the middle of it."""

from __future__ import annotations

from collections.abc import Callable


def surely(function: Callable[[], None]) -> None:
    """Call ``function``, which may be called again after it was cut off. If an interrupt does that, that is done first."""
    try:
        function()
    except KeyboardInterrupt:
        function()
        raise
