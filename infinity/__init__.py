"""Trains models that are larger than GPU and CPU memory, by paging their states to NVMe.

    engine, optimizer, loader, scheduler = infinity.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

The config is DeepSpeed's; what it has no key for stands in a block ``"infinity"``.
"""

import sys
from typing import Any

from infinity import interrupted_start as interrupted_start  # the first: what follows takes seconds

# isort: split
from infinity import checkpointing, comm, deepspeed_modules, zero
from infinity.accelerator import get_accelerator
from infinity.checkpoint.full_tensors import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from infinity.config import InfinityConfig, load_config
from infinity.config.arguments import add_config_arguments
from infinity.distributed.process_groups import init_distributed
from infinity.engine.engine import Engine
from infinity.errors import InfinityError
from infinity.initialize import engine_of, initialize
from infinity.loading.init import Init
from infinity.loading.load_pretrained import load_pretrained
from infinity.optim import lr_schedules as schedules
from infinity.paging.gathered_parameters import GatheredParameters
from infinity.planning.memory_needs import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from infinity.planning.plan import Plan
from infinity.profiling.flops_profiler import get_model_profile
from infinity.telemetry import StepReport
from infinity.version import __version__

DeepSpeedEngine = Engine
"""For scripts with ``import infinity as deepspeed``."""

deepspeed_modules.install(sys.modules[__name__])


def __getattr__(name: str) -> Any:
    cure = "" if name.startswith("_") else f". {deepspeed_modules.why_absent(name)}"
    raise AttributeError(f"module 'infinity' has no attribute '{name}'{cure}")


__all__ = [
    "DeepSpeedEngine",
    "Engine",
    "GatheredParameters",
    "InfinityConfig",
    "InfinityError",
    "Init",
    "Plan",
    "StepReport",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "engine_of",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_accelerator",
    "get_model_profile",
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
    "zero",
]
