"""The machine that a training is planned for: this one, or one that is described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.device.host_memory import free_bytes
from infinity.planning.bandwidth_cache import Bandwidth, measured_bandwidth, now
from infinity.planning.drive_room import Room, room_bytes, together
from swapper.errors import SwapperError
from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import DriveTest
from swapper.volumes.directory import Directory

_FILE_BYTES = 32 << 20
_SETTING = IOSetting("threads", 1 << 20, num_threads=4, max_inflight=8)
_SECONDS = 0.3
_DEADLINE_SECONDS = 10.0


@dataclass(frozen=True)
class Machine:
    """What a training could have of it.

    Attributes:
        host_free_bytes: of its memory.
        drive_free_bytes: of all drives for states together; None where they know no limit.
        device_free_bytes: of a GPU; None where the CPU computes.
        bandwidth: of the drives; None if nobody knows it.
        flops_per_second: of its compute device; None if nobody knows it.
        drive_tbw: terabytes that the drives are rated to take; None if nobody knows it.
        has_its_drives: whether what is free in a directory can be looked up; else all together have `drive_free_bytes`.
    """

    host_free_bytes: int
    drive_free_bytes: int | None
    device_free_bytes: int | None
    bandwidth: Bandwidth | None = None
    flops_per_second: float | None = None
    drive_tbw: float | None = None
    has_its_drives: bool = False

    @property
    def shares_host_memory(self) -> bool:
        """Whether the CPU computes, in host memory."""
        return self.device_free_bytes is None

    @classmethod
    def here(cls, directories: Sequence[Path], *, asks_gpu: bool = True) -> Machine:
        """This machine, with states in these directories; without its GPU unless ``asks_gpu``.

        Raises:
            VolumeError: nothing can be said of a directory.
        """
        return cls(
            host_free_bytes=free_bytes(),
            drive_free_bytes=together([Room.of(Directory(path)) for path in directories]),
            device_free_bytes=torch.cuda.mem_get_info()[0] if asks_gpu and torch.cuda.is_available() else None,
            bandwidth=measured_bandwidth(directories),
            has_its_drives=True,
        )

    def room_bytes(self, directories: Sequence[Directory]) -> int | None:
        """What may lie in some directories together; None where they know no limit.

        Raises:
            VolumeError: nothing can be said of a directory.
        """
        if self.has_its_drives:
            return room_bytes(directories)
        return together([Room(each, 0, self.drive_free_bytes, 0) for each in directories])


def glance(directories: Sequence[Path]) -> Bandwidth | None:
    """What the drives do in a third of a second, of which 32 MiB on each are written; None if that cannot be found out.

    `measured_bandwidth` is better: it is what a long measurement found.
    """
    try:
        with DriveTest(
            [Directory(path) for path in directories], _FILE_BYTES, deadline_seconds=_DEADLINE_SECONDS
        ) as test:
            if not test.is_direct:
                return None
            test.prepare(max_seconds=_SECONDS)
            mixed = test.measure(_SETTING, Workload.MIXED, _SECONDS).bytes_per_second
    except SwapperError:
        return None
    return Bandwidth(mixed, mixed, mixed, now())
