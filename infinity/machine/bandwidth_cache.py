"""What was measured on this machine's drives, kept from run to run in one small JSON file.

The file is a help and never a condition: one that cannot be read or written costs a line in the log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from infinity.plan.machine import Bandwidth
from swapper.errors import ArgumentError
from swapper.measure.measurement import IOSetting
from swapper.volumes.publish import replacing

logger = logging.getLogger(__name__)

_FORMAT = 1
_MAX_ENTRIES = 64
_MAX_FILE_BYTES = 1 << 20
_MACHINE_ID = Path("/etc/machine-id")


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


_ENTRY = TypeAdapter(BandwidthCache)


def cache_key(directories: Sequence[Path], *more: str) -> str:
    """What a measurement holds for: this machine and its kernel, the directories in their order with the devices under them,
    and what else the measurement had to keep to, e.g. the version of this package.

    Raises:
        OSError: a directory is not there.
    """
    # A directory may be mounted over: the device is part of what was measured.
    resolved = [Path(directory).resolve() for directory in directories]
    drives = ", ".join(f"{path} on {os.stat(path).st_dev}" for path in resolved)
    return json.dumps([_machine(), drives, *more])


def measured_bandwidth(directories: Sequence[Path]) -> Bandwidth | None:
    """What the drives under these directories reached when they were last measured on this machine; None if never."""
    try:
        here = cache_key(directories).removesuffix("]")
    except (OSError, RuntimeError):  # not there, or links that lead in a circle
        return None
    found = [
        entry.bandwidth
        for key, value in _read().items()
        if key.startswith(f"{here}, ") and (entry := _entry(value)) is not None
    ]
    return max(found, key=lambda bandwidth: _seconds(bandwidth.measured_at), default=None)


def load(key: str) -> BandwidthCache | None:
    """What was stored under a key, or None."""
    value = _read().get(key)
    return None if value is None else _entry(value)


def store(key: str, measured: BandwidthCache) -> None:
    """Keep a result; what others have stored meanwhile stays."""
    try:
        path = cache_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = [(other, value) for other, value in _read().items() if other != key]
        entries = dict([*others[1 - _MAX_ENTRIES :], (key, asdict(measured))])
        with replacing(path) as file:
            file.write(json.dumps({"format": _FORMAT, "measured": entries}, indent=1).encode() + b"\n")
    except (OSError, RuntimeError) as error:
        logger.info("the measured I/O settings are not kept for the next run: %s", error)


def now() -> str:
    """Local date and time as they are stored."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _seconds(measured_at: str) -> float:
    return datetime.fromisoformat(measured_at).timestamp()


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


def _read() -> Mapping[str, Any]:
    """The entries of the file; none if there is no file or if it is not as it should be."""
    try:
        path = cache_path()
        if not path.exists():
            return {}
        if not path.is_file():
            raise ValueError("it is no regular file")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("measured"), dict):
            raise ValueError("it does not hold what it should")
        if content.get("format") != _FORMAT:
            raise ValueError(f"it has format {content.get('format')!r}, not {_FORMAT}")
    except (OSError, RuntimeError, ValueError, RecursionError) as error:
        logger.info("the file of measured I/O settings is not used: %s", error)
        return {}
    entries: dict[str, Any] = content["measured"]
    return entries


def _entry(value: Any) -> BandwidthCache | None:
    """An entry as it was stored, or None if somebody changed it into something else."""
    try:
        found = _ENTRY.validate_json(json.dumps(value), strict=True)
        found.setting.swapper_config()  # knows what a setting must be
        _seconds(found.bandwidth.measured_at)
        speeds = [speed for speed in asdict(found.bandwidth).values() if isinstance(speed, float)]
        if not all(speed > 0 and math.isfinite(speed) for speed in speeds):
            raise ValueError(f"no bandwidth: {found.bandwidth}")
    except (ArgumentError, ArithmeticError, ValueError) as error:
        logger.info("an entry in the file of measured I/O settings is not used: %s: %s", type(error).__name__, error)
        return None
    return found


def _machine() -> str:
    """This machine, as far as it can be told from others that share the file (a home directory on the network)."""
    identity = ""
    with contextlib.suppress(OSError, ValueError):
        identity = _MACHINE_ID.read_text(encoding="ascii").strip()
    return f"{identity or platform.node()}, {platform.system()} {platform.release()}"
