"""What a config may not say where several processes train together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infinity.config.resolved import InfinityConfig
from infinity.config.schema.blocks import RootBlock
from infinity.distributed.agreement import together
from infinity.distributed.collectives import Ranks
from infinity.errors import ConfigError, RankError

_ROUNDED = "what is exchanged is never rounded"


def check_ranks(root: RootBlock, world_size: int) -> None:
    """Refuse what would give other numbers than are promised, or has no meaning yet, with ``world_size`` processes.

    Raises:
        ConfigError: key, value and cure.
    """
    if world_size == 1:
        return
    block, zero = root.infinity, root.zero_optimization
    size = zero.mics_shard_size
    if size > 0 and world_size % size:
        raise _uneven("mics_shard_size", size, world_size)
    check_weight_group(zero.zero_hpz_partition_size, size if size > 0 else world_size)
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


def check_weight_group(size: int, num_sharing: int) -> None:
    """Refuse groups for weights into which those that divide states cannot be divided.

    Raises:
        ConfigError: key, value and cure.
    """
    if 0 < size < num_sharing and num_sharing % size:
        raise _uneven("zero_hpz_partition_size", size, num_sharing)


def _uneven(name: str, size: int, num: int) -> ConfigError:
    sizes = ", ".join(str(each) for each in range(1, num + 1) if num % each == 0)
    return ConfigError.value(
        f"zero_optimization.{name}",
        size,
        f"{num} processes cannot be divided into groups of {size}",
        cure=f"Set it to one of {sizes}, or leave it out",
    )


def check_same_config(config: InfinityConfig, ranks: Ranks) -> None:
    """Refuse configs that differ in what decides numbers, or who exchanges what. Paths, budgets and I/O are each process's own.

    Raises:
        ConfigError: the first key that differs, its values and whose they are, on all of them.
    """
    section = config.infinity
    own = {
        "zero_optimization.stage": config.zero_stage,
        "zero_optimization.mics_shard_size": config.shard_size,
        "zero_optimization.zero_hpz_partition_size": config.weight_group_size,
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
    told = together(ranks, "the config of infinity.initialize", lambda: {key: str(value) for key, value in own.items()})
    for key in own:
        values = [of_rank[key] for of_rank in told]
        if len({*values}) > 1:
            shown = ", ".join(f"{value} on rank {number}" for number, value in zip(ranks.members, values, strict=True))
            raise ConfigError.value(key, own[key], f"it is {shown}", cure="Give all processes the same config")


def check_comm_hook(config: InfinityConfig, hook: Callable[..., Any], ranks: Ranks, *, exchanges_momenta: bool) -> None:
    """Refuse a communication hook that the config does not go with, or that not all ranks have. All of them come here.

    Args:
        config: as the engine has it.
        hook: as the script gave it.
        ranks: who averages gradients.
        exchanges_momenta: whether 1-bit Adam does.

    Raises:
        ConfigError: gradients are divided, or the optimizer has an exchange of its own.
        RankError: other ranks have another hook, or none.
    """
    if config.zero_stage > 1:
        raise ConfigError.value(
            "zero_optimization.stage",
            config.zero_stage,
            "a communication hook needs whole gradients on each process, and this stage divides them",
            cure="Set it to 0 or 1, or leave the hook out",
        )
    if exchanges_momenta:
        raise ConfigError.value(
            "optimizer.type",
            "OneBitAdam",
            "it exchanges momenta in one bit, and would leave the communication hook out after its warm-up",
            cure='Take "Adam" with the hook, or OneBitAdam without',
        )
    what, name = "engine.register_comm_hook", getattr(hook, "__qualname__", type(hook).__qualname__)
    found = together(ranks, what, lambda: name)
    if len({*found}) > 1:
        pairs = ", ".join(f"{each} on rank {number}" for number, each in zip(ranks.members, found, strict=True))
        raise RankError(
            what, f"the hooks are {pairs}", rank=ranks.number, cure="Register the same one on all processes"
        )
