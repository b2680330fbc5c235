"""DeepSpeed's class for configs: called, it loads one."""

from __future__ import annotations

from typing import Any

from infinity.config import ConfigSource, InfinityConfig, load_config


class _Loading(type):
    def __call__(cls, config: ConfigSource, mpu: Any = None, mesh_device: Any = None) -> InfinityConfig:
        return load_config(config)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, InfinityConfig)


class DeepSpeedConfig(metaclass=_Loading):
    """``DeepSpeedConfig(config)``, with a path or a dict, is `infinity.load_config`; every `InfinityConfig` is one of these."""
