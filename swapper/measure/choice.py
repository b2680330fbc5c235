"""The choice of a backend for a volume: as the config says, or by a measurement."""

from __future__ import annotations

import logging
import os
import statistics
import time
from dataclasses import dataclass, replace

from swapper.backend import IOBackend
from swapper.config import BackendName, SwapperConfig
from swapper.errors import BackendUnavailableError, SwapperError
from swapper.measure.by_name import open_by_name
from swapper.measure.measurement import DriveTest, IOSetting, Workload
from swapper.volumes.directory import Directory
from swapper.volumes.volume import Volume

logger = logging.getLogger(__name__)

_LEAST_BYTES = 256 << 20  # of a volume: on a smaller one a comparison takes longer than it could ever save
_MOST_INFLIGHT_BYTES = 32 << 20  # of requests in a comparison; its files take three times as much
_FILL_SECONDS = 0.5  # for filling the files; on a drive that needs longer, the filled part gives the speed
_SLOW_BYTES_PER_SECOND = 300e6  # below, worker threads are taken without a comparison
# 7 rounds of 25 ms with each of both: 0.35 s. More would make a choice less subject to noise, and each start longer.
_ROUND_SECONDS = 0.025
_NUM_ROUNDS = 7
_MIN_GAIN = 1.05  # of the median
_MIN_SHARE_WON = 0.7  # of the rounds: 5 of 7
_DEADLINE_SECONDS = 10.0  # of a transfer

# How comparisons ended in this process, by drives and settings, for volumes that are opened later.
_compared: dict[tuple[object, ...], tuple[bool, str]] = {}


@dataclass(frozen=True)
class Choice:
    """Which backend ``"auto"`` takes, and why.

    Attributes:
        backend: Its name in the config.
        reason: Why; for worker threads, why not io_uring.
        cure: What would make io_uring work, if it does not; else empty.
        is_surprising: The liburing package is installed, and io_uring does not work: logged as a warning.
    """

    backend: BackendName
    reason: str
    cure: str = ""
    is_surprising: bool = False

    @classmethod
    def without_uring(cls, error: BackendUnavailableError) -> Choice:
        """Worker threads, since io_uring does not work."""
        is_surprising = not isinstance(error.__cause__, ModuleNotFoundError)  # the package is not installed
        return cls("threads", error.reason, error.cure, is_surprising)

    def __str__(self) -> str:
        match self.backend:
            case "aiofiles":
                return f"aiofiles is used: {self.reason}"
            case "uring":
                return f"io_uring is used: {self.reason}"
        cure = f"; to change that, {self.cure}" if self.cure else ""
        return f"worker threads are used and not io_uring: {self.reason}{cure}"


def choose(volume: Volume, config: SwapperConfig) -> Choice:
    """Return which backend ``"auto"`` takes: io_uring if it works and is clearly faster, else worker threads.

    It is measured in other files of the same directories; the volume keeps its contents.
    """
    portable_because = _why_portable(volume, config)
    if portable_because:
        return Choice("aiofiles", portable_because)
    try:
        is_faster, reason = _compare(volume, config)
    except BackendUnavailableError as error:
        return Choice.without_uring(error)
    except SwapperError as error:
        return Choice("threads", f"a trial run failed ({error})")
    return Choice("uring" if is_faster else "threads", reason)


def open_backend(volume: Volume, config: SwapperConfig) -> IOBackend:
    """Return the backend that ``config`` asks for; it owns the volume from then on.

    ``"auto"`` takes what `choose` returns, and one line in the log says why. The volume keeps its contents, but nobody
    else may use it until this returns.

    Raises:
        BackendUnavailableError: A backend that is named cannot work here. The volume is still the caller's.
    """
    if config.backend != "auto":
        return open_by_name(volume, config)
    choice = choose(volume, config)
    try:
        backend = open_by_name(volume, replace(config, backend=choice.backend))
    except BackendUnavailableError as error:  # io_uring, which did not work in these files
        choice = Choice.without_uring(error)
        backend = open_by_name(volume, replace(config, backend=choice.backend))
    logger.log(logging.WARNING if choice.is_surprising else logging.INFO, "%s", choice)
    return backend


def _why_portable(volume: Volume, config: SwapperConfig) -> str:
    """Return why only ordinary reads and writes can be relied on in these files; empty if direct I/O works."""
    for file in volume.files:
        if file.drive.is_network:
            return f"{str(file.directory)!r} is on a network file system ({file.drive.file_system})"
    if config.direct and not any(file.is_direct for file in volume.files):
        return f"{volume.files[0].name} goes through the page cache: {volume.files[0].buffered_because}"
    return ""


def _compare(volume: Volume, config: SwapperConfig) -> tuple[bool, str]:
    """Return whether io_uring is to be used, and why, or why not.

    Raises:
        BackendUnavailableError: It does not work.
        SwapperError: The comparison failed.
    """
    if volume.capacity_bytes < _LEAST_BYTES:
        return False, f"a volume of {volume.capacity_bytes} bytes is too small to be worth a comparison"
    if not volume.is_direct:
        return False, "some files go through the page cache"
    drives = tuple(os.fstat(file.fd).st_dev for file in volume.files)
    key = (drives, config.request_bytes, config.max_inflight, config.num_threads)
    if key not in _compared:
        # Only ratios of speeds count: with lengths as speeds, drives get the same parts as in the volume.
        directories = [Directory(file.directory, bytes_per_second=max(1, file.num_bytes)) for file in volume.files]
        _compared[key] = measure_gain(directories, config)
    return _compared[key]


def measure_gain(directories: list[Directory], config: SwapperConfig) -> tuple[bool, str]:
    """Compare worker threads and io_uring on the bytes of optimizer steps, in turns, for about half a second.

    Args:
        directories: Where to make files for it.
        config: Length and number of the requests.

    Returns:
        Whether io_uring is faster, by enough and in nearly all rounds; and a sentence that says so.

    Raises:
        BackendUnavailableError: io_uring does not work.
        SwapperError: A transfer failed, or had no answer, or there is no space.
    """
    num_inflight = max(1, min(config.max_inflight, _MOST_INFLIGHT_BYTES // config.request_bytes))
    threads = IOSetting("threads", config.request_bytes, config.num_threads, num_inflight)
    uring = replace(threads, backend="uring")
    file_bytes = 3 * max(_MOST_INFLIGHT_BYTES, config.request_bytes) // len(directories)
    with DriveTest(directories, file_bytes, deadline_seconds=_DEADLINE_SECONDS) as test:
        wanted_bytes = test.num_bytes
        started = time.perf_counter()
        test.prepare(max_seconds=_FILL_SECONDS)
        speed = test.num_bytes / (time.perf_counter() - started)
        if test.num_bytes == wanted_bytes:  # filled in time; else the drive is slow, and first writes tell enough
            speed = test.measure(threads, Workload.MIXED, _ROUND_SECONDS).bytes_per_second
        if speed < _SLOW_BYTES_PER_SECOND:
            return False, f"worker threads keep up with a drive of {speed / 1e6:.0f} MB/s"
        gains: list[float] = []
        for number in range(_NUM_ROUNDS):
            # Each is first in every other round: what the drive does in the course of time then hits both.
            order = (threads, uring) if number % 2 else (uring, threads)
            speeds = {one: test.measure(one, Workload.MIXED, _ROUND_SECONDS).bytes_per_second for one in order}
            gains.append(speeds[uring] / speeds[threads])
    gain, num_won = statistics.median(gains), sum(one > 1 for one in gains)
    words = (
        f"it is {gain:.2f} times as fast as worker threads (median of {len(gains)} rounds, of which it won {num_won})"
    )
    return gain >= _MIN_GAIN and num_won >= _MIN_SHARE_WON * len(gains), words
