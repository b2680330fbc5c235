"""From the name of a backend to that backend."""

from __future__ import annotations

from swapper.backend import IOBackend
from swapper.backends.aio_files import AiofilesBackend
from swapper.backends.threads import ThreadsBackend
from swapper.backends.uring.backend import MAX_QUEUE_DEPTH, TEST_BYTES, UringBackend, find_fault
from swapper.backends.workers import STOP_SECONDS
from swapper.config import SwapperConfig
from swapper.errors import ArgumentError, BackendUnavailableError, VolumeError
from swapper.uncopyable import closed_unless_made
from swapper.volumes.scratch_file import NamedFile
from swapper.volumes.volume import Volume


def open_by_name(volume: Volume, config: SwapperConfig) -> IOBackend:
    """Return the backend that ``config`` names; it owns the volume from then on.

    The volume keeps its contents, but nobody else may use it until this returns.

    Raises:
        BackendUnavailableError: It cannot work here. The volume is still the caller's.
        ArgumentError: ``"auto"`` names none.
    """
    match config.backend:
        case "threads":
            return ThreadsBackend(volume, config.num_threads, config.request_bytes)
        case "aiofiles":
            return AiofilesBackend(volume, config.num_threads)
        case "uring":
            return _open_uring(volume, config)
    raise ArgumentError(f"{config.backend!r} is no backend by itself; name one")


def _open_uring(volume: Volume, config: SwapperConfig) -> UringBackend:
    """Return a ring that has passed the self-test."""
    # On the files of a durable run, a kill in the middle of the test would leave test bytes in the states. So the test
    # uses scratch files in the same directories.
    queue_depth = min(config.max_inflight, MAX_QUEUE_DEPTH)
    if not any(isinstance(file, NamedFile) for file in volume.files):
        return _tested(volume, queue_depth)
    directories = [file.directory for file in volume.files]
    try:
        scratch = Volume(directories, len(directories) * TEST_BYTES, stripe_bytes=TEST_BYTES, direct=config.direct)
    except VolumeError as error:
        raise BackendUnavailableError("uring", f"its self-test has no room: {error}", "make some") from error
    with closed_unless_made(scratch.close):
        backend = _tested(scratch, queue_depth)
    backend.close(STOP_SECONDS)
    return UringBackend(volume, queue_depth)


def _tested(volume: Volume, queue_depth: int) -> UringBackend:
    backend = UringBackend(volume, queue_depth)
    with closed_unless_made(backend.stop, STOP_SECONDS):  # stop and not close: the caller goes on with the volume
        fault = find_fault(backend)
        if fault:
            raise BackendUnavailableError("uring", fault, "report this with the version of your kernel")
    return backend
