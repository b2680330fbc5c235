"""The JSON's blocks about number formats: `fp16`, `bf16`, `data_types`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from infinity.config.schema.block import Block, Count, Flag, NoEffect, Number, Refused, Untyped
from infinity.config.schema.inert import with_deepspeed_only_keys
from infinity.config.schema.quantities import parse_names

_OTHER_NAMES = {"fp32": ("float32", "float"), "fp16": ("float16", "half"), "bf16": ("bfloat16",)}
_FLOAT_TYPES = {name: kind for kind, others in _OTHER_NAMES.items() for name in (kind, *others)}


def float_type(value: object) -> str:
    """Return "fp32", "fp16" or "bf16" for any of their names. Raises ValueError for other values."""
    # Accepts torch's own spelling as well, as in "torch.bfloat16".
    name = _FLOAT_TYPES.get(str(value).lower().removeprefix("torch."))
    if name is None:
        raise ValueError(f"must be one of {', '.join(_FLOAT_TYPES)}")
    return name


def _half_type(value: object) -> str:
    name = float_type(value)
    if name == "fp32":
        raise ValueError("must be bfloat16 or float16")
    return name


@with_deepspeed_only_keys
class Fp16Block(Block):
    """`fp16`, with its loss scaling."""

    enabled: Flag = False
    """Train in fp16, with fp32 main weights. A step whose gradients are not finite is skipped."""
    loss_scale: Number = 0
    """A fixed loss scale. 0 means a dynamic one."""
    initial_scale_power: Number = 16
    """The dynamic loss scale starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """The scale is doubled after this many steps without overflow."""
    hysteresis: Count = 2
    """The scale is halved at this many overflows, and at each one after, until it grows again."""
    consecutive_hysteresis: Flag = False
    """A step without overflow resets the count of `hysteresis`."""
    min_loss_scale: Number = 1
    """Smallest loss scale. Gradients that overflow with it are an error."""
    auto_cast: Flag = False
    """Floating-point inputs of the model are cast to fp16."""


@with_deepspeed_only_keys
class Bf16Block(Block):
    """`bf16`. Also takes the loss scaling keys of `fp16`, which many files repeat here."""

    enabled: Flag = False
    """Train in bf16, with exact fp32 main weights and fp32 gradient accumulation."""
    check_grad_overflow: Flag | None = None
    """Skip a step whose gradients are not finite. `"auto"`: enabled with `gradient_clipping` in ZeRO stages 1 and 2, as
    in DeepSpeed. DeepSpeed's stage 3 never checks, and without clipping no update waits for all gradients."""
    auto_cast: Flag = False
    """Floating-point inputs of the model are cast to bf16."""


class AutocastBlock(Block):
    """`torch_autocast`."""

    enabled: Flag = False
    """Run the model under `torch.autocast`, with fp32 weights or weights of its own dtype. As in plain torch, the cast
    copies of all fp32 weights stay in memory until backward has used them, outside of the budget."""
    dtype: Annotated[Literal["fp16", "bf16"], BeforeValidator(_half_type)] = "bf16"
    """Dtype to which autocast casts. With fp16, the loss scale follows the keys of the block `fp16`, which stays
    disabled."""
    lower_precision_safe_modules: Annotated[
        Untyped | list[str], NoEffect("no effect: gradients go between processes as communication_data_type says")
    ] = None


class DataTypesBlock(Block):
    """`data_types`. What does not fit the compute dtype is refused when that is known."""

    grad_accum_dtype: Annotated[
        Literal["fp32", "fp16", "bf16"] | None,
        BeforeValidator(float_type),
        NoEffect(
            'no effect: gradients are accumulated in fp32; "infinity": {"gradient_dtype": "bf16"} rounds their sums',
            silent=("fp32",),
        ),
    ] = None
    param_dtype: Annotated[str | None, BeforeValidator(float_type)] = None
    """May repeat the compute dtype that `bf16` or `fp16` sets; another dtype is an error."""
    buffer_dtype: Annotated[str | None, BeforeValidator(float_type)] = None
    """Cast floating-point buffers to this dtype. By default they keep their dtype, except buffers that torch requires
    in the dtype of the weights."""
    keep_in_fp32_modules: Annotated[
        tuple[str, ...],
        BeforeValidator(parse_names),
        Refused("all parameters get the compute dtype", "Remove it", allowed=((),)),
    ] = ()
