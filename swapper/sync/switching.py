"""How soon a thread of ours gets the interpreter while another one runs Python.

[Note: switch interval]
A thread that runs Python gives the interpreter away only if it is asked to, after ``sys.getswitchinterval()``: 5 ms, unless
somebody has set it. Each completed transfer needs it for some ten microseconds, to hand the next one to the drive; a drive that
takes a few hundred for a transfer would wait most of the time. So the interval is shorter while any swapper is open.
"""

from __future__ import annotations

import os
import sys

_SECONDS = 0.0002

_holders: set[int] = set()
_before: float | None = None  # what it was, if we have changed it
_set: float = 0.0


def acquire(holder: int) -> None:
    """Switch fast from now on, until everybody who holds it has called `release`. An interval that is shorter stays.

    There is no lock, because a finalizer may let go: each step is a single one, and in whatever order two threads come, the
    interval is in the end what somebody has set.
    """
    global _before, _set
    _holders.add(holder)
    if _before is None:
        seconds = sys.getswitchinterval()
        if seconds > _SECONDS:
            _before = seconds
            sys.setswitchinterval(_SECONDS)
            _set = sys.getswitchinterval()


def release(holder: int) -> None:
    """The counterpart of `acquire`: the last one restores what was there before, unless somebody else has changed it."""
    global _before
    _holders.discard(holder)
    if not _holders and _before is not None:
        seconds, _before = _before, None
        if sys.getswitchinterval() == _set:
            sys.setswitchinterval(seconds)


def _reset_in_child() -> None:
    for holder in list(_holders):
        release(holder)


os.register_at_fork(after_in_child=_reset_in_child)
