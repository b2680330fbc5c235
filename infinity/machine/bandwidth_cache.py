"""Stores the results of `infinity profile` in one small JSON file, and gives configs without I/O settings those that were best.

A file that cannot be used is only logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from infinity.config.resolved import Decision, InfinityConfig
from infinity.plan.machine import Bandwidth
from swapper import Swapper
from swapper.config import ALIGNMENT
from swapper.errors import SwapperError
from swapper.measure.measurement import IOSetting
from swapper.volumes.publish import replacing

logger = logging.getLogger(__name__)

# A file of another format fails validation, and is measured and written anew.
_FORMAT: Literal[2] = 2
# The newest entries are kept. 1 MiB is far more than 64 entries take: a larger file is none of ours.
_MAX_ENTRIES = 64
_MAX_FILE_BYTES = 1 << 20
_MACHINE_ID = Path("/etc/machine-id")
_BUDGET_SHARE = 8
"""At most one part in so many of the host memory budget is in flight."""


@dataclass(frozen=True)
class BandwidthCache:
    """The result of one measurement.

    Attributes:
        setting: the best one.
        bandwidth: what it reaches.
        cpu_cores: processor cores that it keeps busy in the mixed workload.
    """

    setting: IOSetting
    bandwidth: Bandwidth
    cpu_cores: float


@dataclass(frozen=True)
class _File:
    measured: Mapping[str, BandwidthCache]
    format: Literal[2] = _FORMAT


_FILE = TypeAdapter(_File)


def load(directories: Sequence[Path]) -> BandwidthCache | None:
    """Return the last result for the drives under these directories, on this machine; None without one."""
    try:
        return _read().get(_key(directories))
    # Without a result the defaults hold, so no error is worth an exception here.
    except (OSError, RuntimeError):  # a directory is missing, or links lead in a circle
        return None


def measured_bandwidth(directories: Sequence[Path]) -> Bandwidth | None:
    """As `load`, the bandwidth alone."""
    found = load(directories)
    return None if found is None else found.bandwidth


def store(directories: Sequence[Path], measured: BandwidthCache) -> None:
    """Store a result. Results that other processes have stored meanwhile are kept."""
    try:
        path, key = cache_path(), _key(directories)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Read again just before writing: another process may have stored a result meanwhile. A race between the two
        # loses one entry, which is measured again.
        others = [(other, value) for other, value in _read().items() if other != key]
        # The new entry and the last 63 others.
        entries = dict([*others[1 - _MAX_ENTRIES :], (key, measured)])
        # Written beside it and renamed: readers see the old file or the new one, whole.
        with replacing(path) as file:
            file.write(_FILE.dump_json(_File(entries), indent=1) + b"\n")
    except (OSError, RuntimeError) as error:
        logger.info("the measured I/O settings cannot be stored for the next run: %s", error)


def now() -> str:
    """Return local date and time as they are stored."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def cache_path() -> Path:
    """Where results are kept: in `INFINITY_CACHE_DIR`, else in the user's directory for caches.

    Raises:
        RuntimeError: the user has no home directory.
    """
    if chosen := os.environ.get("INFINITY_CACHE_DIR"):
        return Path(chosen).expanduser() / "io.json"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "infinity" / "io.json"


def _key(directories: Sequence[Path]) -> str:
    """Return the key of a result: this machine and its kernel, and the directories in their order.

    Raises:
        OSError: a directory is missing.
    """
    identity = ""
    with contextlib.suppress(OSError, ValueError):  # tells machines apart that share a home directory
        identity = _MACHINE_ID.read_text(encoding="ascii").strip()
    machine = f"{identity or platform.node()}, {platform.system()} {platform.release()}"
    # Another drive may be mounted over a directory: its device is part of what was measured.
    resolved = [Path(directory).resolve() for directory in directories]
    return json.dumps([machine, [f"{path} on {os.stat(path).st_dev}" for path in resolved]])


def _read() -> Mapping[str, BandwidthCache]:
    """Return the entries of the file; none if it does not exist or is damaged."""
    try:
        path = cache_path()
        if not path.is_file():
            return {}
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        # Strict, because the file may be damaged or edited by hand: no text becomes a number.
        return _FILE.validate_json(path.read_bytes(), strict=True).measured
    except (OSError, RuntimeError, ValueError) as error:
        logger.info("the file of measured I/O settings is not used: %s", " ".join(str(error).split())[:200])
        return {}


def with_measured_io(config: InfinityConfig) -> InfinityConfig:
    """Return the config with the measured settings for reads and writes.

    It is unchanged if it has a setting of its own, if its drives were never measured, or if the measured settings do not work
    here.
    """
    # The optimizer's states are by far the most bytes.
    directories = config.offload_optimizer.nvme_directories or config.offload_param.nvme_directories
    # Settings in the config win. A profile measures with O_DIRECT.
    if not directories or config.io.is_from_config or not config.io.direct:
        return config
    measured = load([each.path for each in directories])
    if measured is None:
        return config
    setting, budget = measured.setting, config.infinity.host_memory_budget
    # A profile knows no budget: on a small one, requests in flight would take the memory of the staging pool.
    if budget is not None and setting.request_bytes * setting.max_inflight > budget // _BUDGET_SHARE:
        return config
    try:
        settings = setting.swapper_config()
        if setting.backend != "threads":  # a container may forbid io_uring
            # A trial with the smallest file. The profile may have run outside of the container.
            Swapper.open(list(directories), ALIGNMENT, settings).close()
    except (SwapperError, OSError) as error:
        logger.info("the settings that `infinity profile` found do not work here: %s", error)
        return config
    shown: dict[str, object] = {
        "aio.block_size": setting.request_bytes,
        "aio.queue_depth": f"{setting.max_inflight} requests in flight",
        "infinity.io_backend": setting.backend,
    }
    if setting.has_threads:
        shown["aio.intra_op_parallelism"] = setting.num_threads
    decided_by = f"measured on {measured.bandwidth.date}"
    decisions = tuple(
        Decision(each.key, shown[each.key], decided_by) if each.key in shown else each for each in config.decisions
    )
    return replace(config, io=replace(config.io, **asdict(setting)), decisions=decisions)
