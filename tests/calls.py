"""Counts the Python calls of the packages, in all threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import infinity
import swapper

_FOLDERS = tuple(str(Path(str(package.__file__)).parent) + os.sep for package in (infinity, swapper))


class CallCounter:
    """Calls by function, while it `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.by_function: Counter[str] = Counter()

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        if event == "call" and self.is_on and frame.f_code.co_filename.startswith(_FOLDERS):
            self.by_function[frame.f_code.co_qualname] += 1

    @property
    def num_calls(self) -> int:
        """All of them."""
        return sum(self.by_function.values())

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls inside of the ``with`` block, from zero on."""
        self.by_function.clear()
        self.is_on = True
        yield
        self.is_on = False


@contextlib.contextmanager
def call_counter() -> Iterator[CallCounter]:
    """A counter for this thread, and for those that are started inside of the ``with`` block."""
    counter, before = CallCounter(), sys.getprofile()
    threading.setprofile(counter.profile)
    sys.setprofile(counter.profile)
    try:
        yield counter
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
