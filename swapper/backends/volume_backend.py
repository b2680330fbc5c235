"""What all backends that transfer a volume's bytes through its files have in common."""

from __future__ import annotations

import logging

from swapper.backends.file_transfer import FileTransfer
from swapper.config import ALIGNMENT
from swapper.uncopyable import Uncopyable
from swapper.volumes.volume import Volume

logger = logging.getLogger(__name__)


class VolumeBackend(Uncopyable):
    """A volume, which it closes, and how to make a positional transfer."""

    def __init__(self, volume: Volume, num_threads: int = 0) -> None:
        """
        Args:
            volume: Where the bytes go; closed together with the backend.
            num_threads: Worker threads for each direction and file.
        """
        self.volume = volume
        self.num_threads = num_threads
        self.capacity_bytes = volume.capacity_bytes
        self.is_direct = volume.is_direct
        # Direct writes go in whole blocks, see [Note: bounced transfers]. One direct file is enough.
        self.block_bytes = ALIGNMENT if any(file.is_direct for file in volume.files) else 1
        self.boundary_bytes = volume.stripe_bytes
        self._transfer = FileTransfer(volume)

    @property
    def num_bounced(self) -> int:
        """Transfers that went through other memory, because theirs was not aligned."""
        return self._transfer.num_bounced

    def locate(self, offset: int) -> tuple[str, int]:
        """Return the file's description and the offset in it."""
        file, file_offset = self.volume.locate(offset)
        return file.name, file_offset

    def describe_threads(self) -> str:
        """Return the volume and the worker threads, for logs."""
        each = " of each file" if len(self.volume.files) > 1 else ""
        threads = f"{self.num_threads} threads for reads and {self.num_threads} for writes{each}"
        return f"{self.volume.describe()}, {threads}"

    def stop(self, timeout_seconds: float) -> bool:
        """End the threads and leave the files open for another backend; return whether all ended in time."""
        raise NotImplementedError

    def close(self, timeout_seconds: float) -> bool:
        """Let what was submitted end, stop the threads and close the files; return whether all ended in time."""
        has_ended = self.stop(timeout_seconds)
        if has_ended:
            self.volume.close()
        else:
            # The number of a closed file may be given to another file, which a hung transfer would then write into.
            logger.error("a transfer hangs; leaving the files open: %s", self.volume.describe())
        return has_ended
