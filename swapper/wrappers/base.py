"""The base class of backends that wrap another one."""

from __future__ import annotations

from collections.abc import Callable

from swapper.backend import IOBackend, IORequest, register_memory
from swapper.memory.region import AlignedRegion


class BackendWrapper:
    """Passes all calls on to another backend; subclasses override some. Its attributes are those of `IOBackend`.

    Args:
        inner: The backend that does the work; closed together with this one.
    """

    def __init__(self, inner: IOBackend) -> None:
        # Without `run_bytes`: transfers through a wrapper have at most request_bytes.
        self.inner = inner
        self.capacity_bytes = inner.capacity_bytes
        self.block_bytes = inner.block_bytes
        self.boundary_bytes = inner.boundary_bytes
        self.concurrency = inner.concurrency
        self.is_direct = inner.is_direct

    @property
    def num_bounced(self) -> int:
        """See :class:`IOBackend`."""
        return self.inner.num_bounced

    def locate(self, offset: int) -> tuple[str, int]:
        """See :class:`IOBackend`."""
        return self.inner.locate(offset)

    def describe(self) -> str:
        """Return the inner backend's description in the name of this class."""
        return f"{type(self).__name__}({self.inner.describe()})"

    def register_memory(self, region: AlignedRegion) -> Callable[[], None]:
        """See `swapper.backend.register_memory`."""
        return register_memory(self.inner, region)

    def submit(self, request: IORequest) -> None:
        """Pass the request on."""
        self.inner.submit(request)

    def close(self, timeout_seconds: float) -> bool:
        """Close the inner backend."""
        return self.inner.close(timeout_seconds)
