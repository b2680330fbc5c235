"""How much memory a model's states need: DeepSpeed's estimates, by its names, and what this engine takes at least.

DeepSpeed's are its formulas: bytes per parameter, times a factor for buffers. Ours are what `infinity.initialize` asks for
(`place`), so a run with that ``host_memory_budget`` begins, and one with less is refused. More of it saves traffic. Neither
has activations in it, nor the interpreter with its libraries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.config import load_config
from infinity.console import Console
from infinity.errors import BudgetTooSmallError
from infinity.plan.inputs import make_units
from infinity.plan.placement import place
from infinity.plan.sizes import Request, UnitSize, needed_together

_GIB = 1 << 30
_ADAM_STATES = 2


@dataclass(frozen=True)
class MemoryNeed:
    """What one process with this engine takes at least for weights, optimizer states (Adam) and gradients, in bf16.

    Attributes:
        offload_param, offload_optimizer: where they rest: "none", "cpu", "nvme".
        is_on_cpu: whether the CPU computes; there is no device memory then.
        budget_bytes: the least ``infinity.host_memory_budget``.
        host_bytes: of the host: that, and on a CPU the gradients of the largest unit, which autograd keeps until all are there.
        device_bytes: of the device: the two largest units, or all that stays there, and those gradients.
    """

    offload_param: str
    offload_optimizer: str
    is_on_cpu: bool
    budget_bytes: int
    host_bytes: int
    device_bytes: int

    def __str__(self) -> str:
        where = ", on a CPU" if self.is_on_cpu else ""
        options = f"offload_param={self.offload_param:4}, offload_optimizer={self.offload_optimizer:4}, infinity{where}"
        return _row(self.host_bytes, self.device_bytes, options)


def memory_needs(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> list[MemoryNeed]:
    """What this engine takes at least for a model, which may lie on the meta device.

    Args:
        model: what is to be trained, with Adam.
        dtype: of its weights: bf16, fp16 or fp32.
    """
    precision = {torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True}}}.get(dtype, {})
    found = []
    for param, optimizer, is_on_cpu in (
        ("nvme", "nvme", False),
        ("cpu", "nvme", False),
        ("none", "nvme", False),
        ("nvme", "nvme", True),
    ):
        tiers = {"offload_param": param, "offload_optimizer": optimizer}
        zero: dict[str, Any] = {name: {"device": tier, "nvme_path": "."} for name, tier in tiers.items()} | {"stage": 3}
        config = load_config({"train_batch_size": 1, "zero_optimization": zero, **precision}, check_storage=False)
        units = make_units(model, config)
        sizes = [UnitSize.of(unit, _ADAM_STATES) for unit in units]
        request = Request.of(config, model, units, budget_bytes=0, shares_host_memory=is_on_cpu)
        total = sum(size.weight_bytes for size in sizes)
        device = total if param == "none" else needed_together(sizes, request, range(len(sizes)))
        budget = _least(sizes, dataclasses.replace(request, device_budget_bytes=device))
        gradients = max(request.trainable_bytes(size) for size in sizes)
        host, device = (budget + gradients, 0) if is_on_cpu else (budget, device + gradients)
        found.append(MemoryNeed(param, optimizer, is_on_cpu, budget, host, device))
    return found


def _least(sizes: list[UnitSize], request: Request) -> int:
    try:
        return place(sizes, request).minimum_bytes
    except BudgetTooSmallError as error:
        return error.minimum_bytes


# -------------------------------------------------------------------------------------------------- DeepSpeed's estimates


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


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print DeepSpeed's table for ZeRO-3, and below it what one process with this engine takes at least.

    Args:
        model: a model, which may lie on the meta device.
        num_gpus_per_node, num_nodes, additional_buffer_factor: for DeepSpeed's rows.
    """
    total, largest = _params_of(model)
    _print(_zero3_table(total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor), memory_needs(model))


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_live`, for a model of which only sizes are known.

    Args:
        total_params: number of all parameters.
        largest_layer_params: of the largest layer; our rows are for a model of layers of that size, each a block.
        num_gpus_per_node, num_nodes, additional_buffer_factor: for DeepSpeed's rows.
    """
    table = _zero3_table(total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    _print(table, memory_needs(_model_of_layers(total_params, largest_layer_params)))


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_live`, with DeepSpeed's table for ZeRO-2."""
    table = _zero2_table(_params_of(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor)
    _print(table, memory_needs(model))


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """DeepSpeed's table for ZeRO-2. Ours needs the size of a layer: `estimate_zero3_model_states_mem_needs_all_cold`."""
    _print(_zero2_table(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor), [])


def _zero3_table(total: int, largest: int, num_gpus: int, num_nodes: int, factor: float) -> Iterator[str]:
    yield from _head(
        f"{int(total / 1e6)}M total params, {int(largest / 1e6)}M largest layer params", num_gpus, num_nodes
    )
    for optimizer, params in (("cpu ", "cpu "), ("cpu ", "none"), ("none", "none")):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total, largest, num_gpus, num_nodes, optimizer != "none", params != "none", zero_init, factor
            )
            options = f"offload_param={params}, offload_optimizer={optimizer}, zero_init={int(zero_init)}"
            yield _row(host, device, options)


def _zero2_table(total: int, num_gpus: int, num_nodes: int, factor: float) -> Iterator[str]:
    yield from _head(f"{int(total / 1e6)}M total params", num_gpus, num_nodes)
    for optimizer in ("cpu ", "none"):
        host, device = estimate_zero2_model_states_mem_needs(total, num_gpus, num_nodes, optimizer != "none", factor)
        yield _row(host, device, f"offload_optimizer={optimizer}")


def _head(model: str, num_gpus: int, num_nodes: int) -> Iterator[str]:
    nodes, gpus = "nodes" if num_nodes > 1 else "node", "GPUs" if num_gpus > 1 else "GPU"
    yield "Estimated memory needed for params, optim states and gradients for a:"
    yield f"HW: Setup with {num_nodes} {nodes}, {num_gpus} {gpus} per node."
    yield f"SW: Model with {model}."
    yield "  per CPU  |  per GPU |   Options"


def _row(host_bytes: int, device_bytes: int, options: str) -> str:
    return f" {host_bytes / _GIB:7.2f}GB | {device_bytes / _GIB:6.2f}GB | {options}"


def _print(table: Iterator[str], needs: list[MemoryNeed]) -> None:
    Console(soft_wrap=True, markup=False, highlight=False).print("\n".join([*table, *map(str, needs)]))


def _params_of(model: nn.Module) -> tuple[int, int]:
    """Number of all parameters, and of those of the module with most of its own."""
    layers = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    return sum(p.numel() for p in model.parameters()), max(layers, default=0)


def _model_of_layers(total: int, largest: int) -> nn.Module:
    sizes = [largest] * (total // largest) + [total % largest] * bool(total % largest)
    empty = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes)
    return nn.ModuleList(nn.ParameterList([values]) for values in empty)


__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "memory_needs",
]
