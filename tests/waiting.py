"""Waiting for what other threads do, without a limit that a busy machine could miss."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

_TIMEOUT_SECONDS = 300.0


def wait_until(condition: Callable[[], bool], what: str = "it") -> None:
    """Return when the condition holds; fail only if that takes so long that it never will."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not happen")
        time.sleep(0.002)
