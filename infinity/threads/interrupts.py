"""What has to happen although somebody presses Ctrl-C in the middle of it, and what must not happen in the middle of it.

See [Note: coming in between] in ``swapper.sync.reentry``.
"""

from __future__ import annotations

from collections.abc import Callable

from infinity.errors import EngineBusyError
from swapper.sync.reentry import came_from_between, interrupted_frame, watch

watch(__name__)

POLL_SECONDS = 1.0
"""How often a wait looks up, so that a KeyboardInterrupt gets through."""


def surely(function: Callable[[], None]) -> None:
    """Call ``function``, which may be called again after it was cut off. If an interrupt does that, that is done first."""
    try:
        function()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or came_from_between(error):
            function()
        raise


def refuse_in_between(what: str) -> None:
    """Raise if a signal handler or finalizer calls this that came into the midst of the engine's work on this thread.

    Raises:
        EngineBusyError: It did.
    """
    frame = interrupted_frame()
    if frame is not None:
        raise EngineBusyError(what, frame.f_code.co_qualname)
