"""Several drives: their bandwidth adds up, and one that fails or hangs is named and holds nobody up who has no need of
it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from swapper import Extent, Priority, Swapper, SwapperConfig, TransferError, Volume, describe_drive
from tests.internals import Cgroup

_MIB = 1 << 20
_REQUEST = 128 << 10
_TIMEOUT_SECONDS = 20.0
_FS_IOC_SHUTDOWN = 0x8004587D


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in "ab"]
    for path in found:
        path.mkdir()
    return found


def _volume(swapper: Swapper) -> Volume:
    volume: Volume = swapper.backend.volume  # type: ignore[attr-defined]
    return volume


def _offsets_on(swapper: Swapper, extent: Extent, column: int) -> list[int]:
    """Where in the extent the pieces begin that lie on one drive."""
    volume = _volume(swapper)
    return [
        offset
        for offset in range(0, extent.num_bytes, volume.stripe_bytes)
        if volume.file_ranges(extent.start + offset, 1)[0][0] == column
    ]


def test_a_hung_drive_leaves_the_threads_of_the_others_alone(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SwapperConfig(request_bytes=_REQUEST, backend="threads", num_threads=2, deadline_seconds=60.0)
    may_go = threading.Event()
    with Swapper.open(paths, 32 * _REQUEST, config) as swapper:
        extent = swapper.allocate(32 * _REQUEST, "unit")
        swapper.write(extent, np.ones(32 * _REQUEST, dtype=np.uint8)).wait()
        hung_fd, real = _volume(swapper).files[1].fd, os.preadv

        def hanging(fd: int, memory: tuple[memoryview], offset: int) -> int:
            if fd == hung_fd:
                may_go.wait(_TIMEOUT_SECONDS)
            return real(fd, memory, offset)

        monkeypatch.setattr(os, "preadv", hanging)
        memory = np.zeros(_REQUEST, dtype=np.uint8)
        hung = [
            swapper.read(extent, np.zeros(_REQUEST, dtype=np.uint8), offset=offset, priority=Priority.PREFETCH)
            for offset in _offsets_on(swapper, extent, 1)[:3]  # more than there are threads
        ]
        for offset in _offsets_on(swapper, extent, 0):
            memory[:] = 0
            swapper.read(extent, memory, offset=offset).wait(_TIMEOUT_SECONDS)
            assert (memory == 1).all()
        assert not any(handle.done() for handle in hung)
        may_go.set()
        for handle in hung:
            handle.wait()


# -- real block devices ------------------------------------------------------------------------------------------------


@pytest.fixture
def loop_drive(tmp_path: Path, small_tmpfs: Callable[[int], Path]) -> Iterator[Callable[..., Path]]:
    """A function that makes a block device of so many bytes, with a file system on it, and returns where it is mounted."""
    if shutil.which("losetup") is None:
        pytest.skip("losetup is not installed")
    mounted: list[tuple[str, Path]] = []

    def run(*command: str) -> str:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            pytest.skip(f"no loop device here: {' '.join(command)}: {answer.stderr.strip()}")
        return answer.stdout.strip()

    def make(num_bytes: int, kind: str = "ext4") -> Path:
        if shutil.which(f"mkfs.{kind}") is None:
            pytest.skip(f"mkfs.{kind} is not installed")
        image = small_tmpfs(num_bytes + _MIB) / "image"
        with open(image, "wb") as file:
            file.truncate(num_bytes)
        device = run("losetup", "--find", "--show", str(image))
        point = tmp_path / f"drive_{len(mounted)}"
        point.mkdir()
        mounted.append((device, point))
        run(
            f"mkfs.{kind}",
            "-q",
            *(["-O", "^has_journal", "-E", "lazy_itable_init=0"] if kind == "ext4" else []),
            device,
        )
        run("mount", device, str(point))
        return point

    yield make
    for device, point in mounted:
        subprocess.run(["umount", "--lazy", str(point)], capture_output=True, check=False)
        subprocess.run(["losetup", "--detach", device], capture_output=True, check=False)


@pytest.mark.root
@pytest.mark.parametrize("name", ["read", "write"])
def test_a_drive_that_fails_is_named(loop_drive: Callable[[int], Path], name: str) -> None:
    good, bad = loop_drive(24 * _MIB), loop_drive(24 * _MIB)
    device = describe_drive(bad).device
    assert device.startswith("loop")
    config = SwapperConfig(request_bytes=_REQUEST, backend="threads", deadline_seconds=60.0)
    swapper = Swapper.open([good, bad], 8 * _MIB, config)
    extent = swapper.allocate(8 * _MIB, "layer 3")
    memory = np.ones(8 * _MIB, dtype=np.uint8)
    swapper.write(extent, memory).wait()
    fd = os.open(bad, os.O_RDONLY)
    fcntl.ioctl(fd, _FS_IOC_SHUTDOWN, struct.pack("I", 2))  # from now on, ext4 answers EIO
    os.close(fd)
    started = time.monotonic()
    with pytest.raises(TransferError) as caught:
        getattr(swapper, name)(extent, memory).wait()
    assert caught.value.errno == errno.EIO
    assert caught.value.file == f"the scratch file in {str(bad)!r} on {device} (ext4)"
    for part in (name, device, str(bad), "'layer 3'", "EIO", "hardware error"):
        assert part in str(caught.value)
    if name == "read":  # the other drive still gives what it has
        for offset in _offsets_on(swapper, extent, 0):
            swapper.read(extent, memory, offset=offset, num_bytes=_REQUEST).wait()
    swapper.close()
    assert time.monotonic() - started < _TIMEOUT_SECONDS


@pytest.mark.root
def test_a_drive_that_has_promised_more_than_it_has_is_named(loop_drive: Callable[[int], Path]) -> None:
    """Thin provisioning: no reservation of a file helps against it."""
    directory = loop_drive(24 * _MIB)
    device = describe_drive(directory).device
    image = Path(Path(f"/sys/block/{device}/loop/backing_file").read_text().strip())
    swapper = Swapper.open([directory], 8 * _MIB, SwapperConfig(request_bytes=_REQUEST, backend="threads"))
    with open(image.with_name("others"), "wb") as others, pytest.raises(OSError, match="No space left"):
        others.write(bytes(32 * _MIB))
        others.flush()
    extent = swapper.allocate(8 * _MIB, "layer 3")
    with pytest.raises(TransferError, match=rf"on {device} \(ext4\) .* failed: .*(EIO|ENOSPC)"):
        swapper.write(extent, np.ones(8 * _MIB, dtype=np.uint8)).wait()
    swapper.close()


@pytest.mark.root
def test_rewriting_needs_no_space_where_writing_makes_copies(loop_drive: Callable[..., Path]) -> None:
    directory = loop_drive(160 * _MIB, "btrfs")
    data = np.random.default_rng(0).integers(0, 256, 48 * _MIB, dtype=np.uint8)
    with Swapper.open([directory], data.size, SwapperConfig(backend="threads")) as swapper:
        extent = swapper.allocate(data.size, "unit")
        with open(directory / "others", "wb") as others, pytest.raises(OSError, match="No space left"):
            while True:
                others.write(bytes(_MIB))
        for _ in range(3):
            swapper.write(extent, data).wait()
        copy = np.empty_like(data)
        swapper.read(extent, copy).wait()
        assert np.array_equal(copy, data)


_STALLING = """
import json, sys, threading, time
from pathlib import Path
import numpy as np
from tests.internals import set_bandwidth
from swapper import StallError, Swapper, SwapperConfig

directories, group, device, backend = json.loads({arguments!r})
memory = np.ones(8 << 20, dtype=np.uint8)
before = set(threading.enumerate())
swapper = Swapper.open(directories, 8 << 20, SwapperConfig(request_bytes=128 << 10, backend=backend, deadline_seconds=3.0))
extent = swapper.allocate(8 << 20, "layer 3")
swapper.write(extent, memory).wait()
set_bandwidth(Path(group), device, read=1, write=None)
started = time.monotonic()
try:
    swapper.read(extent, memory).wait()
    error = None
except StallError as stall:
    error = stall
waited = time.monotonic() - started
swapper.close()
closed = time.monotonic() - started - waited
set_bandwidth(Path(group), device, read=None, write=None)
for thread in set(threading.enumerate()) - before:
    thread.join(60)
print(json.dumps((str(error), waited, closed, threading.active_count())))
"""


@pytest.mark.deep
@pytest.mark.root
@pytest.mark.parametrize("backend", ["threads", "uring"])
def test_a_drive_that_stalls_is_named_and_left_behind(
    loop_drive: Callable[[int], Path],
    blkio_cgroup: Cgroup,
    run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]],
    backend: str,
) -> None:
    """The kernel itself holds the transfers back: threads sit in system calls that nothing ends."""
    if backend == "uring":
        pytest.importorskip("liburing", reason="io_uring needs the liburing package")
    good, bad = loop_drive(24 * _MIB), loop_drive(24 * _MIB)
    number = os.stat(bad).st_dev
    group = blkio_cgroup.task_files[0].parent
    device = f"{os.major(number)}:{os.minor(number)}"
    arguments = json.dumps([[str(good), str(bad)], str(group), device, backend])
    answer = run_in_cgroup(blkio_cgroup, _STALLING.format(arguments=arguments))
    assert answer.returncode == 0, answer.stderr
    message, waited, closed, num_threads = json.loads(answer.stdout)
    assert str(bad) in message, message
    assert f"on {describe_drive(bad).device} (ext4)" in message
    assert "saw no answer within 3 seconds" in message
    assert (
        waited > 7 / 8 * 3
    )  # that it is not more than 3: tests/unit/swapper/scheduling/test_stalls.py, without a clock
    assert max(waited, closed) < 60
    assert num_threads == 1, "a thread was left behind"


_ADDING_UP = """
import json, time
import numpy as np
from swapper import Swapper, SwapperConfig

config = SwapperConfig(request_bytes=256 << 10, backend="threads")
with Swapper.open(json.loads({arguments!r}), 66 << 20, config) as swapper:
    extent = swapper.allocate(8 << 20, "unit")
    memory = np.ones(8 << 20, dtype=np.uint8)
    swapper.write(extent, memory).wait()
    started = time.monotonic()
    for _ in range(4):
        swapper.write(extent, memory).wait()
        swapper.read(extent, memory).wait()
    rate = 8 * memory.size / (time.monotonic() - started)
    print(json.dumps([rate, [file.num_bytes for file in swapper.backend.volume.files]]))
"""


@pytest.mark.deep
@pytest.mark.root
def test_drives_of_unequal_speed_are_measured_and_add_up(
    loop_drive: Callable[[int], Path],
    blkio_cgroup: Cgroup,
    run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    directories = [loop_drive(96 * _MIB), loop_drive(96 * _MIB)]
    limits = (12_000_000, 4_000_000)  # which take little of a processor
    for directory, bytes_per_second in zip(directories, limits, strict=True):
        blkio_cgroup.throttle(directory, bytes_per_second)
    results = []
    for _ in range(8):  # a machine that is busy otherwise may be late
        code = _ADDING_UP.format(arguments=json.dumps([str(directory) for directory in directories]))
        answer = run_in_cgroup(blkio_cgroup, code)
        assert answer.returncode == 0, answer.stderr
        rate, num_bytes = json.loads(answer.stdout)
        share, ratio = rate / sum(limits), num_bytes[0] / num_bytes[1]
        results.append((share, ratio))
        if share >= 0.7 and 2 < ratio < 4.5:  # one half, and 1, if the drives were taken for equal
            return
    pytest.fail(f"share of both limits, ratio of the bytes: {results}")
