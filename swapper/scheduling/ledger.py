"""The state of an extent's bytes: which can be read, and which operations use them.

[Note: order on the same bytes]
Operations that touch the same block of an extent, at least one of them writing, run one after the other in the order of
their submission; all others run side by side. An operation keeps the earlier ones it must wait for in ``blockers`` and
becomes ready when the last of them is over, whether it succeeded or not: a failed write has by then marked its bytes as
broken, so a read behind it fails instead of returning stale bytes, and a later write of the same bytes heals them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from swapper.backend import Direction
from swapper.errors import ExtentError
from swapper.extents.extent import Extent, ExtentState
from swapper.extents.intervals import IntervalSet
from swapper.scheduling.operation import Operation

_NUMBER = attrgetter("number")


class Ledger:
    """One extent's state: which bytes are written or broken, and its unfinished operations.

    The scheduler has one for each extent in use, and its lock guards them. Thousands of small operations may be
    unfinished at once, so nothing here looks at each of them.

    Attributes:
        is_plain: Any bytes may be read or written: all are written, none is broken, the extent is not being freed.
        rows: Operations that are unfinished or stalled, in the order of the first byte that they touch: that byte,
            number, operation. Numbers differ, so that bisect never compares two operations.
        longest_bytes: Size of the longest of them; only grows, until no row is left.
        num_admitted: Operations so far.
    """

    # Where `is_plain` and nothing overlaps, `IOScheduler` adds and removes rows by hand.

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        # A write counts from its submission on, because whatever is submitted later runs after it.
        self._written = IntervalSet()
        self._is_written = extent.is_prewritten  # all of it: then `admit` asks no interval set
        # Bytes whose last finished write failed.
        self._broken = IntervalSet()
        self.has_broken = False  # whether _broken has any bytes
        self.is_plain = self._is_written
        self.rows: list[tuple[int, int, Operation]] = []
        self.longest_bytes = self.num_admitted = 0

    @property
    def operations(self) -> list[Operation]:
        """All operations that are unfinished or stalled."""
        return [operation for _, _, operation in self.rows]

    def admit(self, operation: Operation) -> None:
        """Add an operation, and put those it must wait for into its ``blockers``: see [Note: order on the same bytes].

        Raises:
            ExtentError: A read of bytes that are known to be unreadable.
        """
        written, first, stop = self._written, operation.first, operation.stop
        is_read = operation.direction is Direction.READ
        if is_read and not self._is_written:
            gap = written.first_gap(first, stop)
            if gap is not None:
                raise ExtentError.unwritten(self.extent.name, gap[0], gap[1] - gap[0])
        # A write on its way may heal them: checked when it has ended.
        is_final = self.has_broken and not any(each.direction is Direction.WRITE for each in self.operations)
        if is_final and (error := self.broken_error(operation)) is not None:
            raise error
        self.num_admitted = operation.number = self.num_admitted + 1
        if self.rows:
            earlier = self.overlaps(operation)
            if is_read:  # reads do not wait for reads
                earlier = [each for each in earlier if each.direction is Direction.WRITE]
            operation.blockers = dict.fromkeys(earlier)
        if not is_read and not self._is_written:
            written.add(first, stop)
            self._is_written = written.first_gap(0, self.extent.num_bytes) is None
            self.is_plain = self._is_written and not self.has_broken and self.extent.state is ExtentState.LIVE
        insort(self.rows, (operation.hazard_start, operation.number, operation))
        self.longest_bytes = max(self.longest_bytes, operation.hazard_stop - operation.hazard_start)

    def overlaps(self, operation: Operation) -> list[Operation]:
        """Return the operations that touch the same bytes as this one, in the order of their submission."""
        rows, start = self.rows, operation.hazard_start
        # What overlaps begins before this one's end, and less than `longest_bytes` before its start. Example: rows
        # [0, 4096), [4096, 12288) and [20480, 24576), so longest_bytes = 8192. For [8192, 16384), only rows can overlap
        # that begin from 8192 - 8192 + 1 = 1 up to 16383: the second one.
        near = rows[bisect_left(rows, (start - self.longest_bytes + 1,)) : bisect_left(rows, (operation.hazard_stop,))]
        # A short row may end before `start`.
        return sorted((each for _, _, each in near if start < each.hazard_stop), key=_NUMBER)

    def remove(self, operation: Operation) -> None:
        """Leave an operation out, if it is there."""
        rows = self.rows
        index = bisect_left(rows, (operation.hazard_start, operation.number))
        if index < len(rows) and rows[index][2] is operation:
            del rows[index]
            if not rows:  # only then: a maximum of those that are left would look at all of them
                self.longest_bytes = 0

    def broken_error(self, operation: Operation) -> ExtentError | None:
        """Return the error of a read of bytes whose last write failed. Final only without blockers."""
        overlap = self._broken.first_overlap(operation.first, operation.stop)
        if overlap is None or operation.direction is Direction.WRITE:
            return None
        return ExtentError.broken(self.extent.name, overlap[0], overlap[1] - overlap[0])

    def finish(self, operation: Operation) -> None:
        """Record how an operation ended."""
        if operation.direction is Direction.WRITE:
            if operation.failure is not None:
                # Writing a part of a block rewrites the rest of it, which may be torn as well.
                self._broken.add(operation.hazard_start, min(operation.hazard_stop, self.extent.num_bytes))
            else:
                self._broken.remove(operation.first, operation.stop)
            self.has_broken = bool(self._broken)
            self.is_plain = self._is_written and not self.has_broken and self.extent.state is ExtentState.LIVE
