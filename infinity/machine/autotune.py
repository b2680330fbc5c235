"""`infinity.autotune_io`: settings for reads and writes, found by measuring the drives instead of guessing.

What the config fixes is fixed for every candidate. All of it ends after about six seconds.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from infinity.config.resolved import Decision, InfinityConfig, IOSection
from infinity.device.host_memory import free_bytes
from infinity.machine.bandwidth_cache import BandwidthCache, cache_key, load, store
from infinity.machine.drive_profile import (
    AT_START,
    MOST_INFLIGHT_BYTES,
    DriveProfile,
    candidates,
    drive_test,
    suitable_backends,
    sweep,
)
from infinity.version import __version__
from swapper import BackendUnavailableError, Swapper
from swapper.config import ALIGNMENT
from swapper.measure.io_setting import IOSetting
from swapper.volumes.directory import Directory

logger = logging.getLogger(__name__)

_BUDGET_SHARE = 8  # of the host memory budget no more than this part is in flight


def tune_io(config: InfinityConfig) -> InfinityConfig:
    """The config with measured I/O settings, if it asks for them or `infinity profile` has some; as it is if it cannot have any.

    Args:
        config: what the user asked for; values given there stay.
    """
    io = config.io
    # The optimizer's states are by far the most bytes.
    directories = config.offload_optimizer.nvme_directories or config.offload_param.nvme_directories
    if io.autotune == "off":
        known = _profiled(config, directories)
        return config if known is None else _apply(config, known)
    if not directories:
        logger.info("infinity.autotune_io: no states rest on NVMe, so there is nothing to measure")
        return config
    try:
        memory = _most_inflight(config.infinity.host_memory_budget, len(directories))
        key = _key(directories, io, memory)
        measured = load(key) if io.autotune == "once" else None
        if measured is not None and _still_works(measured.setting, directories, io):
            logger.info(
                "infinity.autotune_io: as measured on %s: %s", measured.bandwidth.date, measured.setting.describe()
            )
        else:
            measured = _measured(directories, io, memory)
            store(key, measured)
    except Exception as error:
        # Settings are a matter of speed: whatever is wrong with the drives, training itself will say.
        logger.warning("infinity.autotune_io: the drives were not measured, so defaults are used: %s", error)
        return config
    return _apply(config, measured)


def _profiled(config: InfinityConfig, directories: Sequence[Directory]) -> BandwidthCache | None:
    """What `infinity profile` has found on these drives, if the memory budget has room for it."""
    if not directories:
        return None
    try:
        measured = load(_key(directories, config.io, _most_inflight(None, len(directories))))
        if measured is None or not _still_works(measured.setting, directories, config.io):
            return None
    except Exception as error:  # whatever is wrong with the drives, training itself will say
        logger.info("what was measured on the drives cannot be used: %s", error)
        return None
    setting, most = measured.setting, _most_inflight(config.infinity.host_memory_budget, len(directories))
    return measured if setting.request_bytes * setting.max_inflight <= most else None


def _asked(io: IOSection) -> str:
    """What the candidates depend on, so that a stored result is not used where others would have been tried."""
    given = ", ".join(f"{name}={getattr(io, name)}" for name in sorted(io.given))
    has_uring = importlib.util.find_spec("liburing") is not None
    return f"given: {given}; direct={io.direct}; uring={has_uring}"


def keep(measured: BandwidthCache, directories: Sequence[Directory], io: IOSection) -> None:
    """Store what a longer measurement has found, for configs with these I/O settings and no memory budget that limits it."""
    store(_key(directories, io, _most_inflight(None, len(directories))), measured)


def _key(directories: Sequence[Directory], io: IOSection, memory: int) -> str:
    return cache_key([directory.path for directory in directories], __version__, f"{_asked(io)}; memory={memory}")


def _most_inflight(budget: int | None, num_drives: int) -> int:
    most = MOST_INFLIGHT_BYTES * num_drives
    return most if budget is None else min(most, budget // _BUDGET_SHARE)


def _still_works(setting: IOSetting, directories: Sequence[Directory], io: IOSection) -> bool:
    """Whether the backend of a stored result can be used in this process: a container may forbid io_uring."""
    if setting.backend == "threads":
        return True
    try:
        Swapper.open(list(directories), ALIGNMENT, setting.swapper_config(direct=io.direct)).close()
    except BackendUnavailableError as error:
        logger.info("what was measured on this machine before does not work now: %s", error)
        return False
    return True


def _measured(directories: Sequence[Directory], io: IOSection, most_bytes_inflight: int) -> BandwidthCache:
    """The best setting.

    Raises:
        RuntimeError: there is too little space, or no candidate works.
        SwapperError: the drives fail.
    """
    started, found = time.monotonic(), DriveProfile(list(directories))
    names = ", ".join(str(directory.path) for directory in directories)
    logger.info("infinity.autotune_io: measuring %s for about %.0f seconds", names, AT_START.seconds)
    memory = min(most_bytes_inflight, free_bytes() // _BUDGET_SHARE)
    with drive_test(found, AT_START, io) as test:
        sweep(test, found, AT_START, candidates(io, suitable_backends(directories), memory, len(directories)))
    best = found.advice()
    if best is None:
        raise RuntimeError("no setting that a config can express works here")
    speed = best.bandwidth
    logger.info(
        "infinity.autotune_io: %s is best: %.2f GB/s in the mix of an optimizer step (read %.2f, write %.2f GB/s alone; "
        "%.2f cores), after %.1f s",
        best.setting.describe(),
        speed.mixed_bytes_per_second / 1e9,
        speed.read_bytes_per_second / 1e9,
        speed.write_bytes_per_second / 1e9,
        best.cpu_cores,
        time.monotonic() - started,
    )
    return best


def _apply(config: InfinityConfig, measured: BandwidthCache) -> InfinityConfig:
    """The config with the measured values in place of those that nobody gave."""
    setting, io = measured.setting, config.io
    keys: dict[str, tuple[str, object]] = {
        "request_bytes": ("aio.block_size", setting.request_bytes),
        "num_threads": ("aio.intra_op_parallelism", setting.num_threads),
        "max_inflight": ("aio.queue_depth", f"{setting.max_inflight} requests in flight"),
        "backend": ("infinity.io_backend", setting.backend),
    }
    decided_by = f"measured on {measured.bandwidth.date}"
    unseen = io.given if setting.has_threads else io.given | {"num_threads"}
    shown = {key: Decision(key, words, decided_by) for name, (key, words) in keys.items() if name not in unseen}
    decisions = tuple(shown.get(decision.key, decision) for decision in config.decisions)
    kept = [key for name, (key, _) in keys.items() if name in io.given]
    if kept:
        logger.info("infinity.autotune_io: %s %s as the config says", ", ".join(kept), "stay" if kept[1:] else "stays")
    return replace(config, io=replace(io, **asdict(setting)), decisions=decisions)
