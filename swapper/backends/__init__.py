"""Backends: one way of moving bytes per file, all behind :class:`swapper.backends.base.IOBackend`."""

from swapper.backends.aio_files import AiofilesBackend
from swapper.backends.base import CompletionCallback, CorruptedDataError, Direction, IOBackend, IORequest
from swapper.backends.faults import FaultInjectingBackend, FaultRule
from swapper.backends.integrity import IntegrityBackend
from swapper.backends.memory import MemoryBackend
from swapper.backends.rate_limit import RateLimitBackend
from swapper.backends.threads import ThreadsBackend
from swapper.backends.uring import UringBackend
from swapper.backends.wrappers import BackendWrapper, LatencyBackend, LoggingBackend

__all__ = [
    "AiofilesBackend",
    "BackendWrapper",
    "CompletionCallback",
    "CorruptedDataError",
    "Direction",
    "FaultInjectingBackend",
    "FaultRule",
    "IOBackend",
    "IORequest",
    "IntegrityBackend",
    "LatencyBackend",
    "LoggingBackend",
    "MemoryBackend",
    "RateLimitBackend",
    "ThreadsBackend",
    "UringBackend",
]
