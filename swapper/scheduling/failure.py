"""From what went wrong with an operation to the error that says so."""

from __future__ import annotations

from swapper.backend import CorruptedDataError, IOBackend, IORequest
from swapper.errors import ChecksumMismatchError, ShortTransferError, StallError, TransferError
from swapper.scheduling.operation import Operation


def os_error(operation: Operation, request: IORequest, backend: IOBackend, error: OSError) -> TransferError:
    """Return the error of a transfer that the operating system refused, or of which the bytes are wrong."""
    if isinstance(error, CorruptedDataError):
        return _mismatch_error(operation, backend, error)
    file, offset = backend.locate(request.offset)
    num_bytes = len(request.memory)
    return TransferError.from_os_error(
        operation.direction.name.lower(),
        operation.extent.name,
        file,
        offset,
        num_bytes,
        error,
        _contents(operation, request.offset, num_bytes),
    )


def _mismatch_error(operation: Operation, backend: IOBackend, error: CorruptedDataError) -> ChecksumMismatchError:
    file, offset = backend.locate(error.offset)
    mapped = ChecksumMismatchError(
        operation.direction.name.lower(),
        operation.extent.name,
        file,
        offset,
        error.num_bytes,
        None,
        "gave other bytes than were written (their crc32c differs): do not go on with these states, start over from the "
        "last checkpoint; the kernel log, the drive's health (smartctl, nvme smart-log) and a memory test say what has to "
        "be replaced",
        _contents(operation, error.offset, error.num_bytes),
    )
    mapped.__cause__ = error
    return mapped


def _contents(operation: Operation, start: int, num_bytes: int) -> str:
    """Return what lies in bytes of the backend's address space."""
    offset = start - operation.extent.start
    return operation.extent.contents(offset, offset + num_bytes)


def short_error(
    operation: Operation, request: IORequest, backend: IOBackend, transferred_bytes: int, num_attempts: int
) -> ShortTransferError:
    """Return the error of a transfer that stayed short however often it was tried."""
    file, offset = backend.locate(request.offset)
    return ShortTransferError(
        operation.direction.name.lower(),
        operation.extent.name,
        file,
        offset,
        len(request.memory),
        None,
        f"stopped after {transferred_bytes} bytes at the last of {num_attempts} attempts: the file has become "
        "shorter or its drive is going away",
        _contents(operation, request.offset, len(request.memory)),
    )


def behind_error(operation: Operation, hung: Operation, backend: IOBackend) -> StallError:
    """Return the error of an operation that cannot begin because another one hangs."""
    where = f" in {hung.error.file}" if isinstance(hung.error, TransferError) else ""
    return stall_error(operation, None, backend, f"is behind a transfer that hangs{where}")


def stall_error(operation: Operation, request: IORequest | None, backend: IOBackend, detail: str) -> StallError:
    """Return the error of an operation, or of one of its transfers, that does not end."""
    start = operation.start if request is None else request.offset
    num_bytes = operation.num_bytes if request is None else len(request.memory)
    file, offset = backend.locate(start)
    return StallError(
        operation.direction.name.lower(),
        operation.extent.name,
        file,
        offset,
        num_bytes,
        None,
        f"{detail}; see the kernel log for this drive, or raise deadline_seconds (in a training, config key "
        "infinity.io_deadline_seconds) if it is only slow",
        _contents(operation, start, num_bytes),
    )
