"""Which memory reads and writes have: from their submission until the backend has let go of it.

[Note: whose memory it is]
A request may outlive whoever started it. An interrupt takes the waiter away, or even the thread that was about to get the
handle; an error elsewhere makes it give up; a deadline ends the wait although the kernel may move the bytes later. So
whoever lends memory out again and again does not go by handles or by what became of the waiter: it asks here, and memory
that a request still has stays out of use. Nobody can forget to say so, as the scheduler does, for every request.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Protocol

from swapper.errors import SwapperError


class Tenant(Protocol):
    """A request.

    Attributes:
        address: Where its memory begins, as the device that it belongs to counts.
        num_bytes: Length of its memory.
        is_finished: Nobody waits for it any more.
        error: Why it failed.
    """

    address: int
    num_bytes: int
    is_finished: bool
    error: SwapperError | None


# Weakly: a request that nobody knows any more, the backend included, has nothing. Every change is a single step, which an
# interrupt or another thread comes before or after, and who looks takes a copy: so there is no lock.
_tenants: dict[weakref.ref[Tenant], tuple[int, int]] = {}
# Where to look for them, by parts of the address space: found there before, and for as long as, they are tenants. Parts stay,
# since another thread may just be about to put one in.
_near: dict[int, dict[weakref.ref[Tenant], None]] = {}
_PART_BITS = 20
os.register_at_fork(after_in_child=_tenants.clear)  # a child has neither the requests nor their memory
os.register_at_fork(after_in_child=_near.clear)


def hold(tenant: Tenant) -> None:
    """The request has its memory from now on."""
    if tenant.num_bytes:
        reference, start = weakref.ref(tenant), tenant.address
        stop = start + tenant.num_bytes
        for part in range(start >> _PART_BITS, ((stop - 1) >> _PART_BITS) + 1):
            _near.setdefault(part, {})[reference] = None
        _tenants[reference] = start, stop


def let_go(tenant: Tenant) -> None:
    """The backend does not touch the request's memory any more, if it ever had it."""
    reference = weakref.ref(tenant)
    memory = _tenants.pop(reference, None)
    if memory is not None:
        for part in range(memory[0] >> _PART_BITS, ((memory[1] - 1) >> _PART_BITS) + 1):
            _near.get(part, {}).pop(reference, None)


def is_held(address: int, num_bytes: int) -> bool:
    """Return whether a request has any of these bytes, in whatever swapper of this process."""
    return next(_holders(address, num_bytes), None) is not None


def hang_of(address: int, num_bytes: int) -> SwapperError | None:
    """Return the error of a request that has some of these bytes although it is over for everybody who waits: it hangs,
    and nobody knows when it will let go of them."""
    return next((holder.error for holder in _holders(address, num_bytes) if holder.is_finished), None)


def _holders(address: int, num_bytes: int) -> Iterator[Tenant]:
    stop = address + num_bytes
    for part in range(address >> _PART_BITS, ((stop - 1) >> _PART_BITS) + 1):
        references = _near.get(part, {})
        for reference in references.copy():
            start, end = _tenants.get(reference, (stop, stop))
            if start < stop and address < end:
                tenant = reference()
                if tenant is not None:
                    yield tenant
                else:
                    references.pop(reference, None)
                    _tenants.pop(reference, None)
