"""The DeepSpeed JSON config, read once at the border.

`load_config` is all that is needed; what it returns holds plain numbers, paths and small frozen sections.

    config = load_config("zero3_nvme", overrides={"infinity.host_memory_budget": "2GB"})
    print(config.describe())
"""

from infinity.config.batch import ANY_BATCH
from infinity.config.load import ConfigSource, load_config
from infinity.config.resolved import (
    LARGEST_LOSS_SCALE,
    Decision,
    DurableSection,
    FileMonitorSection,
    FlopsProfilerSection,
    InfinityConfig,
    InfinitySection,
    IOSection,
    LossScaling,
    MonitorsSection,
    OffloadSection,
    OptimizerSection,
    SchedulerSection,
    UpdateMode,
    WandbSection,
)
from infinity.config.schema.directories import make_directories, remove_empty

__all__ = [
    "ANY_BATCH",
    "LARGEST_LOSS_SCALE",
    "ConfigSource",
    "Decision",
    "DurableSection",
    "FileMonitorSection",
    "FlopsProfilerSection",
    "IOSection",
    "InfinityConfig",
    "InfinitySection",
    "LossScaling",
    "MonitorsSection",
    "OffloadSection",
    "OptimizerSection",
    "SchedulerSection",
    "UpdateMode",
    "WandbSection",
    "load_config",
    "make_directories",
    "remove_empty",
]
