"""Findings about directories for states: the drive, its space and speed, O_DIRECT, and the backend for its bytes."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from infinity.errors import size
from infinity.machine import hardware
from infinity.machine.bandwidth_cache import measured_bandwidth
from infinity.machine.finding import Finding, bad, good, note, poor
from swapper.config import SwapperConfig
from swapper.errors import BackendUnavailableError, SwapperError, VolumeError
from swapper.measure.by_name import open_by_name
from swapper.measure.choice import Choice, choose
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import Drive, describe_drive
from swapper.volumes.volume import Volume

_TRIAL_BYTES = 256 << 20
"""On a smaller volume, backends are not compared."""
# Bytes of free space: below the first nothing can be tried, below the second there is room for 1.7B parameters at most
# (12 bytes each, see `_space`).
_LEAST_BYTES = 1 << 20
_LITTLE_BYTES = 20e9
# io_uring's registered buffers count as locked memory. 64 MiB are the most that a profile keeps in flight on a drive.
_ENOUGH_LOCKED_BYTES = 64 << 20
# Time for the threads of a backend to end.
_STOP_SECONDS = 10.0


def storage_findings(directories: Sequence[Path], *, measures: bool) -> Iterator[Finding]:
    """Yield the findings about each directory, then those about all drives.

    Args:
        directories: where states would lie.
        measures: whether backends are compared, which writes about 100 MB to a file without a name.
    """
    drives: dict[Path, Drive] = {}
    for path in directories:
        try:
            drives[path] = writable_drive(path)
        except VolumeError as error:
            cure = "Name another directory with --nvme-path, or make this one (mkdir -p)"
            yield bad("directory", str(error), cure, str(path))
            continue
        for finding in _findings(drives[path], measures=measures):
            # `_findings` speaks of one drive, and does not know under which name it was asked for.
            yield replace(finding, directory=str(path))
    names = sorted({drive.device for drive in drives.values() if drive.device is not None})
    devices = [*hardware.gpu_devices(), *filter(None, map(hardware.drive_device, names))]
    if (nodes := hardware.node_finding(devices)) is not None:
        yield nodes
    # Two partitions, or two folders, on one drive.
    if len({drive.identity for drive in drives.values()}) < len(drives):
        told = f"several of {', '.join(map(str, drives))} are on one drive: striping over them adds no speed"
        yield poor("drives", told, "Name one directory for each drive")


def _findings(drive: Drive, *, measures: bool) -> Iterator[Finding]:
    yield _drive(drive)
    if drive.device is not None:
        if (link := hardware.drive_device(drive.device)) is not None:
            # Links of GPUs slow down while idle. The speed of a drive's link counts as it is.
            yield hardware.link_finding(link, rests=False)
        if (health := hardware.health_finding(drive.device)) is not None:
            yield health
    yield _space(drive)
    yield from _files(drive, measures=measures)
    found = measured_bandwidth([drive.path])
    if found is None:
        yield note("speed", "never measured", f"infinity profile {drive.path}")
    else:
        ways = f"{size(found.read_bytes_per_second)}/s read, {size(found.write_bytes_per_second)}/s written"
        yield good("speed", f"{ways}, {size(found.mixed_bytes_per_second)}/s both ways, measured on {found.date}")


def writable_drive(path: Path) -> Drive:
    """Return the drive under a directory.

    Raises:
        VolumeError: it is not a directory, or not writable.
    """
    drive = describe_drive(path)
    if not path.is_dir():
        raise VolumeError(path, f"{path} is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        # `os.access` says no in both cases; the cures differ.
        is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        raise VolumeError.unwritable(path, "its file system is mounted read-only" if is_read_only else "no permission")
    return drive


def _drive(drive: Drive) -> Finding:
    # Without a device, this is the folder of all devices, which has neither file.
    folder = hardware.SYS / "block" / (drive.device or "")
    model = hardware.text_of(folder / "device/model")
    words = f"{drive.words()}{f', {model}' if model else ''}"
    if drive.is_tmpfs:
        cure = "Name a directory on a local SSD: files here use the memory that offloading is meant to free"
        return poor("drive", f"{words}: its files are stored in memory", cure)
    if drive.is_network:
        return poor("drive", f"{words}: a network or FUSE file system", "Name a directory on a local SSD")
    # Virtual drives and device mappers say "rotational" whatever is below them.
    is_virtual = drive.device is None or drive.device.startswith(("vd", "xvd", "dm-", "md", "loop"))
    if hardware.text_of(folder / "queue/rotational") == "1" and not is_virtual:
        return poor("drive", f"{words}: a disk that rotates", "Name a directory on an SSD, preferably NVMe")
    if drive.device is None:
        return note("drive", f"{words}: the drive below it is not visible")
    return good("drive", words)


def _space(drive: Drive) -> Finding:
    what = "free space"
    if not drive.total_bytes:
        return note(what, "the file system knows no limit")
    # With AdamW in bf16: 2 bytes of weight and 10 of remainder and states per parameter.
    room = _count(drive.free_bytes / 12)
    text = f"{size(drive.free_bytes)} of {size(drive.total_bytes)}: room for {room} parameters (AdamW, bf16)"
    if drive.free_bytes < _LEAST_BYTES:
        return bad(what, text, "Make room, or name another directory")
    if drive.free_bytes < _LITTLE_BYTES:
        return poor(what, text, "Make room, or add a directory on another drive")
    return good(what, text)


def _count(number: float) -> str:
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= factor:
            return f"{number / factor:,.1f}{letter}"
    return f"{number:,.0f}"


def _files(drive: Drive, *, measures: bool) -> Iterator[Finding]:
    # A trial must not fill the drive that it judges.
    num_bytes = _TRIAL_BYTES if measures and drive.free_bytes > 4 * _TRIAL_BYTES else _LEAST_BYTES
    try:
        with _silent():
            volume = Volume(Directory(drive.path), num_bytes)
    except SwapperError as error:
        yield bad("scratch files", str(error), "Name a directory on a local file system (ext4, xfs, btrfs)")
        return
    try:
        file = volume.files[0]
        if file.is_direct:
            yield good("O_DIRECT", "reads and writes go past the page cache")
        else:
            # Without O_DIRECT the kernel keeps a copy of all pages that go by, outside of the budget.
            text = f"refused: {file.buffered_because}; the page cache then takes memory of its own"
            yield poor("O_DIRECT", text, "Name a directory on ext4, xfs or btrfs on a local drive")
        with _silent():
            yield _backend(volume, measures=num_bytes == _TRIAL_BYTES)
    finally:
        volume.close()


def _backend(volume: Volume, *, measures: bool) -> Finding:
    # `choose` compares backends by a measurement, but needs none where io_uring is out of the question.
    if measures or not volume.is_direct or volume.is_network:
        return _finding_of(choose(volume, SwapperConfig()))
    try:  # as far as it can be told without a comparison
        open_by_name(volume, SwapperConfig(backend="uring")).close(_STOP_SECONDS)
    except BackendUnavailableError as error:
        return _finding_of(Choice.without_uring(error))
    return good("backend", "io_uring works; the engine uses it if it is faster than worker threads")


def _finding_of(choice: Choice) -> Finding:
    # "REASON; to change that, CURE", as `Choice.__str__` writes it.
    text, _, cure = str(choice).partition("; to change that, ")
    return poor("backend", text, cure) if cure else good("backend", text)


def locked_memory() -> Finding:
    """Judge how much memory may be locked: the registered buffers of io_uring are."""
    what, limit = "memory that may be locked", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return good(what, "no limit")
    # CAP_IPC_LOCK lifts the limit.
    if os.geteuid() == 0:
        return good(what, f"{size(limit)}, which does not bind root")
    if limit >= _ENOUGH_LOCKED_BYTES:
        return good(what, size(limit))
    cure = "ulimit -l unlimited (or memlock in /etc/security/limits.conf): io_uring then needs less CPU time"
    return poor(what, size(limit), cure)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence the log of Swapper inside the ``with`` block: findings say the same."""
    swappers = logging.getLogger("swapper")
    level = swappers.level
    swappers.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        swappers.setLevel(level)
