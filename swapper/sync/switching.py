"""A short switch interval of the interpreter while a swapper or an engine is open.

[Note: switch interval]
A thread that runs Python keeps the interpreter's lock for ``sys.getswitchinterval()`` while another one waits for it:
5 ms by default. After each transfer, a worker needs the lock for some ten microseconds to submit the next one. A drive
that takes a few hundred microseconds for a transfer would idle most of the time. So the interval is shorter here.

An engine in memory needs that, too: each operation of torch gives the lock up and takes it back, and the engine's hooks
take it in backward, where plain torch needs none. Beside a thread of the user's that runs Python, each time costs an
interval.
"""

from __future__ import annotations

import os
import sys

_SECONDS = 0.0002  # about what a drive takes for a transfer; each switch costs the running thread a little

_holders: set[int] = set()  # id() of each open swapper or engine
_before: float | None = None  # what it was, if we have changed it
_set: float = 0.0  # what it became, as Python rounds it


def acquire(holder: int) -> None:
    """Shorten the interval until all holders have called `release`. A shorter one stays."""
    # No lock, because a finalizer calls release(). If two threads come at once, the interval ends as one of them set
    # it.
    global _before, _set
    _holders.add(holder)
    if _before is None:
        seconds = sys.getswitchinterval()
        if seconds > _SECONDS:
            _before = seconds
            sys.setswitchinterval(_SECONDS)
            _set = sys.getswitchinterval()


def release(holder: int) -> None:
    """End a holder's `acquire`; the last one restores the interval of before."""
    global _before
    _holders.discard(holder)
    if not _holders and _before is not None:
        seconds, _before = _before, None
        if sys.getswitchinterval() == _set:  # else the user has changed it meanwhile
            sys.setswitchinterval(seconds)


def _reset_in_child() -> None:
    """A forked child cannot use its parent's swappers, so the interval of before is restored there."""
    for holder in list(_holders):
        release(holder)


os.register_at_fork(after_in_child=_reset_in_child)
