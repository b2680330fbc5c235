"""Trains models that are larger than GPU and CPU memory, by paging their states to NVMe.

    engine, optimizer, loader, scheduler = infinity.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

The config is DeepSpeed's; what it has no key for stands in a block ``"infinity"``.
"""

import sys
from typing import TYPE_CHECKING, Any

from infinity.deepspeed_path import PATH
from infinity.errors import InfinityError
from infinity.version import __version__
from swapper.lazy_names import lazy_names

if sys.platform != "linux":
    raise ImportError(
        f"infinity needs Linux, and this is {sys.platform}. Use a Linux machine, a container, or WSL 2 on Windows"
    )

if TYPE_CHECKING:
    from infinity import checkpointing, comm, zero
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
    from infinity.entry import engine_of, initialize
    from infinity.loading.init import Init
    from infinity.loading.load_pretrained import load_pretrained
    from infinity.optim import lr_schedules as schedules
    from infinity.paging.gathered_parameters import GatheredParameters
    from infinity.plan.memory_needs import (
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from infinity.plan.plan import Plan
    from infinity.profiling.flops_profiler import get_model_profile
    from infinity.telemetry import StepReport

    DeepSpeedEngine = Engine
    """For scripts with ``import infinity as deepspeed``."""

__path__.append(PATH)  # for modules by DeepSpeed's names
_lazy_name, __dir__ = lazy_names(
    __name__,
    {
        "DeepSpeedEngine": "infinity.engine.engine",
        "Engine": "infinity.engine.engine",
        "GatheredParameters": "infinity.paging.gathered_parameters",
        "InfinityConfig": "infinity.config",
        "Init": "infinity.loading.init",
        "Plan": "infinity.plan.plan",
        "StepReport": "infinity.telemetry",
        "add_config_arguments": "infinity.config.arguments",
        "engine_of": "infinity.entry",
        "estimate_zero2_model_states_mem_needs_all_cold": "infinity.plan.memory_needs",
        "estimate_zero2_model_states_mem_needs_all_live": "infinity.plan.memory_needs",
        "estimate_zero3_model_states_mem_needs_all_cold": "infinity.plan.memory_needs",
        "estimate_zero3_model_states_mem_needs_all_live": "infinity.plan.memory_needs",
        "get_accelerator": "infinity.accelerator",
        "get_model_profile": "infinity.profiling.flops_profiler",
        "init_distributed": "infinity.distributed.process_groups",
        "initialize": "infinity.entry",
        "load_config": "infinity.config",
        "load_pretrained": "infinity.loading.load_pretrained",
        "safe_get_full_fp32_param": "infinity.checkpoint.full_tensors",
        "safe_get_full_grad": "infinity.checkpoint.full_tensors",
        "safe_get_full_optimizer_state": "infinity.checkpoint.full_tensors",
        "safe_set_full_fp32_param": "infinity.checkpoint.full_tensors",
        "safe_set_full_grad": "infinity.checkpoint.full_tensors",
        "safe_set_full_optimizer_state": "infinity.checkpoint.full_tensors",
        "schedules": "infinity.optim.lr_schedules:",
    },
)


def __getattr__(name: str) -> Any:
    try:
        return _lazy_name(name)
    except AttributeError:
        if name.startswith("_"):
            raise
    from infinity import deepspeed_modules  # the import adds DeepSpeed's names to this module

    if name in globals():
        return globals()[name]
    raise AttributeError(f"module 'infinity' has no attribute '{name}'. {deepspeed_modules.why_absent(name)}")


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
