"""One volume over several directories: who takes how much, by speed, capacity and free space."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import swapper.volumes.scratch_file as scratch_module
import swapper.volumes.volume as volume_module
from swapper import ALIGNMENT, Directory, Drive, Swapper, SwapperConfig, Volume, VolumeTooSmallError, describe_drive
from tests.open_files import open_files

_STRIPE = 16 * ALIGNMENT
_MIB = 1 << 20


@pytest.fixture
def on_drives(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes each directory look as if it lay on another file system, with so much free space."""

    def pretend(free_bytes: dict[Path, int], same_drive: bool = False) -> None:
        def describe(path: Path) -> Drive:
            number = 1 if same_drive else 1 + sorted(free_bytes).index(path)
            real = describe_drive(path)
            return dataclasses.replace(real, free_bytes=free_bytes[path], device_number=number, device=f"drive{number}")

        monkeypatch.setattr(volume_module, "describe_drive", describe)

    return pretend


@contextlib.contextmanager
def _opened(directories: list[Path | Directory], num_stripes: int) -> Iterator[Volume]:
    with contextlib.closing(Volume(directories, num_stripes * _STRIPE, stripe_bytes=_STRIPE)) as volume:
        for file in volume.files:
            status = os.fstat(file.fd)
            assert status.st_size == file.num_bytes, "reserved is not what is used"
            assert status.st_blocks * 512 >= file.num_bytes
        assert sum(file.num_bytes for file in volume.files) == volume.capacity_bytes
        places = {volume.locate(offset) for offset in range(0, volume.capacity_bytes, _STRIPE)}
        assert len(places) == volume.capacity_bytes // _STRIPE
        assert all(0 <= offset < file.num_bytes for file, offset in places)
        yield volume


def _shares(volume: Volume) -> list[int]:
    return [file.num_bytes // _STRIPE for file in volume.files]


def test_speeds_decide_who_takes_how_much(paths: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    directories = [
        Directory(path, bytes_per_second=speed) for path, speed in zip(paths, (4e9, 2e9, 1.95e9), strict=True)
    ]
    with caplog.at_level(logging.INFO), _opened(directories, 41) as volume:
        assert _shares(volume) in ([21, 10, 10], [20, 11, 10], [20, 10, 11])
    lines = [record.getMessage() for record in caplog.records if "striped over 3 directories" in record.getMessage()]
    assert len(lines) == 1
    for path, part in zip(paths, ("2 of 4 stripes at 4000 MB/s", "1 of 4 stripes", "1 of 4 stripes"), strict=True):
        assert str(path) in lines[0]
        assert part in lines[0]


def test_a_capacity_is_kept_and_the_others_take_the_rest(paths: list[Path]) -> None:
    with _opened([Directory(paths[0], capacity_bytes=2 * _STRIPE + 100), paths[1], paths[2]], 20) as volume:
        assert _shares(volume) == [2, 9, 9]
        # As long as there is room in all of them, all of them are used.
        assert [volume.file_ranges(stripe * _STRIPE, 1)[0][0] for stripe in range(6)] == [0, 1, 2, 0, 1, 2]
    with _opened([Directory(path, capacity_bytes=3 * _STRIPE) for path in paths], 9) as volume:
        assert _shares(volume) == [3, 3, 3]


def test_directories_of_one_file_system_share_its_free_space(
    paths: list[Path], on_drives: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    on_drives(dict.fromkeys(paths, 10 * _STRIPE), same_drive=True)
    with _opened(list(paths[:2]), 10) as volume:
        assert _shares(volume) == [5, 5]
    lines = [record.getMessage() for record in caplog.records if "do not add bandwidth" in record.getMessage()]
    assert lines == [
        f"{str(paths[0])!r}, {str(paths[1])!r} are on one drive (drive1): "
        "two directories on one drive do not add bandwidth"
    ]
    with pytest.raises(VolumeTooSmallError, match=r"shared with '.*a'") as caught:
        Volume(list(paths[:2]), 11 * _STRIPE, stripe_bytes=_STRIPE)
    assert caught.value.free_bytes == 10 * _STRIPE


def test_too_little_in_all_of_them_names_what_each_can_give(paths: list[Path], on_drives: Callable[..., None]) -> None:
    on_drives({paths[0]: 5 * _STRIPE + 10, paths[1]: 100 * _STRIPE, paths[2]: 2 * _STRIPE})
    files = open_files(*paths)
    wanted = [paths[0], Directory(paths[1], capacity_bytes=4 * _STRIPE), paths[2]]
    with pytest.raises(VolumeTooSmallError) as caught:
        Volume(wanted, 12 * _STRIPE, stripe_bytes=_STRIPE)
    error = caught.value
    assert (error.needed_bytes, error.free_bytes, error.directory) == (12 * _STRIPE, 11 * _STRIPE, paths[2])
    assert error.capacities == (
        (paths[0], 5 * _STRIPE, "free"),
        (paths[1], 4 * _STRIPE, "its capacity_bytes"),
        (paths[2], 2 * _STRIPE, "free"),
    )
    for part in (
        f"{12 * _STRIPE} bytes are needed and they can give {11 * _STRIPE}",
        f"{str(paths[0])!r} {5 * _STRIPE} (free)",
        f"{str(paths[1])!r} {4 * _STRIPE} (its capacity_bytes)",
        "add a directory on another drive",
    ):
        assert part in str(error)
    assert open_files(*paths) == files
    with contextlib.closing(Volume(wanted, 11 * _STRIPE, stripe_bytes=_STRIPE)) as volume:
        assert _shares(volume) == [5, 4, 2]


def test_a_single_directory_keeps_to_its_capacity(tmp_path: Path) -> None:
    with pytest.raises(VolumeTooSmallError, match=r"its capacity_bytes is 8192\): 12288 bytes are needed") as caught:
        Volume(Directory(tmp_path, capacity_bytes=8192), 8193)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (12288, 8192)
    with contextlib.closing(Volume(Directory(tmp_path, capacity_bytes=8192), 8192)) as volume:
        assert volume.files[0].num_bytes == 8192


def _limit(monkeypatch: pytest.MonkeyPatch, path: Path, largest: int, code: int = errno.ENOSPC) -> None:
    """As a quota, another writer, or what the file system needs for itself: free space is not always for the taking."""
    real = scratch_module.fallocate

    def limited(fd: int, num_bytes: int, *more: int) -> None:
        if str(path) in os.readlink(f"/proc/self/fd/{fd}") and num_bytes > largest:
            raise OSError(code, os.strerror(code))
        real(fd, num_bytes)

    monkeypatch.setattr(scratch_module, "fallocate", limited)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_what_cannot_be_reserved_after_all_goes_to_the_others(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    _limit(monkeypatch, paths[1], 4 * _STRIPE + 100, code)
    with _opened(list(paths), 30) as volume:
        assert _shares(volume)[1] == 4
    limits = [Directory(path, capacity_bytes=10 * _STRIPE) for path in paths]
    with pytest.raises(VolumeTooSmallError, match=r"found when reserving") as caught:
        Volume(limits, 30 * _STRIPE, stripe_bytes=_STRIPE)
    assert caught.value.capacities[1][1] < 10 * _STRIPE


def _kept(directories: list[Path], num_stripes: int, *, is_there: bool = True) -> list[tuple[int, int]]:
    """Of each stripe of files that outlive the process: which file, and where in it."""
    volume = Volume(directories, num_stripes * _STRIPE, stripe_bytes=_STRIPE, file_name="states", is_there=is_there)
    with contextlib.closing(volume):
        return [
            (volume.file_ranges(offset, 1)[0][0], volume.locate(offset)[1])
            for offset in range(0, volume.capacity_bytes, _STRIPE)
        ]


def _lengths(directories: list[Path]) -> list[int]:
    return [next(path.glob("states-*")).stat().st_size // _STRIPE for path in directories]


def test_what_outlives_the_process_stays_where_it_is_whatever_is_free_now(
    paths: list[Path], on_drives: Callable[..., None]
) -> None:
    small, large = wanted = paths[:2]
    on_drives({small: 3 * _STRIPE, large: 100 * _STRIPE})
    before = _kept(wanted, 10, is_there=False)
    assert _lengths(wanted) == [3, 7]
    on_drives({small: 0, large: 0})
    assert _kept(wanted, 10) == before
    on_drives({small: 50 * _STRIPE, large: 93 * _STRIPE})
    assert _kept(wanted, 10) == before
    assert _kept(wanted, 5) == before, "it is not made shorter"
    longer = _kept(wanted, 16)
    assert longer[:10] == before and _lengths(wanted) == [3, 13]
    on_drives({small: 50 * _STRIPE, large: 2 * _STRIPE})
    with pytest.raises(VolumeTooSmallError, match=f"{str(small)!r} {3 * _STRIPE} .was full before."):
        _kept(wanted, 20)
    assert _kept(wanted, 16) == longer


def test_files_that_cannot_grow_keep_their_lengths(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """These tell what lies where."""
    before = _kept(paths, 12, is_there=False)
    _limit(monkeypatch, paths[2], 4 * _STRIPE)
    wanted = [Directory(path, capacity_bytes=8 * _STRIPE) for path in paths]
    with pytest.raises(VolumeTooSmallError, match="found when reserving"):
        Volume(wanted, 24 * _STRIPE, stripe_bytes=_STRIPE, file_name="states", is_there=True)
    assert _lengths(paths) == [4, 4, 4]
    longer = _kept(paths, 24)
    assert longer[:12] == before and _lengths(paths) == [10, 10, 4]


def test_files_of_a_run_that_was_killed_when_it_made_them_are_dealt_anew(paths: list[Path]) -> None:
    with (paths[0] / "states-1-of-2").open("wb") as file:
        file.truncate(20 * _STRIPE)
    _kept(paths[:2], 10, is_there=False)
    assert _lengths(paths[:2]) == [5, 5]


@pytest.mark.parametrize(("num_directories", "num_inflight"), [(1, 4), (2, 12), (3, 18)])
def test_each_file_has_threads_of_its_own_and_a_few_requests_in_hand(
    paths: list[Path], num_directories: int, num_inflight: int
) -> None:
    before = set(threading.enumerate())
    config = SwapperConfig(backend="threads", num_threads=4)
    with Swapper.open(paths[:num_directories], 8 * _MIB, config) as swapper:
        names = Counter(thread.name.rpartition("-")[0] for thread in set(threading.enumerate()) - before)
        assert sum(names.values()) == 1 + 2 * 4 * num_directories
        assert set(names.values()) == {1, 4}
        assert swapper.backend.concurrency == num_inflight
    with Swapper.open(paths[:num_directories], 8 * _MIB, SwapperConfig(backend="threads", max_inflight=5)) as swapper:
        assert [queue.limit for queue in swapper._scheduler.queues] == [min(5, num_inflight)] * 2
