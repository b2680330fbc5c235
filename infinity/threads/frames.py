"""Who is being called on a thread, and by whom."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[FrameType]:
    """The frames of the calling thread, from the one that asks outwards."""
    # 0 would be this generator's own frame; 1 is the frame that iterates over it.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
