"""The settings and the workload of a measurement."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

from swapper.config import BackendName, SwapperConfig


class Workload(Enum):
    """What a measurement does."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"  # the reads and writes of an optimizer step, at the same time


@dataclass(frozen=True, slots=True)
class IOSetting:
    """The settings by which requests are made.

    Attributes:
        backend: What moves the bytes.
        request_bytes: Largest single transfer. Multiple of 4096.
        num_threads: Worker threads for each direction, if the backend has any.
        max_inflight: Transfers at once: of one direction, or of both together in a mixed workload.
    """

    backend: BackendName
    request_bytes: int
    num_threads: int
    max_inflight: int

    @property
    def has_threads(self) -> bool:
        """Whether each transfer blocks a thread, so that there are at most as many transfers as threads."""
        return self.backend in ("threads", "aiofiles")

    @property
    def num_inflight(self) -> int:
        """Transfers at once on one drive; each drive has threads of its own."""
        return min(self.max_inflight, self.num_threads) if self.has_threads else self.max_inflight

    @property
    def bytes_inflight(self) -> int:
        """Bytes in flight at once on one drive."""
        return self.request_bytes * self.num_inflight

    def describe(self) -> str:
        """Return a few words for tables and logs."""
        size = f"{self.request_bytes / (1 << 20):g} MiB"
        return f"{self.backend}, {size} x {self.num_inflight} in flight"

    def swapper_config(self, *, direct: bool = True, deadline_seconds: float = 120.0) -> SwapperConfig:
        """Return the config of a swapper with these settings.

        Raises:
            ArgumentError: A value cannot work.
        """
        return SwapperConfig(**asdict(self), direct=direct, deadline_seconds=deadline_seconds)
