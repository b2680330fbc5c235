"""From what went wrong with an operation to the error that says so."""

from __future__ import annotations

from swapper.backends.base import IOBackend, IORequest
from swapper.errors import ShortTransferError, StallError, TransferError
from swapper.operation import Operation


def os_error(operation: Operation, request: IORequest, backend: IOBackend, error: OSError) -> TransferError:
    """Return the error of a transfer that the operating system refused."""
    file, offset = backend.locate(request.offset)
    return TransferError.from_os_error(
        operation.direction.name.lower(), operation.extent.name, file, offset, len(request.memory), error
    )


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
    )


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
        f"{detail}; see the kernel log for this drive, or raise deadline_seconds if it is only slow",
    )
