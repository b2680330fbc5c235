"""The names under which scripts import DeepSpeed's parts: ``from infinity.utils import logger`` and the like.

None of them is a file: each module is made of a line of the table below, when `infinity` is imported, and again for
`deepspeed`, where that is us (`infinity.as_deepspeed`). What is not in the table is an error that says what there is
instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from infinity import checkpointing, comm, tiling, zero
from infinity.accelerator import get_accelerator
from infinity.checkpoint import full_tensors
from infinity.compat import messages, optimizers
from infinity.compat.timers import Timers
from infinity.config import InfinityConfig
from infinity.config.schema.vocabulary import nearest
from infinity.engine.engine import Engine
from infinity.errors import ConfigError
from infinity.loop.loader import RepeatingLoader
from infinity.optim import lr_schedules
from infinity.units.parameter import ZeroParamStatus


class OffloadDeviceEnum(str, Enum):  # noqa: UP042  # DeepSpeed's prints as such a class does
    """For ``engine.offload_states``."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):  # noqa: UP042
    """For ``engine.offload_states``."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def clone_tensors_for_torch_save(item: Any, *args: Any, **kwargs: Any) -> Any:
    """``item`` as it is: a tensor of ours has no larger storage that ``torch.save`` would write with it."""
    return item


def _those_of(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


_MESSAGES = {"logger": messages.logger, "log_dist": messages.log_dist}
_ZERO: dict[str, Any] = {**_those_of(zero), "ZeroParamStatus": ZeroParamStatus}
_CHECKPOINTING = {
    name: value for name, value in vars(checkpointing).items() if callable(value) and not name.startswith("_")
}
_INIT_INTERNALS = {
    # transformers puts a function of its own around the first while it builds a model.
    "zero_wrapper_for_fp_tensor_constructor": lambda fn, *_, **__: fn,
    "_orig_torch_arange": torch.arange,
    "get_accelerator": get_accelerator,
}

_MODULES: dict[str, dict[str, Any]] = {
    "accelerator": {"get_accelerator": get_accelerator},
    "checkpoint": {},
    "checkpoint.utils": {"clone_tensors_for_torch_save": clone_tensors_for_torch_save},
    "checkpointing": _CHECKPOINTING,
    "comm": _those_of(comm),
    "launcher": {},
    "launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": ".deepspeed_env"},
    "ops": {},
    "ops.adagrad": {"DeepSpeedCPUAdagrad": optimizers.DeepSpeedCPUAdagrad},
    "ops.adam": {"DeepSpeedCPUAdam": optimizers.DeepSpeedCPUAdam, "FusedAdam": optimizers.FusedAdam},
    "ops.lion": {"DeepSpeedCPULion": optimizers.DeepSpeedCPULion, "FusedLion": optimizers.FusedLion},
    "runtime": {},
    "runtime.activation_checkpointing": {"checkpointing": checkpointing},
    "runtime.config": {"DeepSpeedConfig": InfinityConfig, "DeepSpeedConfigError": ConfigError},
    "runtime.dataloader": {"RepeatingLoader": RepeatingLoader},
    "runtime.engine": {"DeepSpeedEngine": Engine},
    "runtime.lr_schedules": {**lr_schedules.SCHEDULES, "VALID_LR_SCHEDULES": list(lr_schedules.SCHEDULES)},
    "runtime.utils": {"see_memory_usage": messages.see_memory_usage},
    "runtime.zero": _ZERO,
    "runtime.zero.offload_config": {
        "OffloadDeviceEnum": OffloadDeviceEnum,
        "OffloadStateTypeEnum": OffloadStateTypeEnum,
    },
    "runtime.zero.partition_parameters": {**_ZERO, **_INIT_INTERNALS},
    "runtime.zero.tiling": _those_of(tiling),
    "utils": {
        **_MESSAGES,
        **_those_of(full_tensors),
        "RepeatingLoader": RepeatingLoader,
        "set_z3_leaf_modules": zero.set_z3_leaf_modules,
    },
    "utils.logging": _MESSAGES,
    "utils.timer": {"SynchronizedWallClockTimer": Timers},
    "zero": _ZERO,
}

_ABSENT = {
    "moe": "Experts in a ModuleList need no layer of its own: only those that a batch goes to are read",
    "pipe": "A model need not be cut into stages: pass it to initialize as it is, and use engine.train_batch",
    "inference": "Without an optimizer, initialize gives an engine that evaluates",
    "module_inject": "Without an optimizer, initialize gives an engine that evaluates",
    "sequence": "There is one process: activation checkpointing keeps long sequences small",
    "runtime.pipe": "A model need not be cut into stages: pass it to initialize as it is, and use engine.train_batch",
    "runtime.sequence_parallel": "There is one process: activation checkpointing keeps long sequences small",
    "tensor_parallel": "There is one process: a layer that is too large for the device is paged",
    "runtime.tensor_parallel": "There is one process: a layer that is too large for the device is paged",
    "hybrid_engine": "engine.generate works on the engine that trains",
    "runtime.hybrid_engine": "engine.generate works on the engine that trains",
    "profiling": "torch.utils.flop_counter counts operations; engine.report and infinity.timeline say what took time",
    "compression": "Compress the model before initialize, or after engine.close(restore_weights=True)",
    "checkpoint": "engine.save_checkpoint, load_checkpoint and save_16bit_model need no conversion",
    "launcher": "Start the script with python",
}
"""Why there is nothing of that name, and the cure."""


_ABOUT = {
    "PipelineModule": "pipe",
    "PipelineEngine": "pipe",
    "init_inference": "inference",
    "InferenceEngine": "inference",
    "tp_model_init": "tensor_parallel",
    "DeepSpeedHybridEngine": "hybrid_engine",
}
"""What is imported from the package itself: where to look up why it is not there."""


def why_absent(name: str) -> str:
    """What to say about a name of DeepSpeed's, with dots, that there is not."""
    name = _ABOUT.get(name, name)
    cure = next((cure for prefix, cure in _ABSENT.items() if f"{name}.".startswith(f"{prefix}.")), None)
    if cure is not None:
        return cure
    above, _, last = name.rpartition(".")
    there = {each: module for module, content in _MODULES.items() for each in content}
    if last in there:
        return f"It is in {there[last]}"
    near = nearest(last, [each for each in _MODULES.get(above, {}) if not each.startswith("_")] or list(there))
    if near is not None:
        return f"The nearest there is: {there[near]}.{near}"
    return f"Of DeepSpeed's modules there are {', '.join(_MODULES)}"


class _Part(ModuleType):
    """One of the modules below a package."""

    def __getattr__(self, name: str) -> Any:
        whole = self.__name__.partition(".")[2]
        raise AttributeError(
            f"module '{self.__name__}' has no attribute '{name}'. {why_absent(f'{whole}.{name}')}", name=name, obj=self
        )


class _Explaining:
    """Asked last by ``import``: nobody else has found the module, or the name that is imported from one."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        package, _, rest = name.partition(".")
        if package == "infinity" and rest.partition(".")[0] in _ABSENT:
            raise ModuleNotFoundError(f"infinity has no module '{rest}'. {why_absent(rest)}", name=name)
        if package == "deepspeed" and rest and not rest.rpartition(".")[2].startswith("__"):
            # Without a name in it: else Python would say something of its own in its place.
            raise ModuleNotFoundError(f"there is no {name} here: deepspeed is infinity. {why_absent(rest)}")


def install(package: ModuleType) -> None:
    """Make the modules of the table parts of ``package``, where it has no files for them."""
    for name, content in _MODULES.items():
        if f"{package.__name__}.{name}" in sys.modules:
            continue
        made = _Part(f"{package.__name__}.{name}", f"DeepSpeed's module {name}, as far as scripts need it.")
        made.__dict__.update(content)
        made.__spec__ = ModuleSpec(made.__name__, None)
        made.__path__ = []  # a module may have others below it
        sys.modules[made.__name__] = made
        above, _, last = made.__name__.rpartition(".")
        setattr(sys.modules[above], last, made)
    if _Explaining not in sys.meta_path:
        sys.meta_path.append(_Explaining)
