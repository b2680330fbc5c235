"""The free space of several directories, and its division into stripes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swapper.errors import VolumeTooSmallError
from swapper.volumes.directory import Directory
from swapper.volumes.scratch_file import ScratchFile
from swapper.volumes.striping import StripeMap, were_full


class Space:
    """The number of stripes that each directory can give.

    Args:
        directories: As the user named them.
        files: Their files, in the same order.
        num_bytes: Size of the address space; a multiple of ``stripe_bytes``.
        stripe_bytes: Length of a stripe.
        is_named: The files are those of a durable run: see [Note: what stays] in ``swapper/volumes/striping.py``.
        stays: The files hold a run that is resumed, so each stripe keeps its place.

    Raises:
        VolumeTooSmallError: They have too little together.
    """

    def __init__(
        self,
        directories: Sequence[Directory],
        files: Sequence[ScratchFile],
        num_bytes: int,
        stripe_bytes: int,
        is_named: bool,
        stays: bool,
    ) -> None:
        self._drives = drives = [file.drive for file in files]
        self._num_stripes = num_bytes // stripe_bytes
        self._stripe_bytes = stripe_bytes
        # Directories of one file system share its free space: a pool. A file system of 0 bytes has no limit (ramfs).
        # Example: a and b are on one file system with 10 free stripes, c on another with 7.
        #   _pools = [0, 0, 1], _pool_rooms = [10, 7], and with capacity_bytes of 3 stripes for b: _rooms = [10, 3, 7]
        # Together they give min(10 + 3, 10) + min(7, 7) = 17 stripes: see _check.
        free = {d.device_number: d.free_bytes // stripe_bytes if d.total_bytes else self._num_stripes for d in drives}
        self._pools = [list(free).index(drive.device_number) for drive in drives]
        self._pool_rooms = list(free.values())
        self._held = [0 for _ in drives]  # stripes that must stay in each file
        is_full = [False for _ in drives]
        if is_named:
            # Each file is a pool of its own here, with an equal part of the free space: where a stripe is must follow
            # from the lengths of the files alone.
            own = [file.num_bytes // stripe_bytes for file in files]
            sharing = Counter(self._pools)
            self._pool_rooms = [
                stripes + self._pool_rooms[pool] // sharing[pool]
                for stripes, pool in zip(own, self._pools, strict=True)
            ]
            self._pools = list(range(len(drives)))
            if stays:
                # A drive that was full before the others gets no stripe more, although it may have space again.
                self._held, is_full = own, were_full(own)
        self._rooms: list[int] = []
        self._limits: list[str] = []
        for column, directory in enumerate(directories):  # column: index of a drive, in all lists here
            room, limit = self._pool_rooms[self._pools[column]], "free"
            if is_full[column]:
                room, limit = self._held[column], "was full before"
            if directory.capacity_bytes is not None and directory.capacity_bytes // stripe_bytes < room:
                room, limit = directory.capacity_bytes // stripe_bytes, "its capacity_bytes"
            self._rooms.append(room)
            self._limits.append(limit)
        self._check()

    def lessen(self, column: int, num_bytes: int, reason: str) -> None:
        """Lower what the directory of this index can give, after a reservation that failed.

        Raises:
            VolumeTooSmallError: Now they have too little together.
        """
        # At least one stripe less, so that the caller's loop ends; but never less than what must stay.
        self._rooms[column] = max(self._held[column], min(num_bytes // self._stripe_bytes, self._rooms[column] - 1))
        self._limits[column] = reason
        self._check()

    def share_out(self, speeds: Sequence[float]) -> StripeMap:
        """Return the map from addresses to drives, for these speeds."""
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
            capacities.append((drive.path, self._rooms[column] * self._stripe_bytes, self._limits[column] + shared))
        least = min(range(len(capacities)), key=lambda column: capacities[column][1])
        raise VolumeTooSmallError(
            self._drives[least].path,
            self._num_stripes * self._stripe_bytes,
            num_stripes * self._stripe_bytes,
            f"in stripes of {self._stripe_bytes}",
            capacities,
        )
