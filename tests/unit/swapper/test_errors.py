"""The tree of errors is as documented, and what cannot be copied says so."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import resource
import threading
from pathlib import Path

import pytest

from swapper import AlignedRegion, LimitError, StagingPool, Swapper
from swapper.errors import _CURES, refusal, write_cure
from swapper.sync.limits import start_threads
from tests.forked import require_in_child


def test_owners_of_files_memory_or_threads_cannot_be_copied(tmp_path: Path) -> None:
    region = AlignedRegion(1)
    with (
        Swapper.open([tmp_path], 1 << 20) as on_drive,
        Swapper.in_memory(1 << 20) as in_memory,
        StagingPool(4096, 1) as staging_pool,
        staging_pool.lease() as staging_buffer,
    ):
        extent = on_drive.allocate(1, "x")
        handle = on_drive.write(extent, bytearray(1))
        volume = on_drive.backend.volume  # type: ignore[attr-defined]
        owners = [on_drive, in_memory, staging_pool, staging_buffer, region, handle, volume, volume.files[0]]
        owners += [on_drive.backend, in_memory.backend]
        for owner in owners:
            for attempt in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy({"nested": [one]})):
                with pytest.raises(TypeError, match=f"a {type(owner).__name__} cannot be copied"):
                    attempt(owner)
        with pytest.raises(TypeError):
            copy.deepcopy(extent)
        handle.wait()
        on_drive.read(extent, bytearray(1)).wait()


@pytest.mark.parametrize("code", [*_CURES, errno.EBADF])
def test_every_error_number_comes_with_a_cure(code: int) -> None:
    words = refusal(OSError(code, os.strerror(code)))
    assert f"errno {code}, {errno.errorcode[code]}); " in words
    assert len(words.split("); ")[-1]) > 20


def test_a_transfer_that_meets_a_limit_is_told_the_limit() -> None:
    assert "ulimit -f" in refusal(OSError(errno.EFBIG, ""))


def test_no_room_for_a_threads_stack_is_a_limit_on_memory() -> None:
    def told() -> bool:
        threading.stack_size(64 << 20)  # none of the stacks that glibc keeps from ended threads
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))
        try:
            start_threads(threading.Thread(target=int))
        except LimitError as error:
            return error.limit == "memory" and "ulimit -v" in str(error)
        return False

    require_in_child(told)


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "Free space on the drive"),
        (errno.ENOENT, "Mount the drive again, or restore the directory"),
        (errno.EROFS, "Mount the drive with write access: many file systems become read-only when their drive fails"),
        (errno.EMFILE, "Raise the limit on open files of a process (ulimit -n)"),
        (errno.EINVAL, "Correct that"),
    ],
)
def test_the_cure_follows_from_what_caused_the_error(number: int, cure: str) -> None:
    try:
        try:
            raise OSError(number, "cause")
        except OSError as error:
            raise ValueError("more") from error
    except ValueError as error:
        assert write_cure(error) == cure
