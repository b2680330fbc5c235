"""Optimizers by the names that a config gives them, and the classes that are known to be pageable or not."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer

from infinity.errors import ConfigError, OptimizerNotPageableError, nearest
from infinity.optim.classes import Lamb, Lion, Muon, OneBitAdam, UncorrectedAdam
from infinity.optim.executor import OptimizerExecutor, one_element

#: Classes whose every operation treats each element by itself with bits that don't depend on its position, given
#: slices cut at multiples of 64 elements. Subclasses may do anything: they are probed.
_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        Lion,
        OneBitAdam,
        UncorrectedAdam,
    }
)
#: Classes that update each parameter by itself, as a whole.
_PER_PARAMETER: frozenset[type[Optimizer]] = frozenset({Lamb, Muon})
_NOT_PAGEABLE = tomllib.loads(Path(__file__).with_name("not_pageable.toml").read_text("utf-8"))
"""Name -> `because`, and maybe a `cure`."""
_WITHOUT_EFFECT = ("cuda_aware", "comm_backend_name")
"""Parameters of the 1-bit ones that say by what DeepSpeed sends: here that is gloo, as for all else."""
_NOT_DEFINED: dict[type[Optimizer], tuple[str, ...]] = {Lamb: ("amsgrad",), OneBitAdam: ("eps_inside_sqrt", "amsgrad")}
"""Parameters of DeepSpeed with which a rule is not defined: they may be false."""

BY_NAME: dict[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "lamb": Lamb,
    "lion": Lion,
    "muon": Muon,
    "onebitadam": OneBitAdam,
}
"""By DeepSpeed's names; other classes of torch.optim go by their own."""

_PATH = "optimizer.params"


@runtime_checkable
class Section(Protocol):
    """What the config's block "optimizer" or "scheduler" says: a name and keyword arguments."""

    @property
    def type(self) -> str: ...

    @property
    def params(self) -> Mapping[str, Any]: ...


def is_verified(cls: type[Optimizer]) -> bool:
    """Whether exactly this class (no subclass) can be paged without being probed."""
    return cls in _ELEMENTWISE or mixes_elements(cls)


def mixes_elements(cls: type[Optimizer]) -> bool:
    """Whether exactly this class is known to update each parameter by itself, but as a whole."""
    return cls in _PER_PARAMETER


def refuse_not_pageable(cls: type[Optimizer]) -> None:
    """Raise OptimizerNotPageableError for classes (and their subclasses) that are known to mix elements."""
    for base in cls.__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in _NOT_PAGEABLE:
            raise OptimizerNotPageableError(cls.__name__, _NOT_PAGEABLE[base.__name__]["because"])


def refuse_wrapper(optimizer: Optimizer) -> None:
    """Raise OptimizerNotPageableError for an instance that has another optimizer, or a ``step`` that is not its class's."""
    name = type(optimizer).__name__
    for attribute, value in vars(optimizer).items():
        # Lookahead, SAM and the like: the slices would be updated by the wrapper's class alone.
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        inner = next((item for item in items if isinstance(item, Optimizer)), None)
        if inner is not None:
            raise OptimizerNotPageableError(
                name,
                f"it runs another optimizer, its attribute '{attribute}' ({type(inner).__name__})",
                cure="Pass that one; what is done around its steps can be done in the training loop, to weights inside "
                "`with infinity.GatheredParameters(...)`",
            )
    if not {"param_groups", "state"} <= vars(optimizer).keys():
        raise OptimizerNotPageableError(
            name,
            "it holds no parameter groups of its own, so it seems to wrap another optimizer",
            cure="Pass the wrapped optimizer itself",
        )
    step = vars(optimizer).get("step")
    # A learning rate scheduler wraps the method to see whether it is called.
    wrapped = getattr(step, "__wrapped__", None) if hasattr(step, "_wrapped_by_lr_sched") else step
    if wrapped is not None and wrapped is not type(optimizer).step:
        raise OptimizerNotPageableError(
            name,
            "its `step` was replaced on the instance, and the engine does not run the replacement",
            cure="Replace `step` of the optimizer that infinity.initialize returns",
        )


def resolve(section: Section, device: torch.device) -> functools.partial[Optimizer]:
    """Turn the config's optimizer block into a class and its arguments.

    Names are DeepSpeed's in any case of letters (Adam means AdamW unless "adam_w_mode" is false), else those of
    torch.optim. Arguments that are absent take the default they have in DeepSpeed, which differs from torch's in two
    places: AdamW decays by 0 unless told otherwise (with "torch_adam": true by torch's 0.01), and Lion has lr 1e-3 and
    betas (0.9, 0.999). `fused=True` is set where the class has it and the device can run it.

    Args:
        section: the block, "auto" values already dropped.
        device: where updates will run.

    Raises:
        ConfigError: nobody knows this optimizer, or a value is out of range; a parameter it does not take; a parameter
            of DeepSpeed that would change the numbers.
        OptimizerNotPageableError: the optimizer is known and mixes elements.
    """
    cls = _class_named(section.type)
    refuse_not_pageable(cls)
    params = dict(section.params)
    if params.pop("max_grad_norm", 0):
        raise ConfigError.value(
            f"{_PATH}.max_grad_norm",
            section.params["max_grad_norm"],
            "clipping is no argument of the optimizer",
            cure='Remove it and set "gradient_clipping" at the top level',
        )
    if section.type.lower() in ("adam", "adamw"):
        cls, params = _adam(section.type.lower(), params)
    elif cls is OneBitAdam:
        params = {name: value for name, value in params.items() if name not in _WITHOUT_EFFECT}
    elif cls is Lion:
        params = {"lr": 1e-3, "betas": (0.9, 0.999), **params}
    for name in _NOT_DEFINED.get(cls, ()):
        if params.pop(name, False):
            cure = "Remove it, or train with AdamW"
            raise ConfigError.unsupported(f"{_PATH}.{name}", True, f"{cls.__name__} is not defined with it", cure=cure)
    # Keyword arguments of the constructor: "params" is what `wrap_optimizer` passes.
    accepted = [name for name in inspect.signature(cls).parameters if name != "params"]
    for name, value in params.items():
        if name not in accepted:
            near = nearest(name, accepted)
            hint = f"Did you mean '{near}'? " if near else ""
            cure = f"{hint}{cls.__name__} takes {', '.join(accepted)}"
            raise ConfigError.value(f"{_PATH}.{name}", value, "no such argument", cure=cure)
    if params.get("differentiable"):
        raise ConfigError.value(f"{_PATH}.differentiable", True, "no graph is kept through an update", cure="Remove it")
    # JSON has no tuples.
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    # The fused kernel by default: one pass over weights and states in place of several.
    if "fused" in accepted and params.get("fused") is None and not params.get("foreach") and _runs_fused(cls, device):
        params["fused"] = True
    return functools.partial(cls, **params)


def _class_named(name: str) -> type[Optimizer]:
    in_torch = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    # DeepSpeed's names take precedence; torch's are found in any case of letters.
    by_name = {key.lower(): value for key, value in in_torch.items()} | BY_NAME
    if name.lower() in by_name:
        return by_name[name.lower()]
    for key, told in _NOT_PAGEABLE.items():
        if key.lower() == name.lower():
            raise OptimizerNotPageableError(key, told["because"], cure=told.get("cure"))
    known = sorted({cls.__name__ for cls in BY_NAME.values()} | {key for key in in_torch if key not in _NOT_PAGEABLE})
    near = nearest(name, known)
    raise ConfigError.value(
        "optimizer.type",
        name,
        "no optimizer of this name",
        cure=(f"Did you mean '{near}'? " if near else "")
        + f"The names are {', '.join(known)}; others can be passed to infinity.initialize(optimizer=...)",
    )


def _adam(name: str, params: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """DeepSpeed's Adam block: one class whose weight decay is decoupled or not."""
    torch_defaults = bool(params.pop("torch_adam", False))
    # As in DeepSpeed: "Adam" is AdamW unless told otherwise, "AdamW" is AdamW in any case.
    is_decoupled = bool(params.pop("adam_w_mode", True)) or name == "adamw"
    if not params.pop("fp32_optimizer_states", True):
        raise ConfigError.unsupported(
            f"{_PATH}.fp32_optimizer_states",
            False,
            "it says nothing about how states are rounded",
            cure='Remove it; "infinity": {"state_dtype": "bf16"} makes them smaller',
        )
    params.pop("set_grad_none", None)  # of DeepSpeed's own zero_grad: without effect here
    if not torch_defaults:
        params.setdefault("weight_decay", 0.0)
    if not params.pop("bias_correction", True):
        if params.pop("amsgrad", False):
            raise ConfigError.unsupported(
                f"{_PATH}.bias_correction",
                False,
                "amsgrad is not defined without correction for bias",
                cure="Remove one of the two",
            )
        return UncorrectedAdam, {**params, "decoupled_weight_decay": is_decoupled}
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam), params


def _runs_fused(cls: type[Optimizer], device: torch.device) -> bool:
    """Whether the class's fused kernel exists for the device, found out by a step on one element."""
    param = torch.nn.Parameter(one_element(device))
    make: Any = cls
    try:
        executor = OptimizerExecutor(make([param], lr=1e-3, fused=True), device)
        executor.run(dict(executor.optimizer.defaults), [one_element(device)], [one_element(device)], [{}])
    except (RuntimeError, NotImplementedError):
        return False
    return True
