"""A directory for states: whether it can be used, what lies under it, and which backend would move its bytes."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from infinity.machine.bandwidth_cache import measured_bandwidth
from infinity.machine.finding import Finding, Verdict, size
from infinity.machine.hardware import drive_device, gpu_devices, health_finding, link_finding, node_findings
from swapper.config import SwapperConfig
from swapper.errors import BackendUnavailableError, SwapperError, VolumeError
from swapper.measure.by_name import open_by_name
from swapper.measure.choice import Choice, choose
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import Drive, describe_drive
from swapper.volumes.volume import Volume

_TRIAL_BYTES = 256 << 20
"""On a smaller volume, backends are not compared."""
_LEAST_BYTES = 1 << 20
_LITTLE_BYTES = 20e9
_ENOUGH_LOCKED_BYTES = 64 << 20
_STOP_SECONDS = 10.0
_BLOCK_DEVICES = Path("/sys/block")


def storage_findings(directories: Sequence[Path], *, measures: bool) -> Iterator[Finding]:
    """Each directory by itself.

    Args:
        directories: where states would lie.
        measures: whether backends are compared, which writes about 100 MB to a file without a name.
    """
    drives: dict[Path, Drive] = {}
    for path in directories:
        try:
            drives[path] = writable_drive(path)
        except VolumeError as error:
            cure = "Name another one with --nvme-path, or make it"
            yield Finding("directory", Verdict.BAD, str(error), cure, directory=str(path))
            continue
        for finding in _findings(drives[path], measures=measures):
            yield replace(finding, directory=str(path))
    devices = {drive.device for drive in drives.values() if drive.device is not None}
    yield from node_findings(
        gpu_devices(), [found for each in sorted(devices) if (found := drive_device(each)) is not None]
    )
    if len({drive.identity for drive in drives.values()}) < len(drives):
        names = ", ".join(map(str, drives))
        told = f"several of {names} lie on one drive: striping over them adds no speed"
        yield Finding("drives", Verdict.POOR, told, "Name one directory for each drive")


def _findings(drive: Drive, *, measures: bool) -> Iterator[Finding]:
    yield _drive(drive)
    if drive.device is not None:
        if (link := drive_device(drive.device)) is not None:
            yield link_finding(link, rests=False)
        if (health := health_finding(drive.device)) is not None:
            yield health
    yield _space(drive)
    yield from _files(drive, measures=measures)
    yield _speed(drive)


def writable_drive(path: Path) -> Drive:
    """What is under a directory.

    Raises:
        VolumeError: it is none that can be written to.
    """
    drive = describe_drive(path)
    if not path.is_dir():
        raise VolumeError(path, f"{path} is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        raise VolumeError.unwritable(path, "its file system is mounted read-only" if is_read_only else "no permission")
    return drive


def _drive(drive: Drive) -> Finding:
    what = "drive"
    facts = {"file_system": drive.file_system, "device": drive.device, "is_network": drive.is_network}
    model = _read(drive, "device/model")
    words = f"{drive.words()}{f', {model}' if model else ''}"
    if drive.is_tmpfs:
        cure = "Name a directory on a local SSD: what is written here takes the memory that it is to save"
        return Finding(what, Verdict.POOR, f"{words}: files lie in memory", cure, facts)
    if drive.is_network:
        return Finding(
            what, Verdict.POOR, f"{words}: a network or FUSE file system", "Name a directory on a local SSD", facts
        )
    is_virtual = drive.device is None or drive.device.startswith(("vd", "xvd", "dm-", "md", "loop"))
    if _read(drive, "queue/rotational") == "1" and not is_virtual:
        return Finding(
            what, Verdict.POOR, f"{words}: a disk that rotates", "Name a directory on an SSD, best NVMe", facts
        )
    if drive.device is None:
        return Finding(what, Verdict.NOTE, f"{words}: no drive of its own is seen below it", "", facts)
    return Finding(what, Verdict.GOOD, words, "", facts)


def _read(drive: Drive, name: str) -> str:
    if drive.device is None:
        return ""
    try:
        return (_BLOCK_DEVICES / drive.device / name).read_text().strip()
    except OSError:
        return ""


def _space(drive: Drive) -> Finding:
    what = "free space"
    facts = {"free_bytes": drive.free_bytes, "total_bytes": drive.total_bytes}
    if not drive.total_bytes:
        return Finding(what, Verdict.NOTE, "the file system knows no limit", "", facts)
    # With AdamW in bf16: 2 bytes of weight and 10 of remainder and states per parameter.
    room = _count(drive.free_bytes / 12)
    text = f"{size(drive.free_bytes)} of {size(drive.total_bytes)}: room for {room} parameters (AdamW, bf16)"
    if drive.free_bytes < _LEAST_BYTES:
        return Finding(what, Verdict.BAD, text, "Make room, or name another directory", facts)
    if drive.free_bytes < _LITTLE_BYTES:
        return Finding(what, Verdict.POOR, text, "Make room, or add a directory on another drive", facts)
    return Finding(what, Verdict.GOOD, text, "", facts)


def _count(number: float) -> str:
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= factor:
            return f"{number / factor:,.1f}{letter}"
    return f"{number:,.0f}"


def _files(drive: Drive, *, measures: bool) -> Iterator[Finding]:
    num_bytes = _TRIAL_BYTES if measures and drive.free_bytes > 4 * _TRIAL_BYTES else _LEAST_BYTES
    heard = _Silence()
    try:
        with heard:
            volume = Volume(Directory(drive.path), num_bytes)
    except SwapperError as error:
        cure = "Name a directory on a local file system (ext4, xfs, btrfs)"
        yield Finding("scratch files", Verdict.BAD, str(error), cure)
        return
    try:
        file = volume.files[0]
        facts = {"is_direct": file.is_direct}
        if file.is_direct:
            text = "reads and writes go past the page cache"
            yield Finding("O_DIRECT", Verdict.GOOD, text, "", facts)
        else:
            text = f"refused: {file.buffered_because}; the page cache then takes memory of its own"
            cure = "Name a directory on ext4, xfs or btrfs on a local drive"
            yield Finding("O_DIRECT", Verdict.POOR, text, cure, facts)
        with heard:
            yield _backend(volume, measures=num_bytes == _TRIAL_BYTES)
    finally:
        volume.close()


def _backend(volume: Volume, *, measures: bool) -> Finding:
    if not measures and volume.is_direct and not volume.is_network:
        return _untried(volume)
    return _of(choose(volume, SwapperConfig()))


def _of(choice: Choice) -> Finding:
    text, _, cure = str(choice).partition("; to change that, ")
    facts = {"backend": choice.backend, "reason": choice.reason}
    return Finding("backend", Verdict.POOR if cure else Verdict.GOOD, text, cure, facts)


def _untried(volume: Volume) -> Finding:
    """As far as it can be told without a comparison."""
    try:
        open_by_name(volume, SwapperConfig(backend="uring")).close(_STOP_SECONDS)
    except BackendUnavailableError as error:
        return _of(Choice.without_uring(error))
    text = "io_uring works; a run takes it where it is faster than worker threads"
    return Finding("backend", Verdict.GOOD, text, "", {"backend": "auto", "reason": text})


def _speed(drive: Drive) -> Finding:
    what = "speed"
    found = measured_bandwidth([drive.path])
    if found is None:
        return Finding(what, Verdict.NOTE, "never measured", f"infinity profile {drive.path}")
    read, written, mixed = found.read_bytes_per_second, found.write_bytes_per_second, found.mixed_bytes_per_second
    text = f"{size(read)}/s read, {size(written)}/s written, {size(mixed)}/s both ways, measured on {found.date}"
    return Finding(what, Verdict.GOOD, text, "", {"read": read, "written": written, "mixed": mixed})


def locked_memory() -> Finding:
    """How much memory may be locked, which io_uring's registered memory needs."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_enough = limit == resource.RLIM_INFINITY or limit >= _ENOUGH_LOCKED_BYTES or os.geteuid() == 0
    words = "no limit" if limit == resource.RLIM_INFINITY else size(limit)
    if limit != resource.RLIM_INFINITY and os.geteuid() == 0:
        words += ", which does not bind root"
    cure = (
        ""
        if is_enough
        else "ulimit -l unlimited (or memlock in /etc/security/limits.conf): io_uring then needs less CPU time"
    )
    verdict = Verdict.GOOD if is_enough else Verdict.POOR
    return Finding("memory that may be locked", verdict, words, cure, {"limit_bytes": limit})


class _Silence:
    """Keeps what swapper logs to itself: findings say the same."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("swapper")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL + 1)

    def __exit__(self, *about: object) -> None:
        self._logger.setLevel(self._level)
