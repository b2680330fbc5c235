"""Optimizers under DeepSpeed's names, with its arguments. What they make is what the config's names mean: torch's, or ours."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch

from infinity.config.resolved import OptimizerSection
from infinity.errors import ConfigError
from infinity.optim.registry import resolve

logger = logging.getLogger(__name__)

_OF_OTHERS = frozenset({"momentum", "alpha", "rho", "etas", "lambd", "momentum_decay", "clip_threshold", "beta2_decay"})
"""What groups have of optimizers that accelerate takes for Adam: SGD, RMSprop, Adadelta, Rprop, ASGD, NAdam, Adafactor."""


class _Named:
    """Called like a class of DeepSpeed's. The instance is one of the class that the config's optimizer of that name has.

    Raises (all of them):
        ConfigError: an argument whose meaning torch's optimizer cannot have.
        ConfigError: an argument that there is not.
    """

    _name: ClassVar[str]
    _arguments: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        given = {**dict(zip(cls._arguments.split(), args, strict=False)), **kwargs}
        params = given.pop(cls._arguments.split()[0])
        if "adamw_mode" in given:
            is_adamw = given.pop("adamw_mode")
            given |= {"adam_w_mode": is_adamw} if cls._name == "Adam" else {}  # accelerate gives it to others, too
        for name, cure in (
            ("fp32_optimizer_states", 'The config says how states rest: "infinity": {"state_dtype": "bf16"}'),
            ("set_grad_none", "Call optimizer.zero_grad(set_to_none=False)"),
        ):
            if not given.pop(name, True):
                problem = f"what {cls.__name__} makes is {cls._name} of the config, which has no such argument"
                raise ConfigError.unsupported(f"optimizer.params.{name}", False, problem, cure=cure)
        if not given.get("amsgrad", True):
            del given["amsgrad"]  # of Adagrad, too
        made = resolve(OptimizerSection(cls._name, given), torch.device("cpu"))(params)
        foreign = sorted(_OF_OTHERS.intersection(*map(set, made.param_groups)) - made.defaults.keys())
        if foreign:
            logger.warning(
                "%s is made of groups with %s, which are another optimizer's: accelerate makes it of all that it does not know. "
                'To train with that one, set "zero_force_ds_cpu_optimizer": false, or name it in the config ("optimizer")',
                cls.__name__,
                ", ".join(foreign),
            )
        return made


class DeepSpeedCPUAdam(_Named):
    """Makes ``torch.optim.AdamW``, or ``Adam`` with ``adamw_mode=False``."""

    _name = "Adam"
    _arguments = "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states"


class FusedAdam(_Named):
    """Makes ``torch.optim.AdamW``, or ``Adam`` with ``adam_w_mode=False``."""

    _name = "Adam"
    _arguments = "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none"


class FusedLamb(_Named):
    """Makes `infinity.optim.classes.Lamb`."""

    _name = "Lamb"
    _arguments = (
        "params lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm max_coeff min_coeff amsgrad"
    )


class DeepSpeedCPULion(_Named):
    """Makes `infinity.optim.classes.Lion`."""

    _name = "Lion"
    _arguments = "model_params lr betas weight_decay fp32_optimizer_states"


class FusedLion(_Named):
    """Makes `infinity.optim.classes.Lion`."""

    _name = "Lion"
    _arguments = "params lr betas weight_decay set_grad_none"


class DeepSpeedCPUAdagrad(_Named):
    """Makes ``torch.optim.Adagrad``."""

    _name = "Adagrad"
    _arguments = "model_params lr eps weight_decay amsgrad fp32_optimizer_states"

    def __new__(cls, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        made = super().__new__(cls, *args, **kwargs)
        made.register_step_pre_hook(_unfuse_sparse)
        return made


def _unfuse_sparse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Groups with sparse gradients go without torch's fused kernel, which takes none; DeepSpeed's optimizer does."""
    if type(optimizer) is not torch.optim.Adagrad:  # an engine's: it makes gradients dense
        return
    for group in optimizer.param_groups:
        if any(param.grad is not None and param.grad.is_sparse for param in group["params"]):
            group["fused"] = False
