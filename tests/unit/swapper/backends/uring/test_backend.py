"""io_uring: what the ring's one thread does, what is registered, how it ends, and how nobody else is harmed."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from swapper import ALIGNMENT, AlignedRegion, ArgumentError, Volume
from swapper.backend import Direction, IORequest
from swapper.backends.uring import ring_loop as ring_loop_module
from swapper.backends.uring.backend import UringBackend
from swapper.backends.uring.ring import Ring, library
from tests.conformance.suite import Completion, aligned_bytes, random_bytes, read, start, write
from tests.uring import needs_uring
from tests.waiting import wait_until

_READ, _WRITE = Direction.READ, Direction.WRITE
_SECONDS = 20.0


pytestmark = needs_uring


def _ring_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "swapper-ring"]


class _Spy:
    """Knows how a method of the ring was called; ``before`` may do something first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, before: Callable[..., object] | None = None) -> None:
        self.calls: list[tuple[object, ...]] = []
        original = getattr(Ring, name)

        def method(ring: Ring, *arguments: object, **options: object) -> object:
            self.calls.append((*arguments, *options.values()))
            if before is not None and (answer := before(*arguments)) is not None:
                return answer
            return original(ring, *arguments, **options)

        monkeypatch.setattr(Ring, name, method)


def _block(backend: UringBackend) -> threading.Event:
    """Keep the ring's thread in a callback until the returned event is set."""
    gate, is_blocked = threading.Event(), threading.Event()

    def block(*_: object) -> None:
        is_blocked.set()
        gate.wait(_SECONDS)

    page = aligned_bytes(ALIGNMENT)
    backend.submit(IORequest(_WRITE, 0, page.data, page.ctypes.data, block))
    assert is_blocked.wait(_SECONDS)
    return gate


# -- one thread ----------------------------------------------------------------------------------------------------------


def test_one_thread_keeps_many_requests_in_flight_and_bounds_them(
    backend: UringBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []
    loop = backend._loop
    _Spy(monkeypatch, "submit", lambda *_: depths.append(len(loop._inflight)))
    gate = _block(backend)
    arrays = [random_bytes(ALIGNMENT, seed) for seed in range(40)]
    others = [start(backend, _READ, (64 + i) * ALIGNMENT, aligned_bytes(ALIGNMENT)) for i in range(5)]
    written = [start(backend, _WRITE, i * ALIGNMENT, array) for i, array in enumerate(arrays)]
    assert not any(completion.num_calls for completion in written), "there is more than one thread"
    gate.set()
    for completion in [*written, *others]:
        completion.require_whole(ALIGNMENT)
    assert max(depths) == 8 + 5, "both directions up to their limit, in one submission"
    assert len(_ring_threads()) == 1
    for i, array in enumerate(arrays):
        copy = aligned_bytes(ALIGNMENT)
        read(backend, i * ALIGNMENT, copy)
        assert np.array_equal(array, copy)


def test_a_full_queue_refuses_and_is_usable_again_after_submitting(tmp_path: Path) -> None:
    volume = Volume([tmp_path], 1 << 20)
    ring = Ring(4, [volume.files[0].fd])
    memory = AlignedRegion(ALIGNMENT)
    for _ in range(3):
        taken = [ring.prepare(_READ, 0, memory.address, ALIGNMENT, 0, token=k) for k in range(6)]
        assert taken == [True] * 4 + [False] * 2
        ring.submit(4)
        assert len(ring.reap()) == 4
    ring.close()
    volume.close()


def test_an_idle_ring_sleeps_in_the_kernel(backend: UringBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = _Spy(monkeypatch, "submit")
    write(backend, 0, random_bytes(ALIGNMENT, 0))
    num_calls, cpu_seconds, began = len(spy.calls), time.process_time(), time.perf_counter()
    time.sleep(0.4)
    share = (time.process_time() - cpu_seconds) / (time.perf_counter() - began)
    # The way back to sleep after the write may fall into this time; going round would be thousands of calls.
    assert len(spy.calls) <= num_calls + 2, "it went round although there was nothing to do"
    assert share < 0.8, "something spins"
    write(backend, 0, random_bytes(ALIGNMENT, 1))  # and it still wakes up


def test_waiting_in_the_kernel_does_not_hold_up_other_threads(backend: UringBackend) -> None:
    # With the wheel's own function this thread would stand still for ever: the ring sleeps, and only we can wake it.
    write(backend, 0, random_bytes(ALIGNMENT, 0))
    began = time.perf_counter()
    while time.perf_counter() - began < 0.2:
        sum(range(1000))
    write(backend, 0, random_bytes(ALIGNMENT, 1))


# -- what the kernel answers ---------------------------------------------------------------------------------------------


def test_short_transfers_and_errors_are_passed_on_as_they_are(backend: UringBackend) -> None:
    os.ftruncate(backend.volume.files[0].fd, 3 * ALIGNMENT)
    for offset, expected in ((2 * ALIGNMENT, ALIGNMENT), (8 * ALIGNMENT, 0)):
        completion = start(backend, _READ, offset, aligned_bytes(4 * ALIGNMENT))
        completion.wait()
        assert (completion.transferred_bytes, completion.error) == (expected, None)
    nowhere = Completion()
    backend.submit(IORequest(_READ, 0, aligned_bytes(ALIGNMENT).data, 1 << 46, nowhere))
    nowhere.wait()
    assert nowhere.transferred_bytes == 0
    assert nowhere.error is not None and nowhere.error.errno == errno.EFAULT


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
def test_a_kernel_short_of_resources_or_a_signal_does_no_harm(
    backend: UringBackend, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    answers, real = [-code] * 5, library().submit_and_wait
    monkeypatch.setattr(library(), "submit_and_wait", lambda *both: answers.pop() if answers else real(*both))
    data, copy = random_bytes(16 * ALIGNMENT, 3), aligned_bytes(16 * ALIGNMENT)
    write(backend, 0, data)
    read(backend, 0, copy)
    assert not answers and np.array_equal(data, copy)


def test_requests_that_find_the_queue_full_are_carried_out_later(
    backend: UringBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(range(1_000_000))
    spy = _Spy(monkeypatch, "prepare", lambda *_: False if next(turns) % 2 else None)
    arrays = [random_bytes(ALIGNMENT, seed) for seed in range(20)]
    for completion in [start(backend, _WRITE, i * ALIGNMENT, array) for i, array in enumerate(arrays)]:
        completion.require_whole(ALIGNMENT)
    assert len(spy.calls) > len(arrays)


def test_a_request_longer_than_the_kernel_takes_is_a_short_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    original = library().prepare
    spies = tuple(lambda entry, fd, at, length, offset: lengths.append(length) for _ in original)
    monkeypatch.setattr(library(), "prepare", spies)
    ring = Ring(2, [0])
    assert ring.prepare(_READ, 0, 1 << 20, (1 << 32) + ALIGNMENT, 0, token=1)
    ring.close()
    assert lengths == [0x7FFFF000]  # and not the 4096 that are left of it in 32 bits


def test_a_ring_that_breaks_refuses_instead_of_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = UringBackend(Volume([tmp_path], 1 << 20), 2)
    gate = _block(backend)

    def fail(*_: object) -> None:
        raise OSError(errno.EBADFD, "broken")

    _Spy(monkeypatch, "submit", fail)
    lost = [start(backend, _READ, 0, aligned_bytes(ALIGNMENT)) for _ in range(5)]
    gate.set()
    backend._loop.thread.join(_SECONDS)
    assert [completion.num_calls for completion in lost] == [0, 0, 1, 1, 1], "who is not in flight is refused"
    late = start(backend, _READ, 0, aligned_bytes(ALIGNMENT))
    late.wait()
    assert late.error is not None and late.error.errno == errno.ESHUTDOWN
    assert "the ring's thread failed" in caplog.text
    assert not backend.close(1.0), "what was in flight may still use its memory"
    assert ring_loop_module._abandoned == [backend._loop]
    ring_loop_module._abandoned.clear()
    backend.volume.close()


def test_memory_in_flight_is_kept_and_then_let_go(tmp_path: Path) -> None:
    receiver, sender = os.pipe()
    volume = Volume([tmp_path], ALIGNMENT, direct=False)
    file_fd, volume.files[0].fd = volume.files[0].fd, receiver  # a read of an empty pipe has no answer
    backend = UringBackend(volume, 2)
    array = np.zeros(8, dtype=np.uint8)
    memory = weakref.ref(array)
    completion = start(backend, _READ, 0, array)
    del array
    gc.collect()
    assert memory() is not None
    os.write(sender, b"12345678")
    completion.require_whole(8)
    wait_until(lambda: memory() is None)  # an idle ring holds on to nothing
    assert backend.close(_SECONDS)
    os.close(sender)
    os.close(file_fd)


def test_queue_depth_is_checked(tmp_path: Path) -> None:
    with_volume = Volume([tmp_path], ALIGNMENT)
    for depth in (0, 5000):
        with pytest.raises(ArgumentError, match="queue_depth must be from 1 to 4096"):
            UringBackend(with_volume, depth)
    with_volume.close()
