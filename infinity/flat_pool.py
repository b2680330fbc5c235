"""Hands out flat buffers up to a fixed capacity.

Knows sizes and free buffers; must not know which unit holds which. Units of one model mostly have one size, so a
freed buffer is kept and handed out again: fresh memory would have to be zeroed by the kernel, page by page, every time.
"""

from __future__ import annotations

from infinity.device import ComputeDevice, Fence, FlatBuffer


class FlatPool:
    """At most ``capacity_bytes`` of flat buffers, those in use and the free ones kept for reuse together."""

    def __init__(self, device: ComputeDevice, capacity_bytes: int) -> None:
        self._device = device
        self._free: list[FlatBuffer] = []
        self._discarded: dict[FlatBuffer, int] = {}
        """Bytes that buffers in use have lost at their front."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of buffers that are kept for reuse."""
        return sum(buffer.num_bytes for buffer in self._free)

    def allocate(self, num_bytes: int) -> FlatBuffer | None:
        """A buffer of exactly ``num_bytes``, contents undefined, or None if the capacity does not allow it now."""
        if self.used_bytes + num_bytes > self.capacity_bytes:
            return None
        for index, buffer in enumerate(self._free):
            if buffer.num_bytes == num_bytes:
                del self._free[index]
                self.used_bytes += num_bytes
                return buffer
        while self._free and self.used_bytes + self.free_bytes + num_bytes > self.capacity_bytes:
            self._free.pop(0).release()
        self.used_bytes += num_bytes
        return self._device.allocate_flat(num_bytes)

    def mark(self) -> Fence:
        """The point in the compute stream from which on a buffer handed out now is free of its former use."""
        return self._device.mark()

    def give_back_front(self, buffer: FlatBuffer, num_bytes: int) -> bool:
        """The first ``num_bytes`` of a buffer are unused from now on. Returns whether that makes room."""
        known = self._discarded.get(buffer, 0)
        more = buffer.discard_front(num_bytes) - known if num_bytes > known else 0
        if more <= 0:
            return False
        self._discarded[buffer] = known + more
        self.used_bytes -= more
        return True

    def give_back(self, buffer: FlatBuffer) -> None:
        """The buffer is unused from now on. It must not have views."""
        discarded = self._discarded.pop(buffer, 0)
        self.used_bytes -= buffer.num_bytes - discarded
        if discarded:
            buffer.release()  # it would have to grow again, and there may be no room for that
        else:
            self._free.append(buffer)

    def close(self) -> None:
        """Release the free buffers. Those in use are released by their holders."""
        for buffer in self._free:
            buffer.release()
        self._free.clear()
