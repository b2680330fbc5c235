"""How much room several directories have together, and how it is shared out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swapper.errors import VolumeTooSmallError
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import Drive
from swapper.volumes.striping import StripeMap, were_full


class Space:
    """Knows how much each directory can give, in stripes; must not know how fast anything is.

    Args:
        directories: What was asked for.
        drives: What lies under them, in the same order.
        num_bytes: Size of the address space; a multiple of ``stripe_bytes``.
        stripe_bytes: Length of a stripe.
        own_bytes: What each file has already, of files that outlive the process: see [Note: what stays] in
            ``swapper/volumes/striping.py``.
        stays: That is the beginning of the address space, and stays where it is.

    Raises:
        VolumeTooSmallError: They have too little together.
    """

    def __init__(
        self,
        directories: Sequence[Directory],
        drives: Sequence[Drive],
        num_bytes: int,
        stripe_bytes: int,
        own_bytes: Sequence[int] | None,
        stays: bool,
    ) -> None:
        self._drives = drives
        self._num_stripes = num_bytes // stripe_bytes
        self._stripe_bytes = stripe_bytes
        # Directories of one file system take from the same free space. One of 0 bytes has no limit (ramfs).
        free = {d.device_number: d.free_bytes // stripe_bytes if d.total_bytes else self._num_stripes for d in drives}
        self._pools = [list(free).index(drive.device_number) for drive in drives]
        self._pool_rooms = list(free.values())
        self._held = [0 for _ in drives]
        is_full = [False for _ in drives]
        if own_bytes is not None:
            own = [num_bytes // stripe_bytes for num_bytes in own_bytes]
            sharing = Counter(self._pools)
            self._pool_rooms = [
                stripes + self._pool_rooms[pool] // sharing[pool]
                for stripes, pool in zip(own, self._pools, strict=True)
            ]
            self._pools = list(range(len(drives)))
            if stays:
                self._held, is_full = own, were_full(own)
        self._rooms: list[int] = []
        self._limits: list[str] = []
        for column, directory in enumerate(directories):
            room, limit = self._pool_rooms[self._pools[column]], "free"
            if is_full[column]:
                room, limit = self._held[column], "was full before"
            if directory.capacity_bytes is not None and directory.capacity_bytes // stripe_bytes < room:
                room, limit = directory.capacity_bytes // stripe_bytes, "its capacity_bytes"
            self._rooms.append(room)
            self._limits.append(limit)
        self._check()

    def room_bytes(self, column: int) -> int:
        """Return how much a directory can give."""
        return self._rooms[column] * self._stripe_bytes

    def lessen(self, column: int, num_bytes: int, reason: str) -> None:
        """Take note that a directory can give less than it seemed.

        Raises:
            VolumeTooSmallError: Now they have too little together.
        """
        self._rooms[column] = max(self._held[column], min(num_bytes // self._stripe_bytes, self._rooms[column] - 1))
        self._limits[column] = reason
        self._check()

    def share_out(self, speeds: Sequence[float]) -> StripeMap:
        """Return which address lies where, for drives of such speeds."""
        return StripeMap(self._num_stripes, self._stripe_bytes, speeds, self._rooms, self._pools, self._pool_rooms)

    def _check(self) -> None:
        in_pools = [0 for _ in self._pool_rooms]
        for pool, room in zip(self._pools, self._rooms, strict=True):
            in_pools[pool] += room
        num_stripes = sum(map(min, in_pools, self._pool_rooms))
        if num_stripes >= self._num_stripes:
            return
        capacities = []
        for column, drive in enumerate(self._drives):
            first = self._drives[self._pools.index(self._pools[column])]
            shared = "" if first is drive else f", shared with {str(first.path)!r}"
            capacities.append((drive.path, self.room_bytes(column), self._limits[column] + shared))
        least = min(range(len(capacities)), key=lambda column: capacities[column][1])
        raise VolumeTooSmallError(
            self._drives[least].path,
            self._num_stripes * self._stripe_bytes,
            num_stripes * self._stripe_bytes,
            f"in stripes of {self._stripe_bytes}",
            capacities,
        )
