"""Every backend and every wrapper passes the suite that is shipped for backends of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper import Directory, Volume
from swapper.backend import IOBackend, IORequest
from swapper.backends import (
    AiofilesBackend,
    BackendWrapper,
    FaultInjectingBackend,
    IntegrityBackend,
    MemoryBackend,
    ThreadsBackend,
    UringBackend,
)
from swapper.testing import BackendConformance, ConformanceError, run_conformance
from tests.latency import delayed
from tests.uring import needs_uring


class _OnDrive(BackendConformance):
    @pytest.fixture(autouse=True)
    def _directories(self, tmp_path: Path) -> None:
        self.directories = [tmp_path / name for name in "abc"]
        for directory in self.directories:
            directory.mkdir()


class TestThreads(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return ThreadsBackend(Volume(self.directories[:1], capacity_bytes))


class TestThreadsThroughPageCache(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return ThreadsBackend(Volume(self.directories[:1], capacity_bytes, direct=False), num_threads=1)


class TestThreadsStriped(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return ThreadsBackend(Volume(self.directories, capacity_bytes, stripe_bytes=64 << 10))


class TestThreadsOnUnevenDrives(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        directories = [
            Directory(self.directories[0], capacity_bytes=256 << 10, bytes_per_second=3e9),
            Directory(self.directories[1], bytes_per_second=1e9),
            self.directories[2],
        ]
        return ThreadsBackend(Volume(directories, capacity_bytes, stripe_bytes=16 << 10), num_threads=2)


class TestAiofiles(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return AiofilesBackend(Volume(self.directories[:1], capacity_bytes))


class TestAiofilesThroughPageCache(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return AiofilesBackend(Volume(self.directories[:1], capacity_bytes, direct=False), num_threads=1)


class TestAiofilesStriped(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return AiofilesBackend(Volume(self.directories, capacity_bytes, stripe_bytes=64 << 10), num_threads=2)


class TestIntegrity(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return IntegrityBackend(ThreadsBackend(Volume(self.directories[:1], capacity_bytes)), boundary_bytes=1 << 20)


class TestIntegrityStriped(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return IntegrityBackend(ThreadsBackend(Volume(self.directories, capacity_bytes, stripe_bytes=12 << 10)))


class TestIntegrityInline(BackendConformance):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return IntegrityBackend(MemoryBackend(capacity_bytes), page_bytes=4096)


@needs_uring
class TestUring(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return UringBackend(Volume(self.directories[:1], capacity_bytes))


@needs_uring
class TestUringOneByOne(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return UringBackend(Volume(self.directories[:1], capacity_bytes), queue_depth=1)


@needs_uring
class TestUringThroughPageCache(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return UringBackend(Volume(self.directories[:1], capacity_bytes, direct=False), queue_depth=4)


@needs_uring
class TestUringOnUnevenDrives(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        directories = [Directory(self.directories[0], bytes_per_second=3e9), self.directories[1]]
        return UringBackend(Volume(directories, capacity_bytes, stripe_bytes=64 << 10), queue_depth=3)


class TestMemory(BackendConformance):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return MemoryBackend(capacity_bytes, num_threads=3)


class TestMemoryInline(BackendConformance):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return MemoryBackend(capacity_bytes)


class TestWrapper(BackendConformance):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return BackendWrapper(MemoryBackend(capacity_bytes, 2))


class TestLatency(BackendConformance):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return delayed(MemoryBackend(capacity_bytes, 2), read_seconds=0.0003, write_seconds=0.0002)


class TestFaultInjectingWithoutFaults(_OnDrive):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return FaultInjectingBackend(ThreadsBackend(Volume(self.directories[:1], capacity_bytes)))


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
