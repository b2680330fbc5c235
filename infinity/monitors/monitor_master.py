"""DeepSpeed's class for monitors: called, it opens those that a config names."""

from __future__ import annotations

from infinity.config import MonitorsSection
from infinity.distributed.collectives import world
from infinity.monitors.monitors import Monitors


class MonitorMaster(Monitors):
    """``MonitorMaster(config.monitor_config)``: what ``engine.monitor`` is, where a script has it without an engine."""

    def __init__(self, monitor_config: MonitorsSection) -> None:
        """On other processes than the first it writes nothing.

        Raises:
            ConfigValueError: as `Monitors`.
        """
        super().__init__(monitor_config, is_first=world().index == 0)
