"""Decides the compute dtype, and what follows from it for the loss."""

from __future__ import annotations

import torch

from infinity.config.resolved import LARGEST_LOSS_SCALE, LossScaling
from infinity.config.schema.blocks import Fp16Block, RootBlock
from infinity.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_precision(root: RootBlock) -> tuple[torch.dtype, LossScaling | None]:
    """Return the compute dtype, and with fp16 the loss scaling.

    Raises:
        ConfigError: two dtypes at once, one that contradicts `data_types`, or a scaling that makes no sense.
    """
    if root.fp16.enabled and root.bf16.enabled:
        problem = "bf16 is enabled too, and a model has one compute dtype"
        raise ConfigError.value("fp16.enabled", True, problem, cure='Set "enabled" of one of them to false')
    # All parameters get one dtype. To accept another one here and ignore it would change the numbers silently.
    name = _compute_name(root)
    value = root.data_types.param_dtype
    if value not in (None, name):
        cure = (
            f'Set it to "{name}" or remove it; "bf16": {{"enabled": ...}} and "fp16": {{"enabled": ...}} choose the '
            "compute dtype"
        )
        reason = f"parameters get the compute dtype, which is {name}"
        raise ConfigError.unsupported("data_types.param_dtype", value, reason, cure=cure)
    return DTYPES[name], _loss_scaling(root.fp16) if scales_loss(root) else None


def _compute_name(root: RootBlock) -> str:
    return "fp16" if root.fp16.enabled else "bf16" if root.bf16.enabled else "fp32"


def scales_loss(root: RootBlock) -> bool:
    """Whether gradients are computed in fp16, so that losses are scaled and overflows checked."""
    return root.fp16.enabled or (root.torch_autocast.enabled and root.torch_autocast.dtype == "fp16")


def resolve_autocast(root: RootBlock) -> torch.dtype | None:
    """Return the dtype of ``torch.autocast`` around the model; None without.

    Raises:
        ConfigError: the weights are in the other narrow dtype.
    """
    block, name = root.torch_autocast, _compute_name(root)
    if not block.enabled:
        return None
    # fp32 weights under autocast are torch's usual mixed precision. Weights in autocast's own dtype need no cast.
    if name not in ("fp32", block.dtype):
        problem = f"the weights are {name}, which torch_autocast would cast to {block.dtype} in each use"
        cure = f'Set torch_autocast.dtype to "{name}", or remove one of the two blocks'
        raise ConfigError.value("torch_autocast.dtype", block.dtype, problem, cure=cure)
    return DTYPES[block.dtype]


def _loss_scaling(block: Fp16Block) -> LossScaling:
    # 2^-24 is the smallest positive number of fp16 (a subnormal). The upper limit is `LARGEST_LOSS_SCALE`.
    limits = {"loss_scale": 0.0, "min_loss_scale": 2.0**-24, "loss_scale_window": 1, "hysteresis": 1}
    for name, least in limits.items():
        value = getattr(block, name)
        if not least <= value <= LARGEST_LOSS_SCALE:
            problem = f"must be at least {least:g} and at most 2^96"
            raise ConfigError.value(f"fp16.{name}", value, problem, cure="Remove it: the default fits most models")
    if not -24 <= block.initial_scale_power <= 96:
        problem = "the factor is 2 to that power: it must be between -24 and 96"
        cure = "Remove it: the default, 16, fits most models"
        raise ConfigError.value("fp16.initial_scale_power", block.initial_scale_power, problem, cure=cure)
    is_dynamic = block.loss_scale == 0
    initial = 2.0**block.initial_scale_power if is_dynamic else float(block.loss_scale)
    if is_dynamic and initial < block.min_loss_scale:
        problem = f"the first factor would be {initial:g}, below fp16.min_loss_scale = {block.min_loss_scale:g}"
        raise ConfigError.value("fp16.initial_scale_power", block.initial_scale_power, problem, cure="Raise it")
    return LossScaling(
        initial=initial,
        is_dynamic=is_dynamic,
        window=block.loss_scale_window,
        hysteresis=block.hysteresis,
        refills_hysteresis=block.consecutive_hysteresis,
        minimum=float(block.min_loss_scale),
    )
