"""Backends: one way of moving bytes per file, all behind :class:`swapper.backends.base.IOBackend`."""

from swapper.backends.base import CompletionCallback, Direction, IOBackend, IORequest
from swapper.backends.faults import FaultInjectingBackend, FaultRule
from swapper.backends.memory import MemoryBackend
from swapper.backends.threads import ThreadsBackend
from swapper.backends.wrappers import BackendWrapper, LatencyBackend, LoggingBackend

__all__ = [
    "BackendWrapper",
    "CompletionCallback",
    "Direction",
    "FaultInjectingBackend",
    "FaultRule",
    "IOBackend",
    "IORequest",
    "LatencyBackend",
    "LoggingBackend",
    "MemoryBackend",
    "ThreadsBackend",
]
