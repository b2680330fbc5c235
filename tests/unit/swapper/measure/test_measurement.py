"""Measurements move the bytes they report, and keep the window they promise."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import swapper.measure.measurement as measurement_module
from swapper import ArgumentError, Directory, SwapperConfig, TransferError, Volume
from swapper.backend import Direction, IOBackend, IORequest
from swapper.measure.by_name import open_by_name
from swapper.measure.measurement import BorrowedVolume, DriveTest, IOSetting, Workload

SMALL = IOSetting("threads", 64 << 10, num_threads=2, max_inflight=2)
FILE_BYTES = 4 << 20


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[DriveTest]:
    with DriveTest([tmp_path], FILE_BYTES) as test:
        test.prepare()
        yield test


class _Watched:
    """A backend that remembers how its inner one was used, request by request."""

    run_bytes = 0
    holds_until_inflight = 0
    """Nothing completes before so many requests were in flight."""

    def __init__(self, inner: IOBackend) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.requests: list[tuple[Direction, int, int]] = []
        self.inflight = 0
        self.most_inflight = 0
        self._is_full = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def step_of(self, request: IORequest) -> None:
        """None: each request comes by `submit`."""

    def submit(self, request: IORequest) -> None:
        with self._lock:
            self.requests.append((request.direction, request.offset, len(request.memory)))
            self.inflight += 1
            self.most_inflight = max(self.most_inflight, self.inflight)
            if self.inflight >= self.holds_until_inflight:
                self._is_full.set()
        on_complete = request.on_complete

        def completed(request: IORequest, transferred: int, error: OSError | None) -> None:
            self._is_full.wait(5.0)
            with self._lock:
                self.inflight -= 1
            on_complete(request, transferred, error)

        request.on_complete = completed
        self._inner.submit(request)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[_Watched]:
    """The backends that measurements open, one after the other."""
    opened: list[_Watched] = []

    def open_watched(volume: Volume, config: SwapperConfig) -> IOBackend:
        opened.append(_Watched(open_by_name(volume, config)))
        return opened[-1]  # type: ignore[return-value]

    monkeypatch.setattr(measurement_module, "open_by_name", open_watched)
    return opened


# ------------------------------------------------------------------------------------------------------------- samples


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("workload", Workload)
def test_a_sample_tells_what_the_backend_did(drive: DriveTest, watched: list[_Watched], workload: Workload) -> None:
    sample = drive.measure(SMALL, workload, 0.05)
    done = {direction: 0 for direction in Direction}
    for direction, _, num_bytes in watched[0].requests:
        done[direction] += num_bytes
    assert (sample.read_bytes, sample.write_bytes) == (done[Direction.READ], done[Direction.WRITE])
    assert (sample.read_bytes > 0) == (workload is not Workload.WRITE)
    assert (sample.write_bytes > 0) == (workload is not Workload.READ)
    assert sample.seconds > 0
    assert sample.setting is SMALL and sample.workload is workload
    assert sample.bytes_per_second == (sample.read_bytes + sample.write_bytes) / sample.seconds
    assert sample.cpu_cores == sample.cpu_seconds / sample.seconds >= 0


def test_a_measurement_goes_on_where_the_last_one_ended_and_starts_over_at_the_end(
    drive: DriveTest, watched: list[_Watched]
) -> None:
    setting = IOSetting("threads", 64 << 10, num_threads=1, max_inflight=1)
    offsets: list[int] = []
    while len(offsets) <= FILE_BYTES // setting.request_bytes:
        drive.measure(setting, Workload.READ, 0.002)
        offsets += [offset for _, offset, _ in watched[-1].requests]
    assert len(watched) > 1, "one measurement went through the whole file: take a larger one"
    expected = [index * setting.request_bytes % FILE_BYTES for index in range(len(offsets))]
    assert offsets == expected


def test_both_directions_keep_their_shares_all_the_time(drive: DriveTest, watched: list[_Watched]) -> None:
    drive.measure(SMALL, Workload.MIXED, 0.05)
    read_bytes, total, share = 0, 0, 14 / 26
    for direction, _, num_bytes in watched[0].requests:
        read_bytes += num_bytes if direction is Direction.READ else 0
        total += num_bytes
        # Which of two requests comes first is up to the threads; more than a window they may not drift apart.
        assert abs(read_bytes - share * total) <= 2 * SMALL.bytes_inflight
    # Neither direction ever waits for the other one to be done with the same bytes.
    halves = {(direction, offset >= FILE_BYTES // 2) for direction, offset, _ in watched[0].requests}
    assert halves == {(Direction.READ, False), (Direction.WRITE, True)}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("workload", Workload)
@pytest.mark.parametrize(
    "setting", [IOSetting("threads", 16 << 10, 6, 6), IOSetting("threads", 4096, 32, 32)], ids=lambda s: s.describe()
)
def test_the_window_is_full_at_the_backend(
    drive: DriveTest,
    watched: list[_Watched],
    setting: IOSetting,
    workload: Workload,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Watched, "holds_until_inflight", setting.num_inflight)
    drive.measure(setting, workload, 0.1)
    most = watched[0].most_inflight
    assert most >= setting.num_inflight
    # Both directions together: no more than the operation of several requests that is kept ready.
    per_operation = max(1, setting.num_inflight // 8)
    spare = per_operation if workload is Workload.MIXED and per_operation > 1 else 0
    assert most <= setting.num_inflight + spare
    assert {num_bytes for *_, num_bytes in watched[0].requests} == {setting.request_bytes}


# --------------------------------------------------------------------------------------------------------------- files


def test_other_stripes_cover_only_what_is_used(paths: list[Path]) -> None:
    owner = Volume(paths[:2], 16 << 20, stripe_bytes=4 << 20)
    try:
        used = [0, 0]
        for column, offset, low, high in owner.file_ranges(0, 8 << 20):
            used[column] = max(used[column], offset + high - low)
        for stripe_bytes in (64 << 10, 12288, 4 << 20):
            borrowed = BorrowedVolume(owner, 8 << 20, stripe_bytes)
            assert 0.9 * (8 << 20) < borrowed.capacity_bytes <= 8 << 20
            pieces = borrowed.file_ranges(0, borrowed.capacity_bytes)
            assert {high - low for *_, low, high in pieces} == {stripe_bytes}
            assert all(offset + high - low <= used[column] for column, offset, low, high in pieces)
            assert len({each[:2] for each in pieces}) == len(pieces), "two addresses for one place"
    finally:
        owner.close()


def test_drives_of_which_the_speeds_give_no_whole_cycles_can_be_filled(paths: list[Path]) -> None:
    directories = [Directory(path, bytes_per_second=speed) for path, speed in zip(paths, (5e9, 3e9), strict=False)]
    with DriveTest(directories, 4 * FILE_BYTES) as test:
        before = test.num_bytes
        test.prepare()
        assert before / 2 < test.num_bytes < before
        assert test.measure(SMALL, Workload.MIXED, 0.01).num_bytes


# ----------------------------------------------------------------------------------------------------------- bad input


def test_nothing_is_measured_before_the_file_is_filled(tmp_path: Path) -> None:
    before = pytest.raises(ArgumentError, match=r"call prepare\(\) before measure\(\)")
    with DriveTest([tmp_path], FILE_BYTES) as test, before:
        test.measure(SMALL, Workload.READ, 0.01)


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_drive_that_fails_raises_and_the_test_goes_on(
    drive: DriveTest, watched: list[_Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def failing(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(TransferError, match="EIO"):
        drive.measure(SMALL, Workload.WRITE, 0.01)
    monkeypatch.setattr(os, "pwritev", real)
    drive.measure(SMALL, Workload.WRITE, 0.02)


def test_files_in_the_page_cache_are_measured_at_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(BorrowedVolume, "sync", lambda self: calls.append("sync"))
    monkeypatch.setattr(BorrowedVolume, "drop_cache", lambda self: calls.append("drop"))
    with DriveTest([tmp_path], FILE_BYTES, direct=False) as test:
        assert not test.is_direct
        test.prepare()
        calls.clear()
        test.measure(SMALL, Workload.WRITE, 0.01)
        assert calls[-1] == "sync"
        calls.clear()
        test.measure(SMALL, Workload.READ, 0.01)
        assert calls == ["drop"]
