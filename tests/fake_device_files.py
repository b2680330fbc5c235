"""A driver in the place of cuFile, which takes host memory for that of a device."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import numpy as np
import torch

from swapper import ALIGNMENT, AlignedRegion, DeviceBytes


class FakeDriver:
    """Reads and writes with ordinary calls, through memory of its own, at the address it is given."""

    name = "fake"

    def __init__(self) -> None:
        self.handles: dict[object, int] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.threads: set[str] = set()
        self.before: Callable[[], None] = lambda: None
        self.most_bytes = 1 << 30

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def register(self, fd: int) -> object:
        handle = object()
        self.handles[handle] = os.dup(fd)
        return handle

    def deregister(self, handle: object) -> None:
        os.close(self.handles.pop(handle))

    def read(self, handle: object, target: DeviceBytes, offset: int) -> int:
        return self._move("read", handle, target, offset)

    def write(self, handle: object, source: DeviceBytes, offset: int) -> int:
        return self._move("write", handle, source, offset)

    def _move(self, name: str, handle: object, memory: DeviceBytes, offset: int) -> int:
        self.before()
        self.calls.append((name, offset, len(memory)))
        self.threads.add(threading.current_thread().name)
        assert isinstance(memory, DeviceBytes)
        num_bytes = min(len(memory), self.most_bytes)
        view = (ctypes.c_char * num_bytes).from_address(memory.address)
        # Whole aligned blocks on the way, as the file may be direct.
        start, stop = offset // ALIGNMENT * ALIGNMENT, -(-(offset + num_bytes) // ALIGNMENT) * ALIGNMENT
        blocks = AlignedRegion(stop - start).array()
        os.preadv(self.handles[handle], [blocks.data], start)
        if name == "write":
            blocks[offset - start : offset - start + num_bytes] = np.frombuffer(view, dtype=np.uint8)
            os.pwritev(self.handles[handle], [blocks.data], start)
        else:
            ctypes.memmove(view, bytes(blocks[offset - start : offset - start + num_bytes]), num_bytes)
        return num_bytes
