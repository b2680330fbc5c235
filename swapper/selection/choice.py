"""From a config to the backend that moves the bytes of a volume."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from swapper.backend import IOBackend
from swapper.backends.aio_files import AiofilesBackend
from swapper.backends.gds import open_gds
from swapper.backends.threads import ThreadsBackend
from swapper.backends.uring.backend import MAX_QUEUE_DEPTH, UringBackend
from swapper.backends.uring.self_test import find_fault
from swapper.config import BackendName, SwapperConfig
from swapper.errors import BackendUnavailableError, SwapperError
from swapper.selection.race import MIN_CAPACITY_BYTES, RaceResult, race
from swapper.volumes.volume import Volume

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0

_results: dict[tuple[object, ...], RaceResult] = {}
"""How races ended in this process, by drives and settings."""


def open_backend(volume: Volume, config: SwapperConfig) -> IOBackend:
    """Return the backend that ``config`` asks for; it owns the volume from then on.

    What lies in the volume stays as it is, but until this returns nobody else may use it.

    Raises:
        BackendUnavailableError: A backend that was asked for by name cannot work here. The volume is still the caller's.
    """
    return _OPENERS[config.backend](volume, config)


def _open_threads(volume: Volume, config: SwapperConfig) -> ThreadsBackend:
    return ThreadsBackend(volume, config.num_threads)


def _open_uring(volume: Volume, config: SwapperConfig) -> UringBackend:
    """Set a ring up and have it pass the self-test."""
    backend = UringBackend(volume, min(config.max_inflight, MAX_QUEUE_DEPTH))
    try:
        fault = find_fault(backend)
        if fault:
            raise BackendUnavailableError("uring", fault, "report this with the version of your kernel")
    except BaseException:
        backend.stop(_STOP_SECONDS)
        raise
    return backend


def _open_aiofiles(volume: Volume, config: SwapperConfig) -> AiofilesBackend:
    return AiofilesBackend(volume, config.num_threads)


def _open_gds(volume: Volume, config: SwapperConfig) -> IOBackend:
    return open_gds(volume, config.num_threads)


def _open_automatically(volume: Volume, config: SwapperConfig) -> IOBackend:
    """Take io_uring where it works and proves itself faster, else worker threads; one line in the log says why."""
    portable_because = _why_portable(volume, config)
    if portable_because:
        logger.info("aiofiles is used: %s", portable_because)
        return _open_aiofiles(volume, config)
    level = logging.INFO
    try:
        uring, reason = _try_uring(volume, config)
    except BackendUnavailableError as error:
        uring, reason = None, f"{error.reason}; to change that, {error.cure}"
        if not isinstance(error.__cause__, ModuleNotFoundError):  # who has not installed it does not expect it
            level = logging.WARNING
    if uring is not None:
        logger.info("io_uring is used: %s", reason)
        return uring
    logger.log(level, "worker threads are used and not io_uring: %s", reason)
    return _open_threads(volume, config)


def _why_portable(volume: Volume, config: SwapperConfig) -> str:
    """Return why the files are such that only ordinary reads and writes can be relied on; nothing if they are not."""
    for file in volume.files:
        if file.drive.is_network:
            return f"{str(file.directory)!r} is on a network file system ({file.drive.file_system})"
    if config.direct and not any(file.is_direct for file in volume.files):
        return f"{volume.files[0].name} goes through the page cache: {volume.files[0].buffered_because}"
    return ""


def _try_uring(volume: Volume, config: SwapperConfig) -> tuple[UringBackend | None, str]:
    """Return io_uring if it is to be used, and why, or why not.

    Raises:
        BackendUnavailableError: It does not work.
    """
    if volume.capacity_bytes < MIN_CAPACITY_BYTES:
        return None, f"a volume of {volume.capacity_bytes} bytes is too small for a comparison to pay"
    if not volume.is_direct:
        return None, "some files go through the page cache"
    drives = tuple(os.fstat(file.fd).st_dev for file in volume.files)
    key = (drives, config.request_bytes, config.max_inflight, config.num_threads)
    result = _results.get(key)
    if result is not None and not result.is_won:
        return None, f"{result.reason}, as measured before"
    uring = _open_uring(volume, config)
    try:
        if result is None:
            result = _results[key] = _race(uring, volume, config)
        if result.is_won:
            return uring, result.reason
    except SwapperError as error:
        result = RaceResult(False, f"a trial run failed ({error})")
    except BaseException:
        uring.stop(_STOP_SECONDS)
        raise
    uring.stop(_STOP_SECONDS)
    return None, result.reason


def _race(uring: UringBackend, volume: Volume, config: SwapperConfig) -> RaceResult:
    threads = _open_threads(volume, config)
    try:
        return race(threads, uring, config)
    finally:
        threads.stop(_STOP_SECONDS)


_OPENERS: dict[BackendName, Callable[[Volume, SwapperConfig], IOBackend]] = {
    "auto": _open_automatically,
    "threads": _open_threads,
    "uring": _open_uring,
    "aiofiles": _open_aiofiles,
    "gds": _open_gds,
}
