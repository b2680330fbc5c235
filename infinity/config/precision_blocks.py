"""The JSON's blocks about number formats: `fp16`, `bf16`, `data_types`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from infinity.config.block import Block, Count, Flag, NoEffect, Number, Refused
from infinity.config.quantities import parse_names

_SCALING = "no effect: bf16 has the range of fp32, so no loss scaling is needed"
_FLOAT_TYPES = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_NO_AUTO_CAST = Refused("inputs are taken as they come", "Cast the inputs in the data loader")


def _float_type(value: object) -> str:
    name = _FLOAT_TYPES.get(str(value).lower().removeprefix("torch."))
    if name is None:
        raise ValueError(f"must be one of {', '.join(_FLOAT_TYPES)}")
    return name


class Fp16Block(Block):
    """`fp16`, with its loss scaling."""

    enabled: Flag = False
    loss_scale: Number = 0
    initial_scale_power: Number = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: Flag = False
    min_loss_scale: Number = 1
    auto_cast: Annotated[Flag, _NO_AUTO_CAST] = False
    fp16_master_weights_and_grads: Annotated[
        Flag, Refused("main weights and main gradients are fp32", "Set it to false")
    ] = False


class Bf16Block(Block):
    """`bf16`. Also takes the loss scaling keys of `fp16`, which many files repeat here."""

    renamed: ClassVar[Mapping[str, str]] = {"check_overflow": "check_grad_overflow"}

    enabled: Flag = False
    check_grad_overflow: Flag = False
    immediate_grad_update: Annotated[
        Flag, NoEffect("no effect: main gradients are always accumulated in fp32 as they arrive")
    ] = True
    bf16_master_weights_and_grads: Annotated[
        Flag, Refused("main weights and main gradients are fp32", "Set it to false")
    ] = False
    bf16_optimizer_states: Annotated[
        Flag,
        Refused(
            "it rounds optimizer state to nearest, so that second moments stand still",
            'Set it to false; "infinity": {"state_dtype": "bf16"} rounds stochastically',
        ),
    ] = False
    auto_cast: Annotated[Flag, _NO_AUTO_CAST] = False
    loss_scale: Annotated[Number, NoEffect(_SCALING)] = 0
    initial_scale_power: Annotated[Number, NoEffect(_SCALING)] = 0
    loss_scale_window: Annotated[Number, NoEffect(_SCALING)] = 0
    hysteresis: Annotated[Number, NoEffect(_SCALING)] = 0
    consecutive_hysteresis: Annotated[Flag, NoEffect(_SCALING)] = False
    min_loss_scale: Annotated[Number, NoEffect(_SCALING)] = 0


class DataTypesBlock(Block):
    """`data_types`. What does not fit the compute dtype is refused when that is known."""

    grad_accum_dtype: Annotated[
        Literal["fp32", "fp16", "bf16"] | None,
        BeforeValidator(_float_type),
        Refused("gradients are accumulated in fp32", 'Set it to "fp32" or remove it', allowed=("fp32",)),
    ] = None
    param_dtype: Annotated[str | None, BeforeValidator(_float_type)] = None
    buffer_dtype: Annotated[str | None, BeforeValidator(_float_type)] = None
    keep_in_fp32_modules: Annotated[
        tuple[str, ...],
        BeforeValidator(parse_names),
        Refused("buffers get the compute dtype, as module.to(dtype) leaves them", "Remove it", allowed=((),)),
    ] = ()
