"""A pool of flat buffers with a fixed capacity.

Units of one model mostly have one size, so a freed buffer is kept and reused. The kernel would zero fresh memory, page
by page.

[Note: quarantine] A buffer may be released while a read or write still uses it: an interrupt or an error has cut off
whoever waited, or the transfer hangs. It counts as used until the backend has released it, and is reused only then.
"""

from __future__ import annotations

import time
import weakref

from infinity.device.compute import ComputeDevice, Fence, FlatBuffer

_PAUSE_SECONDS = 0.001


class FlatPool:
    """At most ``capacity_bytes`` of flat buffers: those in use, and free ones kept for reuse."""

    def __init__(self, device: ComputeDevice, capacity_bytes: int) -> None:
        self._device = device
        self.torch_device = device.torch_device
        """Where its memory is."""
        self._free: list[FlatBuffer] = []
        self._in_use: dict[weakref.ref[FlatBuffer], int] = {}
        """Bytes of each buffer in use: less than its size after `release_front`. Weak references, because an interrupt
        may cut off the caller of `allocate`, and then nobody releases the buffer: see `reclaim`."""
        self._held_by_requests: dict[FlatBuffer, None] = {}
        """See [Note: quarantine]."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of buffers that are kept for reuse."""
        return sum(buffer.num_bytes for buffer in self._free)

    def allocate(self, num_bytes: int) -> FlatBuffer | None:
        """A buffer of exactly ``num_bytes``, contents undefined, or None if the capacity does not allow it now."""
        if self._held_by_requests:
            self.reclaim()
        if self.used_bytes + num_bytes > self.capacity_bytes:
            return None
        # Reused only for exactly this size. Otherwise free buffers go back to the system, the oldest first, until the
        # new one fits.
        sizes = [buffer.num_bytes for buffer in self._free]
        if num_bytes not in sizes:
            while self._free and self.used_bytes + self.free_bytes + num_bytes > self.capacity_bytes:
                self._free.pop(0).release()
            buffer = self._device.allocate_flat(num_bytes)
        else:
            buffer = self._free.pop(sizes.index(num_bytes))
        # A weak reference equals another one to the same buffer, so `release` finds the entry by a new reference.
        self._in_use[weakref.ref(buffer)] = num_bytes
        self.used_bytes += num_bytes
        return buffer

    def allocate_beyond(self, num_bytes: int) -> FlatBuffer:
        """As `allocate`, but beyond the capacity: the user holds views of buffers that would have made room
        otherwise."""
        buffer = self._device.allocate_flat(num_bytes)
        self._in_use[weakref.ref(buffer)] = num_bytes
        self.used_bytes += num_bytes
        return buffer

    def disown(self, buffer: FlatBuffer) -> None:
        """Remove a buffer in use from the pool. Its memory is freed with the last view of it."""
        self.used_bytes -= self._in_use.pop(weakref.ref(buffer), 0)
        buffer.release()

    def mark(self) -> Fence:
        """A fence: behind it, the compute stream has ended all earlier uses of buffers that are free now."""
        return self._device.mark()

    def release_front(self, buffer: FlatBuffer, num_bytes: int) -> bool:
        """Return memory at the front of a buffer in use to the system. Returns whether that makes room."""
        left = self._in_use[weakref.ref(buffer)]
        # A buffer of 64 MiB that gave back 16 MiB has left = 48 and known = 16. A call with 24 MiB then returns 8 more.
        known = buffer.num_bytes - left
        more = buffer.discard_front(num_bytes) - known if num_bytes > known else 0
        if more <= 0:
            return False
        self._in_use[weakref.ref(buffer)] = left - more
        self.used_bytes -= more
        return True

    def release(self, buffer: FlatBuffer) -> None:
        """Return a buffer without views. If a request still uses it, it is quarantined. A second call does nothing."""
        reference = weakref.ref(buffer)
        left = self._in_use.get(reference)
        # Released before, or by `disown`.
        if left is None:
            return
        if buffer.is_held:
            self._held_by_requests[buffer] = None
            return
        del self._in_use[reference]
        self.used_bytes -= left
        if left < buffer.num_bytes:
            buffer.release()  # it would have to grow again, and there may be no room for that
        else:
            self._free.append(buffer)

    def reclaim(self) -> bool:
        """Reuse quarantined buffers that requests have released, and forget buffers that died without `release`.

        Returns whether that makes room.
        """
        before = self.used_bytes
        for buffer in [buffer for buffer in self._held_by_requests if not buffer.is_held]:
            del self._held_by_requests[buffer]
            self.release(buffer)
        # Dropped without `release`: an interrupt came between `allocate` and whoever asked. The memory is freed
        # already.
        for reference in [reference for reference in self._in_use if reference() is None]:
            self._in_use.pop(reference, None)
        self.used_bytes = sum(self._in_use.values())
        return self.used_bytes < before

    def awaits_requests(self) -> bool:
        """Whether quarantined buffers will make room soon. Waits a millisecond if so.

        Raises:
            StallError: all of their requests hang.
        """
        hangs = [buffer.hang_error for buffer in self._held_by_requests]
        if not hangs:
            return False
        error = hangs[0]
        # One transfer that does not hang will end, and its buffer may be enough.
        if error is not None and None not in hangs:
            raise error.with_traceback(None)
        time.sleep(_PAUSE_SECONDS)
        return True

    def release_free(self) -> None:
        """Give the memory of the free buffers back. The next `allocate` takes fresh memory."""
        for buffer in self._free:
            buffer.release()
        self._free.clear()

    def close(self) -> None:
        """Release the free buffers. Those in use are released by their holders, or by the requests that have them."""
        self.release_free()
        self._held_by_requests.clear()
