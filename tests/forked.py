"""Forked children, and what one finds."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

_SECONDS = 30.0


@functools.cache
def _import_first() -> None:
    # An engine's start imports them; in a child that takes one to four seconds, each time.
    for name in ("torch._dynamo", "infinity.numerics.kernels"):
        importlib.import_module(name)


def forked(function: Callable[[], Any]) -> int:
    """Run a function in a forked child, which ends with it: with status 0, 1 after an error, 2 if it returned false."""
    _import_first()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            found = function()
            status = 0 if found is None or found else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def require_in_child(function: Callable[[], Any]) -> None:
    """Run a function in a forked child and require that it neither raises nor returns false."""
    child = forked(function)
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
