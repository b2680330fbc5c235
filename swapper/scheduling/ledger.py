"""What is known of the bytes of one extent: which can be read, and who is at work on them.

[Note: order on the same bytes]
Operations that touch the same block of an extent, at least one of them writing, run one after the other in the order of
their submission; all others run side by side. An operation keeps the earlier ones it must wait for in ``blockers`` and
becomes ready when the last of them is over, whether it succeeded or not: a failed write has by then marked its bytes as
broken, so a read behind it fails instead of returning stale bytes, and a later write of the same bytes heals them.
Whoever comes behind a write waits for what it covers by waiting for it. If it ends before that, because what it waits for
hangs or all is being closed, those behind it wait for that themselves (`Scheduler._finish`).
"""

from __future__ import annotations

from swapper.backend import Direction
from swapper.errors import ExtentError
from swapper.extents.extent import Extent
from swapper.extents.intervals import IntervalSet
from swapper.scheduling.operation import Operation
from swapper.scheduling.overlaps import Overlaps


class Ledger:
    """Knows which bytes of an extent are written or broken, and its unfinished operations. Its owner locks."""

    __slots__ = ("_broken", "_reads", "_writes", "_written", "extent")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        # A write counts from its submission on, because whatever is submitted later runs after it.
        self._written = IntervalSet()
        if extent.is_prewritten:
            self._written.add(0, extent.num_bytes)
        # Bytes whose last finished write failed.
        self._broken = IntervalSet()
        self._reads = Overlaps()
        self._writes = Overlaps()

    @property
    def operations(self) -> list[Operation]:
        """All operations that are unfinished or stalled."""
        return [*self._reads, *self._writes]

    def check(self, operation: Operation) -> None:
        """Refuse a read of bytes that are known to be unreadable; see whether a write has neighbours to care for."""
        offset, stop = operation.offset, operation.stop
        if operation.direction is Direction.READ:
            gap = self._written.first_gap(offset, stop)
            if gap is not None:
                raise ExtentError.unwritten(self.extent.name, gap[0], gap[1] - gap[0])
            if self._broken and not self._writes:
                self.check_broken(operation)
        else:
            # The neighbours in the blocks at the two ends matter only if somebody wrote them.
            operation.may_pad = not (
                self._written.first_overlap(operation.hazard_start, offset)
                or self._written.first_overlap(stop, operation.hazard_stop)
            )

    def check_broken(self, operation: Operation) -> None:
        """Refuse a read of bytes whose last write failed. Final once nothing blocks the operation any more."""
        if self._broken and operation.direction is Direction.READ:
            overlap = self._broken.first_overlap(operation.offset, operation.stop)
            if overlap is not None:
                raise ExtentError.broken(self.extent.name, overlap[0], overlap[1] - overlap[0])

    def admit(self, operation: Operation) -> None:
        """Take an operation and put the ones it must wait for into its ``blockers``."""
        operation.blockers.update(dict.fromkeys(self._writes.of(operation)))
        if operation.direction is Direction.READ:
            self._reads.add(operation)
        else:
            operation.blockers.update(dict.fromkeys(self._reads.of(operation)))
            self._cover(operation)
            self._writes.add(operation)
            self._written.add(operation.offset, operation.stop)

    def settle(self, operation: Operation) -> None:
        """Note how an operation ended."""
        if operation.direction is Direction.READ:
            return
        if operation.error is None:
            self._broken.remove(operation.offset, operation.stop)
        else:
            # Writing a part of a block rewrites the rest of it, which may be torn as well.
            self._broken.add(operation.hazard_start, min(operation.hazard_stop, self.extent.num_bytes))

    def discharge(self, operation: Operation) -> None:
        """Forget an operation that nothing is at work on any more."""
        self._of(operation).pop(operation)
        for earlier in operation.covered:  # it may have ended before what it waited for
            self._of(earlier).show(earlier)
        operation.covered = []

    def _cover(self, operation: Operation) -> None:
        start, stop = operation.hazard_start, operation.hazard_stop
        blockers = operation.blockers
        operation.covered = [each for each in blockers if start <= each.hazard_start and each.hazard_stop <= stop]
        for earlier in operation.covered:
            self._of(earlier).hide(earlier)

    def _of(self, operation: Operation) -> Overlaps:
        return self._reads if operation.direction is Direction.READ else self._writes
