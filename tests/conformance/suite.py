"""One suite of tests that every backend passes.

With pytest, in a file of your own::

    class TestMyBackend(BackendConformance):
        def make_backend(self, capacity_bytes):
            return MyBackend(capacity_bytes)

Without pytest: ``run_conformance(MyBackend)``. The suite needs no ``assert`` statements, so it checks the same under
``python -O``.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from swapper.backend import Direction, IOBackend, IORequest
from swapper.config import ALIGNMENT, split_at
from swapper.memory.region import AlignedRegion

_TIMEOUT_SECONDS = 30.0
_CAPACITY_BYTES = 4 << 20

Bytes = npt.NDArray[np.uint8]


class ConformanceError(Exception):
    """A backend does not do what :class:`swapper.backend.IOBackend` promises."""


def require(condition: object, message: str) -> None:
    """Raise if the condition is false; unlike ``assert``, also under ``python -O``."""
    if not condition:
        raise ConformanceError(message)


class Completion:
    """Knows how one request ended."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.transferred_bytes = -1
        self.error: OSError | None = None
        self.is_over = threading.Event()

    def __call__(self, _: IORequest, transferred_bytes: int, error: OSError | None) -> None:
        self.num_calls += 1
        self.transferred_bytes = transferred_bytes
        self.error = error
        self.is_over.set()

    def wait(self) -> None:
        """Block until the request is over."""
        is_over = self.is_over.wait(_TIMEOUT_SECONDS)
        require(is_over, f"a request was not completed within {_TIMEOUT_SECONDS:g} seconds")

    def require_whole(self, num_bytes: int) -> None:
        """Block until the request is over, and require that it did everything."""
        self.wait()
        require(self.error is None, f"a transfer of {num_bytes} bytes failed: {self.error}")
        done_bytes = self.transferred_bytes
        require(done_bytes == num_bytes, f"transferred {done_bytes} bytes instead of {num_bytes}")
        require(self.num_calls == 1, f"a request was completed {self.num_calls} times")


def start(backend: IOBackend, direction: Direction, offset: int, array: Bytes) -> Completion:
    """Submit a transfer of all bytes of an array."""
    completion = Completion()
    address: int = array.__array_interface__["data"][0]
    backend.submit(IORequest(direction, offset, array.data, address, completion))
    return completion


def write(backend: IOBackend, offset: int, array: Bytes) -> None:
    """Write all bytes of an array, in as many requests as the backend's boundaries ask for."""
    for low, high in split_at(offset, array.size, backend.boundary_bytes):
        start(backend, Direction.WRITE, offset + low, array[low:high]).require_whole(high - low)


def read(backend: IOBackend, offset: int, array: Bytes) -> None:
    """Fill an array, in as many requests as the backend's boundaries ask for."""
    for low, high in split_at(offset, array.size, backend.boundary_bytes):
        start(backend, Direction.READ, offset + low, array[low:high]).require_whole(high - low)


def require_kept(backend: IOBackend, offset: int, data: Bytes, what: str) -> None:
    """Write an array, and require that the same bytes are read."""
    copy = aligned_bytes(data.size)
    write(backend, offset, data)
    read(backend, offset, copy)
    require(np.array_equal(data, copy), f"{what} came back different")


def aligned_bytes(num_bytes: int, shift: int = 0) -> Bytes:
    """Return an array whose first byte lies ``shift`` bytes after an aligned address."""
    return AlignedRegion(num_bytes + shift).array()[shift : shift + num_bytes]


def random_bytes(num_bytes: int, seed: int, shift: int = 0) -> Bytes:
    """Return an array of pseudo-random bytes; see :func:`aligned_bytes`."""
    array = aligned_bytes(num_bytes, shift)
    array[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return array


class BackendConformance:
    """Knows what a backend must do; a subclass says how to make one. Every ``test_`` method is independent."""

    def make_backend(self, capacity_bytes: int) -> IOBackend:
        """Return a new backend with room for at least so many bytes."""
        raise NotImplementedError("say how to make a backend: override make_backend")

    @contextlib.contextmanager
    def backend(self, capacity_bytes: int = _CAPACITY_BYTES) -> Iterator[IOBackend]:
        """Make a backend and close it again."""
        backend = self.make_backend(capacity_bytes)
        try:
            yield backend
        finally:
            is_ended = backend.close(_TIMEOUT_SECONDS)
        require(is_ended, "close did not end although nothing hangs")

    def test_properties_make_sense(self) -> None:
        with self.backend() as backend:
            require(backend.capacity_bytes >= _CAPACITY_BYTES, "less capacity than asked for")
            require(backend.concurrency >= 1, "concurrency must be at least 1")
            require(ALIGNMENT % backend.block_bytes == 0, f"block_bytes must divide {ALIGNMENT}")
            require(backend.boundary_bytes % ALIGNMENT == 0, f"boundary_bytes must be a multiple of {ALIGNMENT}")
            require(isinstance(backend.is_direct, bool), "is_direct must be a bool")
            require("\n" not in backend.describe() and backend.describe(), "describe must return one line")

    def test_every_byte_has_its_own_place(self) -> None:
        with self.backend() as backend:
            places = {backend.locate(offset) for offset in range(0, _CAPACITY_BYTES, ALIGNMENT)}
            require(len(places) == _CAPACITY_BYTES // ALIGNMENT, "two addresses share a place in a file")

    def test_returns_what_was_written(self) -> None:
        with self.backend() as backend:
            for seed, num_bytes in enumerate((ALIGNMENT, 3 * ALIGNMENT, 1 << 20, (2 << 20) + ALIGNMENT)):
                offset = seed * 2 * ALIGNMENT
                require_kept(backend, offset, random_bytes(num_bytes, seed), f"{num_bytes} bytes at {offset}")

    def test_the_last_byte_can_be_used(self) -> None:
        with self.backend() as backend:
            offset = backend.capacity_bytes - ALIGNMENT
            require_kept(backend, offset, random_bytes(ALIGNMENT, 1), "the end of the address space")

    def test_takes_any_memory_length_and_offset(self) -> None:
        with self.backend() as backend:
            model = random_bytes(1 << 20, 0)
            write(backend, 0, model)
            dice = random.Random(1)
            for seed in range(60):
                num_bytes = dice.choice((1, 7, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 100_000, 5 * ALIGNMENT))
                offset = dice.choice((dice.randrange(0, 500_000), dice.randrange(0, 120) * ALIGNMENT))
                data = random_bytes(num_bytes, seed, shift=dice.choice((0, 1, 64, 4095)))
                write(backend, offset, data)
                model[offset : offset + num_bytes] = data
                low = dice.randrange(0, 500_000)
                copy = aligned_bytes(dice.randrange(1, 400_000), shift=dice.choice((0, 3, 512)))
                read(backend, low, copy)
                same = np.array_equal(copy, model[low : low + copy.size])
                require(same, f"bytes at {low} differ after a write of {num_bytes} bytes at {offset}")

    def test_the_other_bytes_of_a_writes_blocks_stay(self) -> None:
        with self.backend() as backend:
            model = random_bytes(4 * ALIGNMENT, 0)
            write(backend, 0, model)
            data = random_bytes(100, 1)
            write(backend, ALIGNMENT + 10, data)
            model[ALIGNMENT + 10 : ALIGNMENT + 110] = data
            copy = aligned_bytes(4 * ALIGNMENT)
            read(backend, 0, copy)
            require(np.array_equal(copy, model), "other bytes were changed, or the written bytes differ")

    def test_memory_around_a_read_is_left_alone(self) -> None:
        with self.backend() as backend:
            write(backend, 0, random_bytes(2 * ALIGNMENT, 0))
            for low, high in ((ALIGNMENT, 2 * ALIGNMENT), (100, 5000), (4095, 4097)):
                memory = aligned_bytes(4 * ALIGNMENT)
                memory[:] = 0xA5
                read(backend, 0, memory[low:high])
                around = np.concatenate((memory[:low], memory[high:]))
                require((around == 0xA5).all(), f"a read into bytes {low} to {high} changed memory outside of them")

    def test_memory_of_a_write_is_left_alone(self) -> None:
        with self.backend() as backend:
            for num_bytes in (ALIGNMENT, 5000):
                data = random_bytes(num_bytes, 3)
                before = data.copy()
                write(backend, 17 * ALIGNMENT, data)
                require(np.array_equal(data, before), "a write changed the memory it was given")

    def test_many_requests_at_once(self) -> None:
        num_requests, num_bytes = 128, 2 * ALIGNMENT
        with self.backend() as backend:
            data = [random_bytes(num_bytes, seed) for seed in range(num_requests)]
            for completion in [start(backend, Direction.WRITE, i * num_bytes, data[i]) for i in range(num_requests)]:
                completion.require_whole(num_bytes)
            copies = [aligned_bytes(num_bytes) for _ in range(num_requests)]
            for completion in [start(backend, Direction.READ, i * num_bytes, copies[i]) for i in range(num_requests)]:
                completion.require_whole(num_bytes)
            for seed in range(num_requests):
                require(np.array_equal(data[seed], copies[seed]), f"request {seed} came back different")

    def test_reads_and_writes_from_many_threads(self) -> None:
        errors: list[BaseException] = []
        with self.backend() as backend:

            def work(index: int) -> None:
                try:
                    offset = index * 16 * ALIGNMENT
                    copy = aligned_bytes(8 * ALIGNMENT)
                    for seed in range(20):
                        data = random_bytes(8 * ALIGNMENT, 100 * index + seed)
                        write(backend, offset, data)
                        read(backend, offset, copy)
                        require(np.array_equal(data, copy), f"thread {index} read something else than it wrote")
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for error in errors:
            raise error

    def test_a_completion_may_submit_the_next_request(self) -> None:
        with self.backend() as backend:
            data = random_bytes(ALIGNMENT, 5)
            remaining = [50]
            is_over = threading.Event()

            def again(_: IORequest, transferred_bytes: int, error: OSError | None) -> None:
                remaining[0] -= 1
                if error is not None or transferred_bytes != ALIGNMENT or remaining[0] <= 0:
                    is_over.set()
                else:
                    submit()

            def submit() -> None:
                address: int = data.__array_interface__["data"][0]
                backend.submit(IORequest(Direction.WRITE, remaining[0] * ALIGNMENT, data.data, address, again))

            submit()
            require(is_over.wait(_TIMEOUT_SECONDS), "a chain of requests came to a halt")
            require(remaining[0] == 0, f"a chain of requests broke with {remaining[0]} to go")

    def test_close_completes_what_was_submitted(self) -> None:
        backend = self.make_backend(_CAPACITY_BYTES)
        data = random_bytes(1 << 20, 0)
        size = min(1 << 20, backend.boundary_bytes or 1 << 20)
        completions = [start(backend, Direction.WRITE, 0, data[:size]) for _ in range(8)]
        require(backend.close(_TIMEOUT_SECONDS), "close did not end although nothing hangs")
        for completion in completions:
            completion.wait()
            require(completion.num_calls == 1, "close lost a request, or completed it twice")

    def test_close_twice(self) -> None:
        backend = self.make_backend(_CAPACITY_BYTES)
        require(backend.close(_TIMEOUT_SECONDS), "close did not end although nothing hangs")
        require(backend.close(_TIMEOUT_SECONDS), "a second close did not end")


class _Suite(BackendConformance):
    def __init__(self, make_backend: Callable[[int], IOBackend]) -> None:
        self._make_backend = make_backend

    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return self._make_backend(capacity_bytes)


def run_conformance(make_backend: Callable[[int], IOBackend]) -> int:
    """Run the whole suite without pytest and return the number of its tests.

    Raises:
        ConformanceError: The first thing that is wrong, and in which test.
    """
    suite = _Suite(make_backend)
    names = [name for name in dir(BackendConformance) if name.startswith("test_")]
    for name in names:
        try:
            getattr(suite, name)()
        except Exception as error:
            raise ConformanceError(f"{name}: {error}") from error
    return len(names)
