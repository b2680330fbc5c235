"""Calls of users' functions on threads that must survive them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
logger = logging.getLogger(__name__)


def call_back(function: Callable[[], object], what: str) -> None:
    """Call a function and log what it raises, SystemExit included. ``what`` names it in the log."""
    try:
        function()
    except BaseException as error:
        log_raised(error, what)


def log_raised(error: BaseException, what: str) -> None:
    """Log an exception instead of raising it. Call it in the ``except`` clause."""
    # On the main thread a signal handler may have raised it: then it is not the callback's, and must end the program.
    if isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread():
        raise error
    logger.error("%s raised", what, exc_info=error)


def fulfil(future: Future[_T], function: Callable[..., _T], *args: Any) -> None:
    """Store a function's result, or what it raises, in a future."""
    try:
        future.set_result(function(*args))
    except BaseException as error:  # also KeyboardInterrupt: a future without a result would be waited for forever
        future.set_exception(error)
