"""Packed weights in plain torch, written down from their definitions: what an engine with ``frozen_dtype`` computes with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def nf4(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 64 in C order; the nearest level of the quotient by the block's largest magnitude."""
    flat = weight.detach().reshape(-1).float()
    found = []
    for block in flat.split(64):
        scale = block.abs().max().clamp(min=1e-38)
        quotients = block * (1 / scale) if len(block) == 64 else block / scale
        found.append(_NF4[torch.searchsorted((_NF4[1:] + _NF4[:-1]) / 2, quotients)] * scale)
    return torch.cat(found).view(weight.shape).to(weight.dtype)


def int8(weight: torch.Tensor) -> torch.Tensor:
    """By rows."""
    rows = weight.detach().reshape(-1, weight.shape[-1]).float()
    largest = rows.abs().amax(dim=1, keepdim=True)
    codes = torch.where(largest > 0, (rows * (127 / largest)).round(), torch.zeros(()))
    return (codes * largest * 7.874015718698502e-3).view(weight.shape).to(weight.dtype)


def fp8_e4m3(weight: torch.Tensor) -> torch.Tensor:
    """By tiles of 128 x 128."""
    values = weight.detach().reshape(-1, weight.shape[-1]).float()
    found = values.clone()
    for top in range(0, values.shape[0], 128):
        for left in range(0, values.shape[1], 128):
            tile = values[top : top + 128, left : left + 128]
            scale = tile.abs().max() / 448
            scale = scale if scale > 0 else torch.ones(())
            found[top : top + 128, left : left + 128] = (tile / scale).to(torch.float8_e4m3fn).float() * scale
    return found.view(weight.shape).to(weight.dtype)


def bf16(weight: torch.Tensor) -> torch.Tensor:
    """A cast, and back."""
    return weight.detach().to(torch.bfloat16).to(weight.dtype)


FORMATS = {"nf4": nf4, "int8": int8, "fp8_e4m3": fp8_e4m3, "bf16": bf16}


def quantize(model: nn.Module, name: str = "nf4", dtype: torch.dtype = torch.float32) -> Any:
    """Round the frozen weights of a model's linear layers and experts as the engine does, in place, after a cast to ``dtype``.

    Layers of adapters stay: PEFT calls them ``lora_...``.
    """
    seen: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    for fqn, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if is_linear and "lora_" not in fqn and not module.weight.requires_grad and seen[id(module.weight)] == 1:
            before = module.weight.data
            module.weight.data = FORMATS[name](before.to(dtype)).to(before.dtype)
        if "Experts" in type(module).__name__:
            for weight in (each for each in module.parameters(recurse=False) if each.dim() == 3):
                weight.data = FORMATS[name](weight.data.to(dtype)).to(weight.dtype)
    return model
