"""What a config may not say where several processes train together."""

from __future__ import annotations

from infinity.config.resolved import InfinityConfig
from infinity.config.schema.blocks import RootBlock
from infinity.distributed.agreement import differing
from infinity.distributed.collectives import Ranks
from infinity.errors import ConfigError

_ROUNDED = "what is exchanged is never rounded"


def check_ranks(root: RootBlock, world_size: int) -> None:
    """Refuse keys that ``world_size`` processes would round, or that mean nothing with several.

    Raises:
        ConfigError: key, value and cure.
    """
    if world_size == 1:
        return
    block, zero = root.infinity, root.zero_optimization
    # One process exchanges nothing, so these keys have no effect there (see NoEffect in the schema).
    averaged = '"mean", and multiply the learning rate or the loss'
    for key, value, refused, problem, cure in (
        ("infinity.gradient_dtype", block.gradient_dtype, "bf16", "the mean over all would be rounded", '"auto"'),
        ("gradient_allreduce_op", root.gradient_allreduce_op, "sum", "gradients are averaged", averaged),
        ("zero_optimization.zero_quantized_weights", zero.zero_quantized_weights, True, _ROUNDED, "false"),
        ("zero_optimization.zero_quantized_gradients", zero.zero_quantized_gradients, True, _ROUNDED, "false"),
    ):
        if value == refused:
            problem = f"{world_size} processes train together: {problem}"
            raise ConfigError.value(key, value, problem, cure=f"Set it to {cure}")


def check_same_config(config: InfinityConfig, ranks: Ranks) -> None:
    """Refuse configs of ranks that differ in a key that all have to share. Paths, budgets and I/O may differ.

    A collective: all ranks call it.

    Raises:
        ConfigError: on every rank; names the first key that differs, and the value of each rank.
    """
    section = config.infinity
    # Each entry changes either the numbers or which collectives run, in which order. Ranks that differ in one of them
    # would diverge silently, or wait for each other without end. Values are compared as text: dtypes and sections are
    # no JSON.
    own = {
        "zero_optimization.stage": config.zero_stage,
        "bf16, fp16": config.compute_dtype,
        "torch_autocast": config.autocast_dtype,
        "fp16.loss_scale": config.loss_scaling,
        "bf16.check_grad_overflow": config.checks_overflow,
        "data_types.buffer_dtype": config.buffer_dtype,
        "communication_data_type": config.communication_dtype,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "managed_gradient_accumulation": config.managed_gradient_accumulation,
        "gradient_clipping": config.gradient_clipping,
        "infinity.main_weights": section.main_weights,
        "infinity.state_dtype": section.state_dtype,
        "infinity.frozen_dtype": section.frozen_dtype,
        "infinity.gradient_dtype": section.gradient_dtype,
        "infinity.units": section.units,
        "infinity.tile_above": section.tile_above,
        "infinity.experts": section.experts,
        "infinity.durable": section.durable is not None,
    }
    found = differing(ranks, "the config of infinity.initialize", {key: str(value) for key, value in own.items()})
    if found is not None:
        key, shown = found
        raise ConfigError.value(key, own[key], f"it is {shown}", cure="Give all processes the same config")
