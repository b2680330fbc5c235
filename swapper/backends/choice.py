"""From a config to the backend that moves the bytes of a volume."""

from __future__ import annotations

from swapper.backends.base import IOBackend
from swapper.backends.threads import ThreadsBackend
from swapper.config import SwapperConfig
from swapper.volume import Volume


def open_backend(volume: Volume, config: SwapperConfig) -> IOBackend:
    """Return the backend that ``config`` asks for; it owns the volume from then on."""
    return ThreadsBackend(volume, config.num_threads)
