"""How a ring ends: by close, by hanging, by garbage collection, by a fork, with the process; and how it fails to begin."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from swapper import ALIGNMENT, AlignedRegion, BackendUnavailableError, Volume
from swapper.backend import Direction
from swapper.backends.uring import ring as ring_module
from swapper.backends.uring.backend import UringBackend
from swapper.backends.uring.ring import Library, Ring, library
from swapper.backends.uring.ring_loop import RingLoop
from tests.conformance.suite import aligned_bytes, random_bytes, read, start, write
from tests.forked import require_in_child
from tests.open_files import open_files
from tests.uring import needs_uring
from tests.waiting import wait_until

_READ, _WRITE = Direction.READ, Direction.WRITE
_SECONDS = 20.0
pytestmark = needs_uring


def _ring_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "swapper-ring"]


def test_close_gives_everything_back_at_once(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(8 << 20)
    free_bytes, files = os.statvfs(directory).f_bavail, open_files(directory)
    for _ in range(5):
        backend = UringBackend(Volume([directory], 4 << 20))
        backend.register_memory(AlignedRegion(1 << 20))
        write(backend, 0, random_bytes(1 << 20, 0))
        assert backend.close(_SECONDS)
        assert (os.statvfs(directory).f_bavail, open_files(directory)) == (free_bytes, files)
    assert not _ring_threads()


def test_close_with_a_hung_transfer_returns_in_time_and_leaves_its_files_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver, sender = os.pipe()
    volume = Volume([tmp_path], ALIGNMENT, direct=False)
    os.close(volume.files[0].fd)
    volume.files[0].fd = receiver
    backend = UringBackend(volume, 2)
    hung = start(backend, _READ, 0, np.zeros(4, dtype=np.uint8))
    began = time.monotonic()
    assert not backend.close(0.2)
    assert time.monotonic() - began < 10
    assert volume.files[0].fd == receiver and "a transfer hangs" in caplog.text
    late = start(backend, _READ, 0, np.zeros(4, dtype=np.uint8))
    late.wait()
    assert late.error is not None and late.error.errno == errno.ESHUTDOWN
    os.write(sender, b"1234")
    hung.require_whole(4)
    assert backend.close(_SECONDS) and volume.files[0].fd == -1
    os.close(sender)


def test_a_backend_that_nobody_closes_goes_away(tmp_path: Path) -> None:
    gc.collect()
    files = open_files(tmp_path)
    backend = UringBackend(Volume([tmp_path], 1 << 20))
    write(backend, 0, random_bytes(5000, 0))
    threads = _ring_threads()
    del backend
    gc.collect()
    for thread in threads:
        thread.join(_SECONDS)
    gc.collect()
    assert not _ring_threads()
    wait_until(lambda: open_files(tmp_path) == files)  # a worker that held the backend last may be dropping it just now


@pytest.mark.parametrize("name", ["queue_init", "register_files"])
def test_a_failed_set_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    volume = Volume([tmp_path], ALIGNMENT)
    gc.collect()
    files = open_files(tmp_path)
    monkeypatch.setattr(library(), name, lambda *_: -errno.EPERM)
    with pytest.raises(BackendUnavailableError, match=r"Operation not permitted \(errno 1, EPERM\)"):
        UringBackend(volume)
    assert not _ring_threads() and open_files(tmp_path) == files
    volume.close()


def test_an_older_kernel_gets_fewer_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = library().queue_init

    def queue_init(entries: int, ring: int, flags: int) -> int:
        tried.append(flags)
        return -errno.EINVAL if flags else real(entries, ring, flags)

    monkeypatch.setattr(library(), "queue_init", queue_init)
    ring = Ring(2, [0])
    assert ring.fd > 2 and "io_uring" in os.readlink(f"/proc/self/fd/{ring.fd}")
    ring.close()
    assert len(tried) == 2 and tried[-1] == 0


def test_without_file_descriptors_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def eventfd(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "eventfd", eventfd)
    with pytest.raises(BackendUnavailableError, match=r"Too many open files .*ulimit -n"):
        RingLoop([0], 1)


@pytest.mark.parametrize("missing", [True, False])
def test_a_missing_or_another_wheel_is_named(monkeypatch: pytest.MonkeyPatch, missing: bool) -> None:
    def import_module(name: str) -> object:
        if missing:
            raise ModuleNotFoundError("No module named 'liburing'")
        return type("module", (), {"__file__": "libc.so.6"})

    library.cache_clear()
    monkeypatch.setattr(ring_module.importlib, "import_module", import_module)
    with pytest.raises(
        BackendUnavailableError, match="is not installed" if missing else "lacks what is needed"
    ) as caught:
        library()
    assert "infinity-offload[uring]" in caught.value.cure
    monkeypatch.undo()
    assert isinstance(library(), Library)


# -- other processes -----------------------------------------------------------------------------------------------------


def test_a_forked_child_touches_nothing_of_its_parents_ring(backend: UringBackend) -> None:
    ring = backend._loop._ring
    ring_fd = ring.fd
    holder = [backend]

    def child() -> bool:
        mine = holder.pop()
        refused = start(mine, _WRITE, 0, aligned_bytes(ALIGNMENT))
        refused.wait()
        is_refused = refused.error is not None and refused.error.errno == errno.ESHUTDOWN
        mine.register_memory(AlignedRegion(ALIGNMENT))()
        try:
            os.fstat(ring_fd)
            return False  # it would keep the parent's files, and their space
        except OSError:
            pass
        is_closed = mine.close(1.0)
        del mine
        gc.collect()
        return is_refused and is_closed

    data, copy = random_bytes(256 * ALIGNMENT, 4), aligned_bytes(256 * ALIGNMENT)
    for _ in range(4):
        running = [start(backend, _WRITE, i, data[i : i + 65536]) for i in range(0, data.size, 65536)]
        require_in_child(child)
        for completion in running:
            completion.require_whole(65536)
        copy[:] = 0
        read(backend, 0, copy)
        assert np.array_equal(data, copy)
