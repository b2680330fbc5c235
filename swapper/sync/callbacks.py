"""Calling functions of users on threads that others need."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
logger = logging.getLogger(__name__)


def call_back(function: Callable[[], object], what: str) -> None:
    """Call a function of somebody else's; whatever it raises, also what would end a thread, is only logged.

    Args:
        function: What to call.
        what: Names it in the log.
    """
    try:
        function()
    except BaseException as error:
        log_raised(error, what)


def log_raised(error: BaseException, what: str) -> None:
    """Log what a function has raised that others must not hear of. To be called where it is caught.

    On the main thread an interrupt or an exit goes on: a signal handler may have raised it.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread():
        raise error
    logger.error("%s raised", what, exc_info=error)


def fulfil(future: Future[_T], function: Callable[..., _T], *args: Any) -> None:
    """Call a function for whoever waits for the future."""
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
