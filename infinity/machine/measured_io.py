"""Replaces the default I/O settings of a config by those that `infinity profile` found best on its drives."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace

from infinity.config.resolved import Decision, InfinityConfig
from infinity.machine.bandwidth_cache import BandwidthCache, load
from swapper import Swapper
from swapper.config import ALIGNMENT
from swapper.errors import SwapperError

logger = logging.getLogger(__name__)
_BUDGET_SHARE = 8
"""At most one part in so many of the host memory budget is in flight."""


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
    return _replaced(config, measured)


def _replaced(config: InfinityConfig, measured: BandwidthCache) -> InfinityConfig:
    setting = measured.setting
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
