"""Positional I/O on worker threads, past the page cache: the default for drives."""

from __future__ import annotations

from swapper.backend import IORequest
from swapper.backends.volume_backend import STOP_SECONDS, VolumeBackend
from swapper.backends.workers import WorkerPool
from swapper.sync.patience import join_all
from swapper.uncopyable import closed_unless_made
from swapper.volumes.volume import Volume

_MOST_REQUESTS = 16
"""In one transfer: 16 MiB of 1 MiB each, which a drive of 600 MB/s takes 27 ms for. So long may one that is waited for be held
up by a transfer ahead of it."""


class ThreadsBackend(VolumeBackend):
    """Knows a volume and the threads that transfer its bytes; must not know extents.

    Each file of the volume has threads of its own, so that a slow or hung drive never occupies those of another.

    Args:
        volume: Where the bytes go; closed together with the backend.
        num_threads: Worker threads for each direction and file.
        request_bytes: The most that a thread asks of the kernel at a time; a multiple of 4096. None: whole transfers.
    """

    def __init__(self, volume: Volume, num_threads: int = 4, request_bytes: int | None = None) -> None:
        super().__init__(volume, request_bytes)
        self.num_threads = num_threads
        self.run_bytes = _MOST_REQUESTS * (request_bytes or 0)
        """See `swapper.backend.RunsTransfers`."""
        # Stripes come in turn, drives take unequal times: without some in hand, one would wait for the turn of another.
        num_ahead = -(-num_threads // 2) if len(volume.files) > 1 else 0
        self.concurrency = (num_threads + num_ahead) * len(volume.files)
        names = ["io"] if len(volume.files) == 1 else [f"io-{column}" for column in range(len(volume.files))]
        self._pools: list[WorkerPool] = []
        with closed_unless_made(self.stop, STOP_SECONDS):
            for name in names:
                self._pools.append(WorkerPool(name, self._transfer, num_threads))

    def describe(self) -> str:
        """Return one line for logs."""
        each = " of each file" if len(self._pools) > 1 else ""
        return (
            f"threads: {self.volume.describe()}, {self.num_threads} threads for reads and {self.num_threads} for "
            f"writes{each}"
        )

    def submit(self, request: IORequest) -> None:
        """Hand the request to a worker thread of its file."""
        pools = self._pools
        (pools[0] if len(pools) == 1 else pools[self.volume.column_of(request.offset)]).submit(request)

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the workers and leave the files open for another backend; return whether all ended in time."""
        for pool in self._pools:
            pool.stop()  # all of them before waiting for one, which may hang
        return join_all([thread for pool in self._pools for thread in pool.threads], timeout_seconds)
