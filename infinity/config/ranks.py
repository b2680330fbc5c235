"""What a config may not say where several processes train together."""

from __future__ import annotations

from infinity.config.schema.blocks import RootBlock
from infinity.errors import ConfigValueError


def check_ranks(root: RootBlock, world_size: int) -> None:
    """Refuse what would give other numbers than are promised, or has no meaning yet, with ``world_size`` processes.

    Raises:
        ConfigValueError: key, value and cure.
    """
    if world_size == 1:
        return
    block, zero = root.infinity, root.zero_optimization
    refused = [
        (
            "infinity.gradient_dtype",
            block.gradient_dtype,
            block.gradient_dtype == "bf16",
            "the mean over all would be rounded",
            '"auto"',
        ),
        (
            "gradient_allreduce_op",
            root.gradient_allreduce_op,
            root.gradient_allreduce_op == "sum",
            "gradients are averaged",
            '"mean", and multiply the learning rate or the loss',
        ),
        (
            "communication_data_type",
            root.communication_data_type,
            root.communication_data_type not in ("fp32", "float32"),
            "gradients are averaged in fp32",
            '"fp32", or leave it out',
        ),
        *(
            (f"zero_optimization.{name}", value, value, "what is exchanged is never rounded", "false")
            for name, value in (
                ("zero_quantized_weights", zero.zero_quantized_weights),
                ("zero_quantized_gradients", zero.zero_quantized_gradients),
            )
        ),
    ]
    for key, value, is_refused, problem, cure in refused:
        if is_refused:
            raise ConfigValueError(
                key, value, f"{world_size} processes train together: {problem}", cure=f"Set it to {cure}"
            )
