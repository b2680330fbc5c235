"""Which memory reads and writes have: from their submission until the backend has released it.

[Note: whose memory it is]
A request may outlive whoever started it. An interrupt takes the waiter away, or even the thread that was about to get the
handle; an error elsewhere makes it give up; a deadline ends the wait although the kernel may move the bytes later. So
whoever leases memory again and again does not go by handles or by what became of the waiter: it asks here, and memory
that a request still has stays out of use. Nobody can forget to say so, as the scheduler does, for every request.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from swapper.errors import SwapperError


class MemoryUser(Protocol):
    """A request.

    Attributes:
        address: Where its memory begins, as the device that it belongs to counts.
        num_bytes: Length of its memory.
        is_finished: Nobody waits for it any more.
        failure: Why it failed.
    """

    address: int
    num_bytes: int
    is_finished: bool
    failure: SwapperError | None


class RequestSource(Protocol):
    """Who starts requests.

    Attributes:
        requests: Those of which the backend may have the memory. Every change is a single step.
    """

    requests: dict[Any, Any]


# Weakly: the requests of a holder that nobody knows any more, its backend included, have nothing. Every change is a single step,
# which an interrupt or another thread comes before or after, and who looks takes a copy: so there is no lock.
_holders: dict[weakref.ref[RequestSource], None] = {}
os.register_at_fork(after_in_child=_holders.clear)  # a child has neither the requests nor their memory


def watch_requests(holder: RequestSource) -> None:
    """From now on the requests of the holder have their memory, as long as they are there."""
    _holders[weakref.ref(holder, _forget)] = None


def _forget(reference: weakref.ref[RequestSource]) -> None:
    _holders.pop(reference, None)


def is_held(address: int, num_bytes: int) -> bool:
    """Return whether a request has any of these bytes, in whatever swapper of this process."""
    return bool(tenants(address, num_bytes))


def hang_error(address: int, num_bytes: int) -> SwapperError | None:
    """Return the error of a request that has some of these bytes although it is over for everybody who waits: it hangs,
    and nobody knows when it will release them."""
    return next((user.failure for user in tenants(address, num_bytes) if user.is_finished), None)


def tenants(address: int, num_bytes: int) -> list[MemoryUser]:
    """Return the requests that have any of these bytes."""
    stop, found = address + num_bytes, list[MemoryUser]()
    for reference in _holders.copy():
        holder = reference()
        for user in holder.requests.copy() if holder is not None else ():
            if user.address < stop and address < user.address + user.num_bytes:
                found.append(user)
    return found
