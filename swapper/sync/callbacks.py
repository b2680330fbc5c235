"""Calling functions of users on threads that others need."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def call_back(function: Callable[[], object], what: str) -> None:
    """Call a function of somebody else's; whatever it raises, also what would end a thread, is only logged.

    On the main thread an interrupt or an exit goes on: a signal handler may have raised it.

    Args:
        function: What to call.
        what: Names it in the log.
    """
    try:
        function()
    except BaseException as error:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        logger.error("%s raised", what, exc_info=error)
