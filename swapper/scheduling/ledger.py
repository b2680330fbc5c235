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
from swapper.extents.extent import Extent
from swapper.extents.intervals import IntervalSet
from swapper.scheduling.operation import Operation

_NUMBER = attrgetter("number")


class Overlaps:
    """Operations in the order of the first byte that they touch. The scheduler's lock guards it.

    Thousands of small operations may be unfinished at once, so `of` must not look at each of them.
    """

    __slots__ = ("longest", "rows")

    def __init__(self) -> None:
        # First byte, number, operation. Numbers differ, so that bisect never compares two operations.
        self.rows: list[tuple[int, int, Operation]] = []
        self.longest = 0  # bytes; only grows, until no row is left

    def pop(self, operation: Operation) -> None:
        """Leave an operation out, if it is there."""
        rows = self.rows
        index = bisect_left(rows, (operation.hazard_start, operation.number))
        if index < len(rows) and rows[index][2] is operation:
            del rows[index]
            if not rows:
                self.longest = 0

    def of(self, operation: Operation) -> list[Operation]:
        """Return the operations that overlap with this one, in the order of their submission."""
        rows, start = self.rows, operation.hazard_start
        # What overlaps begins before this one's end, and less than `longest` bytes before its start. Example:
        # rows [0, 4096), [4096, 12288) and [20480, 24576), so longest = 8192. For [8192, 16384), only rows can overlap
        # that begin from 8192 - 8192 + 1 = 1 up to 16383: the second one.
        near = rows[bisect_left(rows, (start - self.longest + 1,)) : bisect_left(rows, (operation.hazard_stop,))]
        found: list[Operation] = []
        for _, _, other in near:
            if start < other.hazard_stop:  # a short row may end before `start`
                found.append(other)
        if len(found) > 1:
            found.sort(key=_NUMBER)
        return found


class Ledger:
    """One extent's state: which bytes are written or broken, and its unfinished operations.

    The scheduler has one for each extent in use, and its lock guards them.
    """

    __slots__ = ("_broken", "_is_written", "_next", "_written", "extent", "has_broken", "working")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        # A write counts from its submission on, because whatever is submitted later runs after it.
        self._written = IntervalSet()
        self._is_written = extent.is_prewritten  # all of it: then `admit` asks no interval set
        # Bytes whose last finished write failed.
        self._broken = IntervalSet()
        self.has_broken = False  # whether _broken has any bytes
        self.working = (Overlaps(), Overlaps())  # unfinished or stalled reads, and writes; indexed by Direction
        self._next = 0

    @property
    def operations(self) -> list[Operation]:
        """All operations that are unfinished or stalled."""
        return [operation for overlaps in self.working for _, _, operation in overlaps.rows]

    def admit(self, operation: Operation) -> None:
        """Add an operation, and put those it must wait for into its ``blockers``: see [Note: order on the same bytes].

        Raises:
            ExtentError: A read of bytes that are known to be unreadable.
        """
        reads, writes = self.working
        written, first, stop = self._written, operation.first, operation.stop
        is_read = operation.direction is Direction.READ
        if not self._is_written:
            if is_read:
                gap = written.first_gap(first, stop)
                if gap is not None:
                    raise ExtentError.unwritten(self.extent.name, gap[0], gap[1] - gap[0])
            else:
                # The neighbours in the blocks at the two ends matter only if somebody wrote them.
                operation.may_pad = not (
                    (operation.hazard_start < first and written.first_overlap(operation.hazard_start, first))
                    or (stop < operation.hazard_stop and written.first_overlap(stop, operation.hazard_stop))
                )
        # A write on its way may heal them: checked when it has ended.
        if is_read and self.has_broken and not writes.rows:
            self.check_broken(operation)
        self._next = operation.number = self._next + 1
        if writes.rows:
            operation.blockers = dict.fromkeys(writes.of(operation))
        if not is_read:  # reads do not wait for reads
            if reads.rows:
                operation.blockers = {**operation.blockers, **dict.fromkeys(reads.of(operation))}
            if not self._is_written:
                written.add(first, stop)
                self._is_written = written.first_gap(0, self.extent.num_bytes) is None
        among = self.working[operation.direction]
        insort(among.rows, (operation.hazard_start, operation.number, operation))
        among.longest = max(among.longest, operation.hazard_stop - operation.hazard_start)

    def check_broken(self, operation: Operation) -> None:
        """Raise for a read of bytes whose last write failed. Final only when the operation has no blockers left."""
        if operation.direction is Direction.READ:
            overlap = self._broken.first_overlap(operation.first, operation.stop)
            if overlap is not None:
                raise ExtentError.broken(self.extent.name, overlap[0], overlap[1] - overlap[0])

    def finish(self, operation: Operation) -> None:
        """Record how an operation ended."""
        if operation.direction is Direction.WRITE:
            if operation.failure is not None:
                # Writing a part of a block rewrites the rest of it, which may be torn as well.
                self._broken.add(operation.hazard_start, min(operation.hazard_stop, self.extent.num_bytes))
            else:
                self._broken.remove(operation.first, operation.stop)
            self.has_broken = bool(self._broken)
