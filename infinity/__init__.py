"""Trains models that are larger than GPU and CPU memory, by paging their states to NVMe.

    engine, optimizer, loader, scheduler = infinity.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

The config is DeepSpeed's; what it has no key for stands in a block ``"infinity"``.
"""

from infinity.config import InfinityConfig, load_config
from infinity.engine import Engine
from infinity.errors import InfinityError
from infinity.gather import GatheredParameters
from infinity.initialize import initialize
from infinity.plan import Plan
from infinity.telemetry import StepReport
from infinity.version import __version__

__all__ = [
    "Engine",
    "GatheredParameters",
    "InfinityConfig",
    "InfinityError",
    "Plan",
    "StepReport",
    "__version__",
    "initialize",
    "load_config",
]
