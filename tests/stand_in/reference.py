"""What plain libraries are compared with where they have no 16-bit training of DeepSpeed's kind."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def with_main_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the model's weights bf16, with fp32 gradients, and have its optimizer, not used yet, update fp32 copies of them.

    Its buffers keep their dtype, but those of batch norms, which torch wants in the weights'. Gradients are where they
    always are.
    """
    pairs = {parameter: nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()}
    for parameter, main in pairs.items():
        parameter.data = parameter.data.bfloat16()
        if parameter.requires_grad:
            parameter.grad_dtype = None  # whatever dtype it gets: fp32 by the hook, and then 16 bits are added to that
            parameter.register_post_accumulate_grad_hook(partial(_widen, main=main))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.bfloat16()
    for group in optimizer.param_groups:
        group["params"] = [pairs[parameter] for parameter in group["params"]]

    @torch.no_grad()
    def end(*_: Any) -> None:
        for parameter, main in pairs.items():
            parameter.copy_(main)
            parameter.grad = None

    optimizer.register_step_post_hook(end)


def _widen(parameter: torch.Tensor, *, main: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = main.grad = parameter.grad.float()
