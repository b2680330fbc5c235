"""A forked child, and what it finds."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable

import pytest

_SECONDS = 30.0


def require_in_child(function: Callable[[], bool]) -> None:
    """Run a function in a forked child and require that it returns true."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if function() else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + _SECONDS
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
