"""DeepSpeed's estimates of the memory that a model's states need, by its names: bytes per parameter, times a factor for buffers.

They say nothing of this engine, for which `infinity plan` does.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from infinity.console import Console

_GIB = 1 << 30


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """DeepSpeed's estimate for ZeRO-3.

    Returns:
        Bytes of each node's memory, of each GPU's, and of the largest layer.
    """
    layer_bytes = 4 * largest_layer_params
    if not cpu_offload:
        device = layer_bytes + int(18 * total_params / (num_nodes * num_gpus_per_node))
        unit = largest_layer_params if zero_init else total_params
        return int(unit * 4 * num_gpus_per_node * additional_buffer_factor), device, layer_bytes
    per_param = (18 if cpu_offload_params else 16) / num_nodes
    if not zero_init:
        per_param = max(4 * num_gpus_per_node, per_param)
    device = (
        layer_bytes if cpu_offload_params else layer_bytes + int(2 * total_params / (num_nodes * num_gpus_per_node))
    )
    return int(total_params * per_param * additional_buffer_factor), device, layer_bytes


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """DeepSpeed's estimate for ZeRO-2.

    Returns:
        Bytes of each node's memory, and of each GPU's.
    """
    num_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * num_gpus, 16) * additional_buffer_factor), 2 * total_params
    host = int(total_params * 4 * num_gpus_per_node * additional_buffer_factor)
    return host, 2 * total_params + int(18 * total_params / num_gpus)


def estimate_zero3_model_states_mem_needs_all_live(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_cold`, for a model, which may lie on the meta device."""
    estimate_zero3_model_states_mem_needs_all_cold(*_params_of(model), *args, **kwargs)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print DeepSpeed's table for ZeRO-3.

    Args:
        total_params: number of all parameters.
        largest_layer_params: of the largest layer.
        num_gpus_per_node, num_nodes, additional_buffer_factor: of the cluster, and for buffers.
    """
    rows = []
    for optimizer, params in (("cpu ", "cpu "), ("cpu ", "none"), ("none", "none")):
        for zero_init in (True, False):
            offloads = optimizer != "none", params != "none", zero_init, additional_buffer_factor
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, *offloads
            )
            options = f"offload_param={params}, offload_optimizer={optimizer}, zero_init={int(zero_init)}"
            rows.append((host, device, options))
    model = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params"
    _print(model, num_gpus_per_node, num_nodes, rows)


def estimate_zero2_model_states_mem_needs_all_live(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_live`, with DeepSpeed's table for ZeRO-2."""
    estimate_zero2_model_states_mem_needs_all_cold(_params_of(model)[0], *args, **kwargs)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_cold`, with DeepSpeed's table for ZeRO-2."""
    rows = []
    for optimizer in ("cpu ", "none"):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, optimizer != "none", additional_buffer_factor
        )
        rows.append((host, device, f"offload_optimizer={optimizer}"))
    _print(f"{int(total_params / 1e6)}M total params", num_gpus_per_node, num_nodes, rows)


def _print(model: str, num_gpus: int, num_nodes: int, rows: list[tuple[int, int, str]]) -> None:
    nodes, gpus = "nodes" if num_nodes > 1 else "node", "GPUs" if num_gpus > 1 else "GPU"
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {num_nodes} {nodes}, {num_gpus} {gpus} per node.",
        f"SW: Model with {model}.",
        "  per CPU  |  per GPU |   Options",
        *(f" {host / _GIB:7.2f}GB | {device / _GIB:6.2f}GB | {options}" for host, device, options in rows),
        "This engine pages what does not fit: infinity plan says what a run takes.",
    ]
    Console(soft_wrap=True, markup=False, highlight=False).print("\n".join(lines))


def _params_of(model: nn.Module) -> tuple[int, int]:
    """Number of all parameters, and of those of the module with most of its own."""
    layers = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    return sum(p.numel() for p in model.parameters()), max(layers, default=0)
