"""Optimizers under DeepSpeed's names, with its arguments. Each makes the config's optimizer of that name."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch

from infinity.config.resolved import OptimizerSection
from infinity.deepspeed.contents.names import TABLE
from infinity.errors import ConfigError
from infinity.optim.registry import resolve

logger = logging.getLogger(__name__)

_OF_OTHERS = frozenset({"momentum", "alpha", "rho", "etas", "lambd", "momentum_decay", "clip_threshold", "beta2_decay"})
"""Keys of groups of SGD, RMSprop, Adadelta, Rprop, ASGD, NAdam and Adafactor, which Adam does not have."""


class _Named:
    """Called like a class of DeepSpeed's. Returns an optimizer of the class that the config has for its name.

    Raises (all of them):
        ConfigError: the optimizer does not have an argument, or cannot do what its value says.
    """

    _name: ClassVar[str]
    _arguments: ClassVar[str]

    # `__new__` returns an object of another class, so Python calls no `__init__`.
    def __new__(cls, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        given = {**dict(zip(cls._arguments.split(), args, strict=False)), **kwargs}
        params = given.pop(cls._arguments.split()[0])
        if "adamw_mode" in given:
            is_adamw = given.pop("adamw_mode")
            given |= {"adam_w_mode": is_adamw} if cls._name == "Adam" else {}  # accelerate passes it to all of them
        for name, cure in (
            ("fp32_optimizer_states", 'The config sets how states are stored: "infinity": {"state_dtype": "bf16"}'),
            ("set_grad_none", "Call optimizer.zero_grad(set_to_none=False)"),
        ):
            if not given.pop(name, True):
                problem = f"what {cls.__name__} makes is {cls._name} of the config, which has no such argument"
                raise ConfigError.unsupported(f"optimizer.params.{name}", False, problem, cure=cure)
        if not given.get("amsgrad", True):
            del given["amsgrad"]  # False is the default; DeepSpeed's Adagrad has the argument, torch's has not
        made = resolve(OptimizerSection(cls._name, given), torch.device("cpu"))(params)
        if cls._name == "Adagrad":
            made.register_step_pre_hook(_unfuse_sparse)
        foreign = sorted(_OF_OTHERS.intersection(*map(set, made.param_groups)) - made.defaults.keys())
        if foreign:
            logger.warning(
                "%s gets parameter groups with %s, which belong to another optimizer: accelerate replaces every "
                "optimizer that it does not know by this one. To train with the script's optimizer, set "
                '"zero_force_ds_cpu_optimizer": false, or name it in the config ("optimizer")',
                cls.__name__,
                ", ".join(foreign),
            )
        return made


def _unfuse_sparse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Switch off torch's fused kernel for groups with sparse gradients, which it does not support. DeepSpeed's does."""
    if type(optimizer) is not torch.optim.Adagrad:  # held by an engine, which makes gradients dense
        return
    for group in optimizer.param_groups:
        if any(param.grad is not None and param.grad.is_sparse for param in group["params"]):
            group["fused"] = False


for _class, _known in TABLE["optimizers"].items():
    _made = {"__doc__": _known["doc"], "__module__": __name__}
    globals()[_class] = type(_class, (_Named,), {**_made, "_name": _known["name"], "_arguments": _known["arguments"]})
