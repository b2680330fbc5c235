"""Trains models that are larger than GPU and CPU memory, by paging their states to NVMe.

    engine, optimizer, loader, scheduler = infinity.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

The config is DeepSpeed's. Settings that DeepSpeed has no key for are in a block ``"infinity"``.
"""

import sys
from typing import TYPE_CHECKING, Any

from infinity.errors import InfinityError
from infinity.version import __version__
from swapper.lazy_names import lazy_names

# The drives' backends need Linux. Checked here, so that the message is about Linux and not about a missing module.
if sys.platform != "linux":
    raise ImportError(
        f"infinity needs Linux, and this is {sys.platform}. Use a Linux machine, a container, or WSL 2 on Windows"
    )

# The public names and the modules they come from. `lazy_names` reads this block from the source: each name is imported
# at its first use, so `import infinity` loads neither torch nor the engine.
if TYPE_CHECKING:
    from infinity.checkpoint.full_tensors import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
    )
    from infinity.config import InfinityConfig, load_config
    from infinity.distributed.process_groups import init_distributed
    from infinity.engine.engine import Engine
    from infinity.entry import engine_of, initialize
    from infinity.loading.init import Init
    from infinity.loading.load_pretrained import load_pretrained
    from infinity.loop.gathered_parameters import GatheredParameters
    from infinity.metrics import StepReport
    from infinity.optim import lr_schedules as schedules
    from infinity.plan.plan import Plan

# Adding a public name means: one line in the block above, and one in `__all__`.
_lazy_name, __dir__ = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    try:
        return _lazy_name(name)
    except AttributeError as error:
        cure = "DeepSpeed's names are in infinity.deepspeed: import infinity.deepspeed as deepspeed"
        raise AttributeError(f"{error}. {cure}", name=name) from None


__all__ = [
    "Engine",
    "GatheredParameters",
    "InfinityConfig",
    "InfinityError",
    "Init",
    "Plan",
    "StepReport",
    "__version__",
    "engine_of",
    "init_distributed",
    "initialize",
    "load_config",
    "load_pretrained",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "schedules",
]
