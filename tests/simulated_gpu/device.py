"""The simulated GPU as the engine's compute device: streams whose copies are late, memory that is poison, races that are seen.

Kernels run when they are launched, on the stream of the thread that launches them. That of the user's thread is `COMPUTE`,
which autograd's takes over; any other thread launches on `DEFAULT` until it enters a stream. Copies on the other streams wait
in the order of their stream until somebody waits for them, or a seeded draw lets one run; until then their target holds
poison. Whether a kernel or copy that really ran earlier was bound to is judged by what the streams were told to wait for, as
a GPU would: see `Order`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.internals import Copy, FlatBuffer, FlatPool, HostFlatBuffer
from tests.separate_host import SeparateHostDevice
from tests.simulated_gpu import backend

COMPUTE, DEFAULT, UPLOADS, DOWNLOADS = "compute", "default", "uploads", "downloads"

_POISON = 0xFF
"""NaN in every floating dtype, and an index out of range."""


_Range = tuple[int, int, int]
"""Address of a storage, and of the first and behind the last byte in it."""


@dataclass
class _Accesses:
    write: tuple[str, int] | None = None
    reads: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """A point of a stream.

    Attributes:
        knows: for each stream, the number of its last piece of work that ends before this point.
        stream, number: the copy that it follows, or -1.
    """

    knows: dict[str, int]
    stream: str = COMPUTE
    number: int = -1


class Order:
    """Which work on streams comes before which, by their waits alone, and what accesses to memory are in no order.

    A vector clock for each stream, as of the sanitizer that torch has for CUDA, for each range of bytes that was accessed.
    """

    def __init__(self) -> None:
        self._now = 0
        self._clocks: dict[str, dict[str, int]] = {}
        self._host: dict[str, int] = {}
        """What the host has waited for."""
        self._accesses: dict[int, dict[_Range, _Accesses]] = {}
        """Address of a storage -> what was accessed in it."""
        self.races: list[str] = []

    def record(self, stream: str, number: int = -1) -> Event:
        return Event(dict(self._clock(stream)), stream, number)

    def _clock(self, stream: str) -> dict[str, int]:
        return self._clocks.setdefault(stream, dict(self._host))

    def wait(self, stream: str, event: Event) -> None:
        _advance(self._clock(stream), event)

    def host_waits(self, event: Event) -> None:
        """What is launched from now on, on whatever stream, comes behind the event."""
        for clock in (self._host, *self._clocks.values()):
            _advance(clock, event)

    def host_knows(self, event: Event) -> bool:
        """Whether the host has waited for it, or for something behind it."""
        return all(self._host.get(stream, 0) >= time for stream, time in event.knows.items())

    def forget(self, address: int) -> None:
        """The memory at an address is another's from now on; the allocator sees to the order."""
        self._accesses.pop(address, None)

    def launch(self, name: str, stream: str, read: set[_Range], written: set[_Range]) -> None:
        """Work that reads and writes memory."""
        self._now += 1
        clock = self._clock(stream)
        clock[stream] = self._now
        for place in read | written:
            in_storage = self._accesses.setdefault(place[0], {})
            known = in_storage.setdefault(place, _Accesses())
            overlapping = [each for (_, begin, end), each in in_storage.items() if begin < place[2] and place[1] < end]
            before = [(*each.write, "is written by") for each in overlapping if each.write is not None]
            if place in written:
                before += [(other, time, "is read by") for each in overlapping for other, time in each.reads.items()]
            for other, time, verb in before:
                if clock.get(other, 0) < time:
                    self.races.append(
                        f"{name} on {stream} {'writes' if place in written else 'reads'} memory that {verb} work on "
                        f"{other}, in no order (thread {threading.current_thread().name})"
                    )
            if place in written:
                known.write, known.reads = (stream, self._now), {}
            else:
                known.reads[stream] = self._now


def _advance(clock: dict[str, int], event: Event) -> None:
    for stream, time in event.knows.items():
        clock[stream] = max(clock.get(stream, 0), time)


class SimulatedFlatBuffer(HostFlatBuffer):
    """Memory of the simulated device for one unit. Poison when it is handed out."""

    def __init__(self, num_bytes: int, order: Order, on_release: Callable[[], None]) -> None:
        super().__init__(num_bytes)
        self._on_release = on_release
        order.forget(self.address)
        self.poison()

    def poison(self) -> None:
        super().tensor().fill_(_POISON)

    def tensor(self) -> torch.Tensor:
        return backend.on_device(super().tensor())

    def tracked_tensor(self, known: weakref.ref[Any] | None) -> tuple[torch.Tensor, weakref.ref[Any]]:
        values, reference = super().tracked_tensor(known)
        return backend.on_device(values), reference

    def discard_front(self, num_bytes: int) -> int:
        return 0  # as of an allocator's block

    def release(self) -> None:
        super().release()
        self._on_release()
        self._on_release = lambda: None


class SimulatedGpu(SeparateHostDevice):
    """See the module.

    Attributes:
        order: what it saw of races.
        synchronisations: what made the host wait for the device, and in which thread.
        pools: those of engines, as `watch` was told of them.
        num_copies: how many there were.
        capacity_bytes: memory for flat buffers.
        used_bytes: of it, those allocated now.
    """

    def __init__(self, seed: int = 0, capacity_bytes: int = 1 << 40) -> None:
        backend.register()
        super().__init__(torch.device(backend.NAME, 0))
        self._draw = random.Random(seed)
        self._users_thread = threading.get_ident()
        self._of_thread = threading.local()
        self._lock = threading.RLock()
        self._pending: dict[str, deque[tuple[int, Callable[[], None]]]] = {UPLOADS: deque(), DOWNLOADS: deque()}
        self._kept: list[tuple[Event, torch.Tensor]] = []
        """Sources of copies that nobody knows to be over, whatever becomes of them elsewhere."""
        self.order = Order()
        self.synchronisations: list[str] = []
        self.num_copies = 0
        self.pools: list[FlatPool] = []
        self.capacity_bytes = capacity_bytes
        self.used_bytes = self._peak_bytes = 0
        self.end = backend.watch(self._saw_kernel, self.synchronisations.append)

    def watch(self, pool: FlatPool) -> None:
        """Fill every buffer that the pool hands out with poison: what lay there is nobody's."""
        self.pools.append(pool)
        allocate = pool.allocate

        def watched(num_bytes: int) -> FlatBuffer | None:
            flat = allocate(num_bytes)
            if isinstance(flat, SimulatedFlatBuffer):
                flat.poison()
            return flat

        pool.allocate = watched  # type: ignore[method-assign]

    def allocate_flat(self, num_bytes: int) -> FlatBuffer:
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise torch.OutOfMemoryError(f"simulated: {num_bytes} bytes beside {self.used_bytes} in use")
        self.used_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)

        def released() -> None:
            self.used_bytes -= num_bytes

        return SimulatedFlatBuffer(num_bytes, self.order, released)

    def free_bytes(self, model: nn.Module) -> int | None:
        return self.capacity_bytes - self.used_bytes

    def peak_bytes(self) -> int | None:
        return self._peak_bytes

    @property
    def stream(self) -> str:
        """In which the calling thread launches."""
        entered: str | None = getattr(self._of_thread, "stream", None)
        if entered is not None:
            return entered
        is_native = isinstance(threading.current_thread(), threading._DummyThread)
        return COMPUTE if is_native or threading.get_ident() == self._users_thread else DEFAULT

    @contextlib.contextmanager
    def _entered(self, stream: str) -> Iterator[None]:
        before, self._of_thread.stream = getattr(self._of_thread, "stream", None), stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    @contextlib.contextmanager
    def background_thread(self) -> Iterator[None]:
        with super().background_thread(), self._entered(f"of {threading.current_thread().name}"):
            yield

    def carried(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return functools.partial(self._entered, self.stream)

    def mark(self) -> Event:
        with self._lock:
            return self.order.record(self.stream)

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Event | None) -> Event:
        with self._lock:
            _poison(backend.on_host(target))
            return self._enqueue("upload", UPLOADS, target, source, after)

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Event | None) -> Event:
        with self._lock:
            if target.device.type != backend.NAME:  # else it comes in the order of streams
                _poison(target)
            fence = self._enqueue("download", DOWNLOADS, target, source, after)
            # An allocator that is told of the copy hands the source's memory out again when the copy has run, not before.
            self._kept.append((fence, source))
            return fence

    def _enqueue(
        self, name: str, stream: str, target: torch.Tensor, source: torch.Tensor, after: Event | None
    ) -> Event:
        ends = [target, source]
        to, origin = (backend.on_host(end) if end.device.type == backend.NAME else end for end in ends)
        is_inside = all(end.device.type == backend.NAME for end in ends)
        for event in (after, self.mark() if is_inside else None):  # as `CudaDevice` between two places on the GPU
            if event is not None:
                self.order.wait(stream, event)
                self._run_until(event)
        written, read = ({_range(end)} if end.device.type == backend.NAME else set() for end in ends)
        self.order.launch(name, stream, read, written)
        number, self.num_copies = self.num_copies, self.num_copies + 1
        stamp = self.stamp()

        def copy() -> None:
            with torch.no_grad():
                to.copy_(origin)
            self._copies.append(Copy(name, source.nbytes, stamp, self.stamp()))

        self._pending[stream].append((number, copy))
        self._maybe_run_one()
        return self.order.record(stream, number)

    def _maybe_run_one(self) -> None:
        queue = self._pending[self._draw.choice((UPLOADS, DOWNLOADS))]
        if queue and self._draw.random() < 0.3:
            queue.popleft()[1]()

    def _run_until(self, event: Event) -> None:
        queue = self._pending.get(event.stream)
        while queue and queue[0][0] <= event.number:
            queue.popleft()[1]()

    def is_done(self, fence: Event | None) -> bool:
        if fence is None:
            return True
        with self._lock:
            self._maybe_run_one()
            queue = self._pending.get(fence.stream)
            if queue and queue[0][0] <= fence.number:
                return False
            self._host_waits(fence)
            return True

    def _host_waits(self, fence: Event) -> None:
        self.order.host_waits(fence)
        self._kept = [(event, source) for event, source in self._kept if not self.order.host_knows(event)]

    def synchronize(self, fence: Event | None) -> None:
        if fence is None:
            return
        self.synchronisations.append(f"synchronize in {threading.current_thread().name}")
        with self._lock:
            self._run_until(fence)
            self._host_waits(fence)

    def compute_waits_for(self, fence: Event | None) -> None:
        if fence is None:
            return
        with self._lock:
            self._run_until(fence)
            self.order.wait(self.stream, fence)

    def _saw_kernel(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        with self._lock:
            self.order.launch(name, self.stream, set(map(_range, read)), set(map(_range, written)))


def _poison(target: torch.Tensor) -> None:
    with torch.no_grad():
        target.view(torch.uint8).fill_(_POISON) if target.is_contiguous() else target.fill_(float("nan"))


def _range(tensor: torch.Tensor) -> _Range:
    storage = tensor.untyped_storage().data_ptr()
    begin = storage + tensor.storage_offset() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return storage, begin, begin + (last + 1) * tensor.itemsize if tensor.numel() else begin
