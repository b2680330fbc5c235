"""Every backend and every wrapper passes the suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swapper import Directory, Volume
from swapper.backend import IOBackend, IORequest
from swapper.backends import (
    AiofilesBackend,
    BackendWrapper,
    IntegrityBackend,
    MemoryBackend,
    ThreadsBackend,
    UringBackend,
)
from swapper.wrappers.versions import VersionedBackend
from tests.conformance.suite import BackendConformance, ConformanceError, run_conformance
from tests.faults import FaultInjectingBackend
from tests.latency import delayed
from tests.uring import needs_uring

_Paths = list[Path]


def _uneven(paths: _Paths) -> list[Directory | Path]:
    small = Directory(paths[0], capacity_bytes=256 << 10, bytes_per_second=3e9)
    return [small, Directory(paths[1], bytes_per_second=1e9), paths[2]]


_MAKERS: dict[str, Callable[[_Paths, int], IOBackend]] = {
    "threads": lambda paths, size: ThreadsBackend(Volume(paths[:1], size)),
    "threads, long": lambda paths, size: ThreadsBackend(Volume(paths[:1], size), 3, request_bytes=4096),
    "threads, page cache": lambda paths, size: ThreadsBackend(Volume(paths[:1], size, direct=False), num_threads=1),
    "threads, striped": lambda paths, size: ThreadsBackend(Volume(paths, size, stripe_bytes=64 << 10)),
    "threads, uneven": lambda paths, size: ThreadsBackend(Volume(_uneven(paths), size, stripe_bytes=16 << 10), 2, 8192),
    "aiofiles": lambda paths, size: AiofilesBackend(Volume(paths[:1], size)),
    "aiofiles, page cache": lambda paths, size: AiofilesBackend(Volume(paths[:1], size, direct=False), num_threads=1),
    "aiofiles, striped": lambda paths, size: AiofilesBackend(Volume(paths, size, stripe_bytes=64 << 10), 2),
    "checked": lambda paths, size: IntegrityBackend(ThreadsBackend(Volume(paths[:1], size)), boundary_bytes=1 << 20),
    "checked, striped": lambda paths, size: IntegrityBackend(ThreadsBackend(Volume(paths, size, stripe_bytes=12288))),
    "checked, inline": lambda paths, size: IntegrityBackend(MemoryBackend(size), page_bytes=4096),
    "versions": lambda paths, size: VersionedBackend(ThreadsBackend(Volume(paths, 4 * size)), size),
    "uring": lambda paths, size: UringBackend(Volume(paths[:1], size)),
    "uring, one by one": lambda paths, size: UringBackend(Volume(paths[:1], size), queue_depth=1),
    "uring, page cache": lambda paths, size: UringBackend(Volume(paths[:1], size, direct=False), queue_depth=4),
    "uring, uneven": lambda paths, size: UringBackend(Volume(_uneven(paths), size, stripe_bytes=64 << 10), 3),
    "memory": lambda paths, size: MemoryBackend(size, num_threads=3),
    "memory, inline": lambda paths, size: MemoryBackend(size),
    "wrapper": lambda paths, size: BackendWrapper(MemoryBackend(size, 2)),
    "late": lambda paths, size: delayed(MemoryBackend(size, 2), read_seconds=0.0003, write_seconds=0.0002),
    "no faults": lambda paths, size: FaultInjectingBackend(ThreadsBackend(Volume(paths[:1], size))),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[needs_uring] if "uring" in kind else []) for kind in _MAKERS]
)
class TestBackends(BackendConformance):
    @pytest.fixture(autouse=True)
    def _directories(self, kind: str, tmp_path: Path) -> None:
        self._make = _MAKERS[kind]
        self._paths = [tmp_path / name for name in "abc"]
        for path in self._paths:
            path.mkdir()

    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return self._make(self._paths, capacity_bytes)


class _Forgetful(MemoryBackend):
    """Loses the last byte of every transfer."""

    def submit(self, request: IORequest) -> None:
        whole, request.memory = request.memory, request.memory[:-1]
        outer = request.on_complete
        request.on_complete = lambda same, _, error: outer(same, len(whole), error)
        super().submit(request)


class _Twice(MemoryBackend):
    """Completes everything twice."""

    def submit(self, request: IORequest) -> None:
        super().submit(request)
        request.complete(len(request.memory))


class _Greedy(MemoryBackend):
    """Writes over the bytes after a write's last one."""

    def submit(self, request: IORequest) -> None:
        super().submit(request)
        end = request.offset + len(request.memory)
        if request.direction and end % 4096:
            self.region.array()[end : end + 5000] = 0


class _Small(MemoryBackend):
    """Has less room than it was asked for."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes // 2)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (_Forgetful, "came back different"),
        (_Twice, "broke with -|completed 2 times|completed it twice"),
        (_Greedy, "bytes at .* differ|block after"),
        (_Small, "less capacity"),
    ],
)
def test_the_suite_finds_what_is_wrong(backend: type[MemoryBackend], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        run_conformance(backend)


def test_the_suite_runs_without_pytest() -> None:
    assert run_conformance(MemoryBackend) >= 10
