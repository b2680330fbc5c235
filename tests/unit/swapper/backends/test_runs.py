"""Long transfers, which a thread carries out request by request: few calls of Python, and the same bytes after any trouble."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import swapper as package
from swapper import ALIGNMENT, AlignedRegion, Swapper, SwapperConfig, Volume
from swapper.backends import ThreadsBackend, volume_backend
from tests.calls import call_counter

_REQUEST = 64 << 10
_NUM_REQUESTS = 64


def _opened(directory: Path, num_threads: int = 4, num_files: int = 1) -> Swapper:
    config = SwapperConfig(backend="threads", request_bytes=_REQUEST, num_threads=num_threads)
    directories = [directory / str(number) for number in range(num_files)]
    for path in directories:
        path.mkdir()
    return Swapper.open(directories, 2 * _NUM_REQUESTS * _REQUEST, config)


def _random(num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)


@pytest.mark.parametrize("num_files", [1, 2])
def test_an_operation_of_64_requests_takes_a_dozen_calls_more_than_one(num_files: int, tmp_path: Path) -> None:
    memory = AlignedRegion(_NUM_REQUESTS * _REQUEST).array()
    with call_counter() as counter, _opened(tmp_path, num_files=num_files) as opened:
        extent = opened.allocate(memory.size, "x")
        opened.write(extent, memory).wait()

        def count(start: Callable[..., Any], num_requests: int) -> int:
            with counter.counting():
                start(extent, memory[: num_requests * _REQUEST]).wait()
                opened.flush()
            return counter.num_calls

        for start in (opened.read, opened.write):
            short = min(count(start, 1) for _ in range(3))
            long = min(count(start, _NUM_REQUESTS) for _ in range(3))
            # A wait for what has come already is 3 calls shorter; 4 threads take 7 calls more than one, 2 files 3 more.
            assert long - short <= 16, (long, short)


@pytest.mark.parametrize("offset", [0, 100, 4000])
def test_an_unaligned_transfer_is_cut_at_whole_blocks_and_keeps_all_threads_at_work(
    offset: int, tmp_path: Path
) -> None:
    num_threads, num_requests = 4, 8
    backend = ThreadsBackend(Volume([tmp_path], 2 * num_requests * _REQUEST), num_threads, _REQUEST)
    parts = backend._spread([(0, offset, 0, num_requests * _REQUEST)])
    pieces = [piece for part in parts for piece in part]
    assert [low for _, _, low, _ in pieces] == [0, *(high for _, _, _, high in pieces[:-1])], "all bytes, in order"
    assert pieces[-1][3] == num_requests * _REQUEST
    assert all(high - low <= _REQUEST and place == offset + low for _, place, low, high in pieces)
    assert all(place % ALIGNMENT == 0 for _, place, _, _ in pieces[1:]), "only the two ends are bounced"
    # A short piece more, if the beginning is not aligned: it is no reason for longer parts.
    assert [len(part) for part in parts] == [2, 2, 2, 2, *([1] if offset else [])]
    assert backend.close(5.0)


@pytest.mark.parametrize("num_files", [1, 2])
def test_unaligned_bytes_come_back(num_files: int, tmp_path: Path) -> None:
    values = _random(12 * _REQUEST + 123)
    found = np.zeros_like(values)
    with _opened(tmp_path, num_files=num_files) as opened:
        extent = opened.allocate(values.size + 100, "x")
        opened.write(extent, values, offset=100).wait()
        opened.read(extent, found, offset=100).wait()
        assert np.array_equal(found, values) and opened.statistics().num_bounced


def test_what_is_short_on_one_of_several_files_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorts = iter([4096, 0, 8192])
    fake = SimpleNamespace(preadv=os.preadv, pwritev=os.pwritev)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        most = next(shorts, None)
        return os.preadv(fd, [buffers[0][:most]] if most is not None else buffers, offset)

    values = _random(12 * _REQUEST)
    memory = AlignedRegion(values.size).array()
    with _opened(tmp_path, num_files=2) as opened:
        extent = opened.allocate(values.size, "x")
        opened.write(extent, values).wait()
        fake.preadv = preadv
        monkeypatch.setattr(volume_backend, "os", fake)
        opened.read(extent, memory).wait()
        assert np.array_equal(memory, values) and opened.statistics().num_retries


@pytest.mark.parametrize("number", [errno.EINTR, errno.EIO])
def test_trouble_within_a_transfer_leaves_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It goes on at the request that failed, and fails if that does again."""
    moved: list[int] = []
    failing = {3 * _REQUEST: 1 if number == errno.EINTR else 99}

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if failing.get(offset, 0):
            failing[offset] -= 1
            raise OSError(number, os.strerror(number))
        moved.append(offset)
        return os.pwritev(fd, buffers, offset)

    fake = SimpleNamespace(preadv=os.preadv, pwritev=pwritev)
    monkeypatch.setattr(volume_backend, "os", fake)
    values = _random(12 * _REQUEST)
    memory = AlignedRegion(values.size).array()
    memory[:] = values
    with _opened(tmp_path, num_threads=1) as opened:
        extent = opened.allocate(values.size, "x")
        write = opened.write(extent, memory)
        if number == errno.EIO:
            with pytest.raises(package.SwapperError, match="EIO"):
                write.wait()
            assert moved == [0, _REQUEST, 2 * _REQUEST]
        else:
            write.wait()
            assert sorted(moved) == [place * _REQUEST for place in range(12)], "nothing is written twice"
            found = AlignedRegion(values.size).array()
            opened.read(extent, found).wait()
            assert np.array_equal(found, values)
