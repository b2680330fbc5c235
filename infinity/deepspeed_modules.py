"""The names under which scripts import DeepSpeed's parts: ``from infinity.utils import logger`` and the like.

None of them is a file: each module is made of a line of the table below, when `infinity` is imported. What is not in the
table is an error that says what there is instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from infinity import checkpointing, tiling, zero
from infinity.checkpoint import full_tensors
from infinity.compat import messages, optimizers
from infinity.compat.timers import Timers
from infinity.config import InfinityConfig
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


def _those_of(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


_MESSAGES = {"logger": messages.logger, "log_dist": messages.log_dist}
_ZERO: dict[str, Any] = {**_those_of(zero), "ZeroParamStatus": ZeroParamStatus}

_MODULES: dict[str, dict[str, Any]] = {
    "ops": {},
    "ops.adagrad": {"DeepSpeedCPUAdagrad": optimizers.DeepSpeedCPUAdagrad},
    "ops.adam": {"DeepSpeedCPUAdam": optimizers.DeepSpeedCPUAdam, "FusedAdam": optimizers.FusedAdam},
    "ops.lion": {"DeepSpeedCPULion": optimizers.DeepSpeedCPULion, "FusedLion": optimizers.FusedLion},
    "runtime": {},
    "runtime.activation_checkpointing": {"checkpointing": checkpointing},
    "runtime.config": {"DeepSpeedConfig": InfinityConfig, "DeepSpeedConfigError": ConfigError},
    "runtime.dataloader": {"RepeatingLoader": RepeatingLoader},
    "runtime.engine": {"DeepSpeedEngine": Engine},
    "runtime.lr_schedules": dict(lr_schedules.SCHEDULES),
    "runtime.utils": {"see_memory_usage": messages.see_memory_usage},
    "runtime.zero": _ZERO,
    "runtime.zero.offload_config": {
        "OffloadDeviceEnum": OffloadDeviceEnum,
        "OffloadStateTypeEnum": OffloadStateTypeEnum,
    },
    "runtime.zero.partition_parameters": _ZERO,
    "runtime.zero.tiling": _those_of(tiling),
    "utils": {
        **_MESSAGES,
        **_those_of(full_tensors),
        "RepeatingLoader": RepeatingLoader,
        "set_z3_leaf_modules": zero.set_z3_leaf_modules,
    },
    "utils.logging": _MESSAGES,
    "utils.timer": {"SynchronizedWallClockTimer": Timers},
}

_ABSENT = {
    "moe": "Experts in a ModuleList need no layer of its own: only those that a batch goes to are read",
    "pipe": "A model need not be cut into stages: pass it to initialize as it is, and use engine.train_batch",
    "inference": "Without an optimizer, initialize gives an engine that evaluates",
    "module_inject": "Without an optimizer, initialize gives an engine that evaluates",
    "sequence": "There is one process: activation checkpointing keeps long sequences small",
    "profiling": "torch.utils.flop_counter counts operations; engine.report and infinity.timeline say what took time",
    "compression": "Compress the model before initialize, or after engine.close(restore_weights=True)",
    "checkpoint": "engine.save_checkpoint, load_checkpoint and save_16bit_model need no conversion",
    "launcher": "Start the script with python",
}
"""Why there is nothing of that name, and the cure."""


def why_absent(name: str) -> str:
    """What to say about a name of DeepSpeed's, with dots, that there is not."""
    cure = next((cure for prefix, cure in _ABSENT.items() if f"{name}.".startswith(f"{prefix}.")), None)
    return cure or f"Of DeepSpeed's modules there are {', '.join(_MODULES)}, and accelerator, checkpointing, comm, zero"


class _Explaining:
    """Asked last by ``import``: nobody else has found the module."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        package, _, rest = name.partition(".")
        if package == "infinity" and rest.partition(".")[0] in _ABSENT:
            raise ModuleNotFoundError(f"infinity has no module '{rest}'. {why_absent(rest)}", name=name)


def install(package: ModuleType) -> None:
    """Make the modules of the table parts of ``package``."""
    for name, content in _MODULES.items():
        made = ModuleType(f"{package.__name__}.{name}", f"DeepSpeed's module {name}, as far as scripts need it.")
        made.__dict__.update(content)
        made.__spec__ = ModuleSpec(made.__name__, None)
        made.__path__ = []  # a module may have others below it
        sys.modules[made.__name__] = made
        above, _, last = made.__name__.rpartition(".")
        setattr(sys.modules[above], last, made)
    sys.meta_path.append(_Explaining)
