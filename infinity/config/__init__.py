"""The DeepSpeed JSON config, read once, where it comes in.

`load_config` is all that is needed; what it returns (`infinity.config.resolved`) holds plain numbers, paths and small frozen
sections.

    config = load_config("zero3_nvme", overrides={"infinity.host_memory_budget": "2GB"})
    print(config.describe())
"""

from infinity.config.load import ConfigSource, load_config
from infinity.config.resolved import InfinityConfig

__all__ = ["ConfigSource", "InfinityConfig", "load_config"]
