"""Describes this machine for plans: free memory, room on its drives, and their speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from infinity.config import InfinityConfig
from infinity.config.schema.directories import existing
from infinity.device.host_memory import free_bytes, is_unified
from infinity.machine.bandwidth_cache import measured_bandwidth, now
from infinity.plan.machine import Bandwidth, Machine, Room, together
from swapper.errors import SwapperError
from swapper.measure.speeds import glance as rate_at_a_glance
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import describe_drive
from swapper.volumes.run_directory import bytes_of_run

# For `infinity plan` without a profile: short, because it should answer at once.
_SECONDS = 0.3


def this_machine(directories: Sequence[Path], *, asks_gpu: bool = True) -> Machine:
    """Describe this machine, with states in these directories; without its GPU unless ``asks_gpu``.

    Raises:
        VolumeError: a directory cannot be examined.
    """
    free, on_gpu = free_bytes(), None
    if asks_gpu and torch.cuda.is_available():
        on_gpu = torch.cuda.mem_get_info()[0]
        if is_unified():
            # One pool of memory serves both sides. Counted twice, a plan would promise it twice.
            free = on_gpu = free // 2
    return Machine(
        host_free_bytes=free,
        drive_free_bytes=room_bytes([Directory(path) for path in directories]),
        device_free_bytes=on_gpu,
        bandwidth=measured_bandwidth(directories),
    )


def room_bytes(directories: Sequence[Directory]) -> int | None:
    """Return the space that directories have together, including the files of a resumed run; None: no limit.

    Raises:
        VolumeError: a directory cannot be examined.
    """
    return together([_room(each) for each in directories])


def _room(directory: Directory) -> Room:
    drive = describe_drive(existing(directory.path.absolute()))
    # A file system that says 0 bytes has no limit.
    free = drive.free_bytes if drive.total_bytes else None
    # A resumed run writes over its own files, so their bytes count as room.
    return Room(directory, drive.device_number, free, bytes_of_run(directory.path))


def bandwidth_of(config: InfinityConfig) -> Bandwidth | None:
    """Return the measured bandwidth of a config's drives; None if one was never measured.

    Drives of weights and drives of states work in parallel, so their rates add up.
    """
    sections = (config.offload_param, config.offload_optimizer)
    found = [measured_bandwidth(paths) for paths in {s.nvme_paths: None for s in sections if s.device == "nvme"}]
    known = [bandwidth for bandwidth in found if bandwidth is not None]
    # With one set of drives unknown, a sum would be too low.
    if not known or len(known) < len(found):
        return None
    return Bandwidth(
        sum(bandwidth.read_bytes_per_second for bandwidth in known),
        sum(bandwidth.write_bytes_per_second for bandwidth in known),
        sum(bandwidth.mixed_bytes_per_second for bandwidth in known),
        # The older date: the sum is no newer than its oldest part.
        min(bandwidth.measured_at for bandwidth in known),
    )


def glance(directories: Sequence[Path]) -> Bandwidth | None:
    """Measure drives quickly, for a third of a second with 32 MiB written on each; None if that fails.

    `measured_bandwidth` is more accurate: it comes from the long measurement of `infinity profile`.
    """
    try:
        mixed = rate_at_a_glance([Directory(path) for path in directories], _SECONDS)
    except SwapperError:
        return None
    return None if mixed is None else Bandwidth(mixed, mixed, mixed, now())
