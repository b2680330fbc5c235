"""What plain libraries are compared with where they have no 16-bit training of DeepSpeed's kind."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn


class MainWeightAdamW(torch.optim.AdamW):
    """AdamW over fp32 copies of 16-bit weights, fed with fp32 copies of their gradients, clipped to a global norm.

    Makes the model's weights 16-bit; its buffers keep their dtype.
    """

    def __init__(self, model: nn.Module, decayed: Collection[str], arguments: Any, clip: float) -> None:
        self._pairs = [(p, nn.Parameter(p.detach().clone())) for p in model.parameters()]
        for parameter, _ in self._pairs:
            parameter.data = parameter.data.bfloat16()
        self._clip = clip
        main = {name: pair[1] for (name, _), pair in zip(model.named_parameters(), self._pairs, strict=True)}
        groups = [
            {"params": [p for name, p in main.items() if name in decayed], "weight_decay": arguments.weight_decay},
            {"params": [p for name, p in main.items() if name not in decayed], "weight_decay": 0.0},
        ]
        super().__init__(groups, lr=arguments.learning_rate, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter, main in self._pairs:
            main.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        if self._clip:
            nn.utils.clip_grad_norm_([main for _, main in self._pairs], self._clip)
        super().step(closure)
        for parameter, main in self._pairs:
            parameter.copy_(main)
