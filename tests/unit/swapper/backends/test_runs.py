"""Long transfers, which a thread carries out request by request: few calls of Python, and the same bytes after any trouble."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import swapper as package
from swapper import AlignedRegion, Swapper, SwapperConfig
from swapper.backends import file_transfer

_REQUEST = 64 << 10
_NUM_REQUESTS = 64
_FOLDER = str(Path(package.__file__).parent) + os.sep


def _opened(directory: Path, num_threads: int = 4) -> Swapper:
    config = SwapperConfig(backend="threads", request_bytes=_REQUEST, num_threads=num_threads)
    return Swapper.open(directory, 2 * _NUM_REQUESTS * _REQUEST, config)


def _random(num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)


class _Counter:
    def __init__(self) -> None:
        self.is_on = False
        self.num_calls = 0

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        self.num_calls += event == "call" and self.is_on and frame.f_code.co_filename.startswith(_FOLDER)


@pytest.fixture
def counter() -> Iterator[_Counter]:
    """Counts calls of the package in threads that are started from now on, and in this one."""
    counter, before = _Counter(), sys.getprofile()
    threading.setprofile(counter.profile)
    sys.setprofile(counter.profile)
    yield counter
    sys.setprofile(before)
    threading.setprofile(None)


def test_an_operation_of_64_requests_takes_half_as_many_calls_again_as_one(tmp_path: Path, counter: _Counter) -> None:
    memory = AlignedRegion(_NUM_REQUESTS * _REQUEST).array()
    with _opened(tmp_path) as opened:
        extent = opened.allocate(memory.size, "x")
        opened.write(extent, memory).wait()

        def count(start: Callable[..., Any], num_requests: int) -> int:
            counter.num_calls, counter.is_on = 0, True
            start(extent, memory[: num_requests * _REQUEST]).wait()
            opened.flush()
            counter.is_on = False
            return counter.num_calls

        for start in (opened.read, opened.write):
            short = min(count(start, 1) for _ in range(3))
            long = min(count(start, _NUM_REQUESTS) for _ in range(3))
            assert long <= 1.5 * short, (long, short)


@pytest.mark.parametrize("shift", [0, 8], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("num_bytes", [_REQUEST, 5 * _REQUEST + 4096, 33 * _REQUEST - 777])
def test_bytes_come_back_whatever_their_number_and_place(tmp_path: Path, num_bytes: int, shift: int) -> None:
    values = _random(num_bytes)
    memory = AlignedRegion(num_bytes + shift).array()[shift:]
    with _opened(tmp_path, num_threads=2) as opened:
        extent = opened.allocate(num_bytes, "x")
        opened.write(extent, values).wait()
        opened.read(extent, memory).wait()
    assert np.array_equal(memory, values)


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
    monkeypatch.setattr(file_transfer, "os", fake)
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
