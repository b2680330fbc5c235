"""The names under which scripts import DeepSpeed's parts: ``from infinity.deepspeed.utils import logger`` and the like.

Few of them are files. Each line of the table below becomes a module: of `infinity.deepspeed` when a script first uses one of
these names (see `infinity.deepspeed.path`), and of `deepspeed` where `infinity.as_deepspeed` stands in for it. A name that is
not in the table raises an error that says what there is instead.
"""

from __future__ import annotations

import importlib
import sys
from enum import Enum, IntEnum
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from infinity.checkpoint import full_tensors
from infinity.config.schema.vocabulary import nearest
from infinity.deepspeed.contents import (
    checkpointing,
    comm,
    constants,
    fp32_weights,
    groups,
    leaf_modules,
    messages,
    optimizers,
    small_functions,
    zero,
)
from infinity.deepspeed.contents.accelerator import get_accelerator
from infinity.deepspeed.contents.config import DeepSpeedConfig
from infinity.deepspeed.contents.refused import REFUSED
from infinity.deepspeed.contents.timers import Timers
from infinity.deepspeed.engine import DeepSpeedEngine
from infinity.deepspeed.entry import initialize
from infinity.deepspeed.path import PATH, explained, relative
from infinity.distributed.process_groups import init_distributed
from infinity.errors import ConfigError
from infinity.loop.loader import RepeatingLoader
from infinity.metrics.monitors import Monitors
from infinity.optim import lr_schedules
from infinity.optim.facade.paged_optimizer import PagedOptimizer

# Texts by themselves: DeepSpeed's print as classes of ``str`` and `Enum` do.
OffloadDeviceEnum = Enum("OffloadDeviceEnum", {"none": "none", "cpu": "cpu", "nvme": "nvme"}, type=str)
_STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
OffloadStateTypeEnum = Enum("OffloadStateTypeEnum", [(name, name) for name in _STATES], type=str)  # type: ignore[misc]
ZeroStageEnum = IntEnum(
    "ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
)


def _of(module: Any, names: str = "") -> dict[str, Any]:
    """Those names of a module; without any, all public functions and classes that it defines."""
    found = vars(module)
    own = (name for name, value in found.items() if getattr(value, "__module__", None) == module.__name__)
    return {name: found[name] for name in names.split() or own if names or not name.startswith("_")}


_CHECKPOINTING, _LEAVES, _TENSORS = _of(checkpointing), _of(leaf_modules), _of(full_tensors)
_COMM = _of(comm) | _of(
    comm,
    "P2POp ReduceOp batch_isend_irecv destroy_process_group get_local_rank get_world_group init_distributed irecv "
    "is_initialized isend new_group",
)
_MESSAGES = _of(messages) | _of(messages, "log_levels logger")
_RECURSIVE = _of(small_functions, "recursive_getattr recursive_setattr")
_ZERO = _of(zero) | _of(
    zero,
    "GatheredParameters Init MiCS_Init ZeroParamStatus set_z3_leaf_modules",
)
_INIT = _ZERO | {
    # transformers puts a function of its own around the first while it builds a model.
    "zero_wrapper_for_fp_tensor_constructor": lambda fn, *_, **__: fn,
    "_orig_torch_arange": torch.arange,
    "get_accelerator": get_accelerator,
}
_GLOBALS = {"TORCH_DISTRIBUTED_DEFAULT_PORT": 29500}
_CONFIG = {"DeepSpeedConfig": DeepSpeedConfig, "DeepSpeedConfigError": ConfigError}

_MODULES: dict[str, dict[str, Any]] = {
    "accelerator": {"get_accelerator": get_accelerator},
    "accelerator.real_accelerator": {"get_accelerator": get_accelerator},
    "checkpoint": {},
    "checkpoint.utils": _of(small_functions, "clone_tensors_for_torch_save"),
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "compression": {},
    "compression.helper": _RECURSIVE,
    "constants": _GLOBALS,
    "launcher": {},
    "launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": ".deepspeed_env"},
    "moe": {},
    "moe.utils": _of(
        small_functions, "has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer"
    ),
    "monitor": {},
    "monitor.monitor": {"MonitorMaster": Monitors},
    "ops": {},
    "ops.adagrad": _of(optimizers, "DeepSpeedCPUAdagrad"),
    "ops.adam": _of(optimizers, "DeepSpeedCPUAdam FusedAdam"),
    "ops.lamb": _of(optimizers, "FusedLamb"),
    "ops.lion": _of(optimizers, "DeepSpeedCPULion FusedLion"),
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": {"DeepSpeedOptimizer": PagedOptimizer, "ZeROOptimizer": PagedOptimizer},
    "runtime.config": _CONFIG | constants.OPTIMIZERS,
    "runtime.dataloader": {"RepeatingLoader": RepeatingLoader},
    "runtime.engine": {"DeepSpeedEngine": DeepSpeedEngine},
    "runtime.lr_schedules": {
        **lr_schedules.SCHEDULES,
        "VALID_LR_SCHEDULES": list(lr_schedules.SCHEDULES),
        **constants.LR_SCHEDULES,
    },
    "runtime.utils": _of(
        small_functions,
        "clip_grad_norm_ see_memory_usage set_random_seed",
    ),
    "runtime.zero": _ZERO,
    "runtime.zero.config": {"ZeroStageEnum": ZeroStageEnum},
    "runtime.zero.offload_config": {
        "OffloadDeviceEnum": OffloadDeviceEnum,
        "OffloadStateTypeEnum": OffloadStateTypeEnum,
    },
    "runtime.zero.partition_parameters": _INIT,
    "runtime.zero.stage3": {},
    "runtime.zero.stage_1_and_2": {},
    "runtime.zero.utils": _of(small_functions, "is_zero_param"),
    "utils": {
        **_MESSAGES,
        **_TENSORS,
        **_LEAVES,
        **groups.PUBLIC,
        **_RECURSIVE,
        **_of(small_functions, "OnDevice instrument_w_nvtx"),
        "RepeatingLoader": RepeatingLoader,
    },
    "utils.groups": groups.PUBLIC,
    "utils.init_on_device": _of(small_functions, "OnDevice"),
    "utils.logging": _MESSAGES,
    "utils.nvtx": _of(small_functions, "instrument_w_nvtx"),
    "utils.tensor_fragment": _TENSORS,
    "utils.timer": {"SynchronizedWallClockTimer": Timers},
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": _of(
        fp32_weights,
        "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint get_model_state_file "
        "get_optim_files load_state_dict_from_zero_checkpoint",
    ),
    "zero": _ZERO,
    "zero.partition_parameters": _INIT,
}

_OF_THE_PACKAGE: dict[str, Any] = {
    **_GLOBALS,
    **_CONFIG,
    **_of(small_functions, "OnDevice add_config_arguments"),
    **_of(messages, "log_dist logger"),
    "DeepSpeedEngine": DeepSpeedEngine,
    "DeepSpeedOptimizer": PagedOptimizer,
    "dist": comm,
    "get_accelerator": get_accelerator,
    "init_distributed": init_distributed,
    "initialize": initialize,
}
"""What DeepSpeed's package itself has, besides the modules of the table."""


def why_absent(name: str) -> str:
    """What to say about a name of DeepSpeed's, with dots, that there is not."""
    above, _, last = name.rpartition(".")
    there = {each: module for module in sorted(_MODULES, key=len, reverse=True) for each in _MODULES[module]}
    if name in REFUSED:
        return REFUSED[name]
    if last in there and there[last] != above:
        return f"It is in {there[last]}"
    own = [each for each in _MODULES.get(above, {}) if not each.startswith("_") and each.isupper() == last.isupper()]
    near = nearest(last, own)
    if near is not None:
        return f"The nearest there is: {above}.{near}"
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
    cure = next((REFUSED[prefix] for prefix in prefixes if prefix in REFUSED), None)
    if cure is not None:
        return cure
    near = nearest(last, list(there))
    if near is not None:
        return f"The nearest there is: {there[near]}.{near}"
    return f"Of DeepSpeed's modules there are {', '.join(_MODULES)}"


class _Part(ModuleType):
    """One of the modules below a package."""

    def __init__(self, name: str, content: dict[str, Any]) -> None:
        super().__init__(name, "One of DeepSpeed's modules, as far as scripts need it.")
        vars(self).update(content, __getattr__=explained(name), __path__=[PATH])
        self.__spec__ = ModuleSpec(name, _Made(), is_package=True)


class _Made(Loader):
    """The loader of a module that exists already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def spec_of(name: str) -> ModuleSpec:
    """How to load a module of the table.

    Raises:
        ModuleNotFoundError: it is not in the table; says what there is instead.
    """
    if name in sys.modules:
        return ModuleSpec(name, _Made(), is_package=True)
    # Without `name=`: where a name is imported from a module, Python replaces the message by its own otherwise.
    raise ModuleNotFoundError(f"there is no {name} here. {why_absent(relative(name))}")


def install(package: ModuleType) -> None:
    """Make the modules of the table parts of ``package``, if it has no files for them."""
    for name, value in _OF_THE_PACKAGE.items():
        vars(package).setdefault(name, value)
    if PATH not in package.__path__:
        package.__path__.append(PATH)
    names = {f"{package.__name__}.{name}": content for name, content in _MODULES.items()}
    made = {name: _Part(name, content) for name, content in names.items() if name not in sys.modules}
    for name, part in made.items():
        above, _, last = name.rpartition(".")
        held = vars(made.get(above) or sys.modules[above])
        if not callable(held.get(last)):  # a function may have that name; a module gives way, as after an import
            held[last] = part
    sys.modules.update(made)  # last: another thread finds them complete


install(importlib.import_module("infinity.deepspeed"))
