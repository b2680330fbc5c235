"""How fast drives move bytes, found out in a fraction of a second."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence

from swapper.errors import VolumeError, VolumeTooSmallError, error_words
from swapper.memory.region import AlignedRegion
from swapper.volumes.directory import Directory
from swapper.volumes.scratch_file import ScratchFile

logger = logging.getLogger(__name__)

_SMALLEST_VOLUME_BYTES = 64 << 20  # below, the measurement would take longer than what it saves
_REGION_BYTES = 32 << 20
_REQUEST_BYTES = 256 << 10
_NUM_THREADS = 4
_PHASE_SECONDS = 0.12
_PHASE_BYTES = 256 << 20
_HANG_SECONDS = 30.0


_known: dict[tuple[str, str], float] = {}  # by drive and directory, while the process lives


def speeds_of(
    files: Sequence[ScratchFile],
    directories: Sequence[Directory],
    rooms: Sequence[int],
    capacity_bytes: int,
    direct: bool,
) -> list[float]:
    """Return how fast each file is, in bytes per second; only ratios (all 1.0) if that is not known.

    What is not given is measured, one drive after the other, unless all files lie on one drive, the volume is small, or
    transfers go through the page cache, whose speed says nothing of the drive's. Directories on one drive share its
    speed.

    Args:
        files: One for each directory; some space of theirs is reserved for the measurement.
        directories: What was asked for.
        rooms: How many bytes each may take.
        capacity_bytes: Size of the volume.
        direct: Whether transfers are to bypass the page cache.

    Raises:
        VolumeError: A drive fails.
    """
    sharing = Counter(file.drive.identity for file in files)
    for identity, count in sharing.items():
        if count > 1:
            names = ", ".join(repr(str(file.directory)) for file in files if file.drive.identity == identity)
            logger.warning(
                "%s are on one drive (%s): two directories on one drive do not add bandwidth", names, identity
            )
    speeds = [directory.bytes_per_second for directory in directories]
    if len(sharing) > 1 and capacity_bytes >= _SMALLEST_VOLUME_BYTES and direct:
        measured: dict[str, float | None] = {}
        for column, file in enumerate(files):
            identity = file.drive.identity
            if speeds[column] is None:
                if identity not in measured:
                    measured[identity] = _measured(file, rooms[column])
                speed = measured[identity]
                speeds[column] = None if speed is None else speed / sharing[identity]
    known = [speed for speed in speeds if speed is not None]
    default = sum(known) / len(known) if known else 1.0
    return [default if speed is None else speed for speed in speeds]


def _measured(file: ScratchFile, room_bytes: int) -> float | None:
    """Return the speed of a file's drive, or ``None`` if it cannot be found out."""
    key = (file.drive.identity, str(file.directory.resolve()))
    if key not in _known:
        try:
            file.reserve(min(_REGION_BYTES, room_bytes))
        except VolumeTooSmallError:
            return None
        file.bypass_page_cache(True)
        if not file.is_direct or file.num_bytes < _REQUEST_BYTES:
            return None
        _known[key] = measure_speed(file)
    return _known[key]


def measure_speed(file: ScratchFile) -> float:
    """Return the bytes per second of a drive at which bytes that are written and read once come and go.

    It writes for 0.12 seconds (256 MiB at most), then reads as long what it has written; requests that have been started
    are waited for. The reserved space of the file must be written and read directly; what is in it is lost.

    Raises:
        VolumeError: The drive reports an error or does not answer.
    """
    num_blocks = min(file.num_bytes, _REGION_BYTES) // _REQUEST_BYTES
    # What is reserved and not written yet is read without asking the drive.
    written = _Phase(file, num_blocks, is_write=True)
    written.run()
    read = _Phase(file, min(num_blocks, written.num_started), is_write=False)
    read.run()
    return 2 / (1 / written.bytes_per_second + 1 / read.bytes_per_second)


class _Phase:
    """Knows threads that do the same to one file until the time is up."""

    def __init__(self, file: ScratchFile, num_blocks: int, is_write: bool) -> None:
        self._file = file
        self._num_blocks = max(1, num_blocks)
        self._is_write = is_write
        self._stop_at = 0.0
        self._error: OSError | None = None
        self.num_started = 0
        self.bytes_per_second = 0.0
        self._num_bytes = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Move bytes, and count them."""
        started = time.monotonic()
        self._stop_at = started + _PHASE_SECONDS
        threads = [
            threading.Thread(target=self._work, name=f"swapper-speed-{index}", daemon=True)
            for index in range(_NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, started + _HANG_SECONDS - time.monotonic()))
        elapsed = time.monotonic() - started
        if any(thread.is_alive() for thread in threads):
            self._raise(f"did not answer for {_HANG_SECONDS:g} seconds")
        if self._error is not None:
            self._raise(error_words(self._error), self._error)
        # With the time in which the last ones end: some limits let much pass at once and then nothing for a while.
        self.bytes_per_second = max(1.0, self._num_bytes / elapsed)

    def _work(self) -> None:
        memory = AlignedRegion(_REQUEST_BYTES).array().data
        memory[:] = os.urandom(_REQUEST_BYTES)  # a drive may find zeros easier than anything else
        transfer = os.pwritev if self._is_write else os.preadv
        try:
            is_over = False
            while not is_over:
                with self._lock:
                    block = self.num_started
                    self.num_started += 1
                num_bytes = transfer(self._file.fd, (memory,), block % self._num_blocks * _REQUEST_BYTES)
                with self._lock:
                    self._num_bytes += num_bytes
                is_over = self._error is not None or time.monotonic() >= self._stop_at
                is_over = is_over or self.num_started * _REQUEST_BYTES >= _PHASE_BYTES
        except OSError as error:
            self._error = error

    def _raise(self, detail: str, cause: OSError | None = None) -> None:
        what = "writing to" if self._is_write else "reading from"
        raise VolumeError(
            self._file.directory, f"{what} {self._file.name} failed: {detail}; see the kernel log for this drive"
        ) from cause
