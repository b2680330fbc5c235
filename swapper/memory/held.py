"""Which memory is in use by reads and writes, from their submission until the backend has completed them.

[Note: whose memory it is]
A request may outlive its waiter. An interrupt ends the wait, or comes even before the caller has the handle. An error
elsewhere may end it, or a deadline, although the kernel may still move the bytes. So a pool that reuses memory does not
rely on handles. It asks here, and does not lease memory that a request still uses. The answer comes from the tables of
unfinished requests that schedulers have, so no code has to register a request.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from swapper.errors import SwapperError

# `IOScheduler`s: their `requests` are the operations that the backend may still have. Weak references: a request at a
# backend keeps its scheduler alive, by `on_complete`. No lock: every change is a single step under the interpreter's
# lock, and readers go through a copy.
_holders: dict[weakref.ref[Any], None] = {}
os.register_at_fork(after_in_child=_holders.clear)  # a child has neither the requests nor their memory


def watch_requests(scheduler: Any) -> None:
    """Count the memory of the scheduler's requests as in use, from now on."""
    _holders[weakref.ref(scheduler, lambda reference: _holders.pop(reference, None))] = None


def is_held(address: int, num_bytes: int) -> bool:
    """Return whether a request of any swapper of this process uses some of these bytes."""
    return bool(tenants(address, num_bytes))


def hang_error(address: int, num_bytes: int) -> SwapperError | None:
    """Return the error of a hung request that uses some of these bytes: nobody knows when it will release them."""
    return next((user.failure for user in tenants(address, num_bytes) if user.is_finished), None)


def tenants(address: int, num_bytes: int) -> list[Any]:
    """Return the operations that have any of these bytes."""
    # Linear in the number of unfinished requests: pools ask when a buffer is released, and not for each transfer.
    stop, found = address + num_bytes, list[Any]()
    for reference in _holders.copy():
        holder = reference()
        for user in holder.requests.copy() if holder is not None else ():
            if user.address < stop and address < user.address + user.num_bytes:
                found.append(user)
    return found
