"""The errors of failed operations."""

from __future__ import annotations

from swapper.backend import CorruptedDataError, IOBackend, IORequest
from swapper.errors import ChecksumMismatchError, StallError, TransferError, refusal
from swapper.scheduling.operation import Operation, Transfer


def _error(
    kind: type[TransferError],
    operation: Operation,
    backend: IOBackend,
    start: int,
    num_bytes: int,
    detail: str,
    cause: OSError | None = None,
) -> TransferError:
    """Return the error of bytes of an operation, from ``start`` on in the backend's address space."""
    file, file_offset = backend.locate(start)
    extent = operation.extent
    contents = extent.contents(start - extent.start, start - extent.start + num_bytes)
    code = cause.errno if cause is not None else None
    error = kind(operation.direction.name.lower(), extent.name, file, file_offset, num_bytes, code, detail, contents)
    if cause is not None:
        error.__cause__ = cause
    return error


def transfer_error(
    operation: Operation, transfer: Operation | Transfer, backend: IOBackend, moved_bytes: int, error: OSError | None
) -> TransferError:
    """Return the error of a transfer: the system refused it, its bytes are wrong, or it was short at each attempt."""
    if isinstance(error, CorruptedDataError):
        detail = (
            "returned other bytes than were written (the crc32c differs): do not continue with these states, but "
            "start again from the last checkpoint; the kernel log, the drive's health (smartctl, nvme smart-log) and "
            "a memory test show what to replace"
        )
        return _error(ChecksumMismatchError, operation, backend, error.offset, error.num_bytes, detail, error)
    detail = (
        f"stopped after {moved_bytes} bytes at the last of {transfer.num_retries + 1} attempts: the file has become "
    )
    detail += "shorter or its drive is going away"
    if error is not None:
        detail = refusal(error)
    return _error(TransferError, operation, backend, transfer.offset, len(transfer.memory), detail, error)


def behind_error(operation: Operation, hung: Operation, backend: IOBackend) -> TransferError:
    """Return the error of an operation that cannot begin because another one hangs."""
    where = f" in {hung.failure.file}" if isinstance(hung.failure, TransferError) else ""
    return stall_error(operation, None, backend, f"is behind a transfer that hangs{where}")


def stall_error(operation: Operation, request: IORequest | None, backend: IOBackend, detail: str) -> TransferError:
    """Return the error of an operation, or of one of its transfers, that does not end."""
    start, num_bytes = operation.offset, operation.num_bytes
    if request is not None:
        # The first part that has no answer tells where the drive hangs. A copy: workers remove parts meanwhile.
        first = min(request.batch.left.copy(), default=0) if request.batch is not None else 0
        start, num_bytes = request.offset + first, len(request.memory) - first
    detail = (
        f"{detail}; see the kernel log for this drive, or raise deadline_seconds (in a training, config key "
        "infinity.io_deadline_seconds) if it is only slow"
    )
    return _error(StallError, operation, backend, start, num_bytes, detail)
