"""Weights that are read straight into the memory of a GPU, where a swapper can do that.

Knows extents and flat buffers; must not know when anything is needed.
"""

from __future__ import annotations

import queue
import threading
import time

import torch

from infinity.device.compute import ComputeDevice, FlatBuffer
from swapper import DeviceBytes, Extent, Handle, Latch, Priority, Swapper
from swapper.sync.limits import start_threads

_POLL_SECONDS = 0.0003


class DirectRead:
    """One unit on its way into a flat buffer of the device."""

    def __init__(self, extent: Extent, flat: FlatBuffer, device: ComputeDevice, *, is_demand: bool) -> None:
        self._extent = extent
        self._target: torch.Tensor | None = flat.tensor()
        self._device = device
        self._after = device.mark()  # earlier kernels may still use what lay in this memory before
        self._is_demand = is_demand
        self._handle: Handle | None = None
        self._error: BaseException | None = None
        self._begun = Latch()

    def begin(self, swapper: Swapper) -> None:
        """Wait until the memory is free, and start to read."""
        try:
            # The read is not ordered with the compute stream. Waiting for an event would keep a core busy.
            while not self._device.is_done(self._after):
                time.sleep(_POLL_SECONDS)
            if self._target is not None:
                priority = Priority.DEMAND if self._is_demand else Priority.PREFETCH
                self._handle = swapper.read(self._extent, DeviceBytes(self._target), priority=priority)
                if self._is_demand:  # perhaps since then
                    self._handle.promote(Priority.DEMAND)
        except BaseException as error:
            self._error = error
        self._target = None  # nobody may see a view of a buffer that is let go of
        self._begun.set()

    def give_up(self, error: BaseException) -> None:
        """Do not begin."""
        self._error = error
        self._target = None
        self._begun.set()

    def wait(self) -> None:
        """Return when the weights are there."""
        self._begun.wait()
        if self._error is not None:
            raise self._error
        if self._handle is not None:
            self._handle.wait()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._begun.is_set() and (self._handle is None or self._handle.done())

    def promote(self) -> None:
        """Somebody waits for it now."""
        self._is_demand = True
        if self._handle is not None:
            self._handle.promote(Priority.DEMAND)


class DirectReader:
    """Starts reads in the order of their requests, each when the device has let go of its buffer, in a thread of its own."""

    def __init__(self, swapper: Swapper, device: ComputeDevice) -> None:
        self._swapper = swapper
        self._device = device
        self._queue: queue.SimpleQueue[DirectRead | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="infinity-direct-read", daemon=True)
        start_threads(self._thread)

    def fetch(self, extent: Extent, flat: FlatBuffer, *, is_demand: bool) -> DirectRead:
        """Have a unit read into ``flat``."""
        read = DirectRead(extent, flat, self._device, is_demand=is_demand)
        if self._is_closed:
            read.give_up(RuntimeError("the reader is closed"))
        else:
            self._queue.put(read)
        return read

    def close(self) -> None:
        """Start what was requested and end the thread."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._device.background():
            while (read := self._queue.get()) is not None:
                read.begin(self._swapper)
                del read
