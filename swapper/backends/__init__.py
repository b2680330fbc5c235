"""Backends: one way of moving bytes per file, all behind :class:`swapper.backend.IOBackend`.

`swapper.measure.by_name` opens one by its name, `swapper.measure.choice` chooses for ``"auto"``.
"""

from swapper.backend import CompletionCallback, CorruptedDataError, Direction, IOBackend, IORequest
from swapper.backends.aio_files import AiofilesBackend
from swapper.backends.memory import MemoryBackend
from swapper.backends.threads import ThreadsBackend
from swapper.backends.uring.backend import UringBackend
from swapper.wrappers.base import BackendWrapper
from swapper.wrappers.integrity import IntegrityBackend

__all__ = [
    "AiofilesBackend",
    "BackendWrapper",
    "CompletionCallback",
    "CorruptedDataError",
    "Direction",
    "IOBackend",
    "IORequest",
    "IntegrityBackend",
    "MemoryBackend",
    "ThreadsBackend",
    "UringBackend",
]
