"""Every backend and every wrapper passes the suite that is shipped for backends of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.backends import (
    FaultInjectingBackend,
    IOBackend,
    IORequest,
    LatencyBackend,
    LoggingBackend,
    MemoryBackend,
    ThreadsBackend,
)
from swapper.testing import BackendConformance, ConformanceError, run_conformance
from swapper.volume import Volume


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


class TestMemory(BackendConformance):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return MemoryBackend(capacity_bytes, num_threads=3)


class TestMemoryInline(BackendConformance):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return MemoryBackend(capacity_bytes)


class TestLogging(BackendConformance):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return LoggingBackend(MemoryBackend(capacity_bytes, 2))


class TestLatency(BackendConformance):
    def make_backend(self, capacity_bytes: int) -> IOBackend:
        return LatencyBackend(MemoryBackend(capacity_bytes, 2), read_seconds=0.0003, write_seconds=0.0002)


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
