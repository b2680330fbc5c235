"""A backend that completes a request when the test says so: order and overlap become visible."""

from __future__ import annotations

from swapper.backend import Direction, IORequest
from swapper.backends import MemoryBackend


class ManualBackend(MemoryBackend):
    """Knows the requests it was given, in order, and which of them are still open."""

    def __init__(
        self, capacity_bytes: int, concurrency: int = 64, block_bytes: int = 1, boundary_bytes: int = 0
    ) -> None:
        super().__init__(capacity_bytes)
        self.concurrency = concurrency
        self.block_bytes = block_bytes
        self.boundary_bytes = boundary_bytes
        self.submitted: list[IORequest] = []
        self.log: list[tuple[str, int, int]] = []
        """What was submitted so far: direction, offset, length."""
        self.open: list[IORequest] = []

    def submit(self, request: IORequest) -> None:
        """Keep the request."""
        self.submitted.append(request)
        self.log.append((request.direction.name.lower(), request.offset, len(request.memory)))
        self.open.append(request)

    def complete(self, index: int = 0) -> IORequest:
        """Carry out an open request."""
        request = self.open.pop(index)
        super().submit(request)
        return request

    def fail(self, errno: int | None, index: int = 0) -> IORequest:
        """Fail an open request."""
        request = self.open.pop(index)
        request.complete(0, OSError(errno, "as the test wants it"))
        return request

    def complete_all(self) -> None:
        """Carry out everything, also what is submitted meanwhile."""
        while self.open:
            self.complete()

    def close(self, timeout_seconds: float) -> bool:
        """Carry out what is open, as a backend must."""
        self.complete_all()
        return super().close(timeout_seconds)

    def inflight(self, direction: Direction) -> int:
        """Open requests of one direction."""
        return sum(request.direction is direction for request in self.open)
