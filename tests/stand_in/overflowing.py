"""What a script of accelerate's sees of an fp16 step whose gradients are not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

OVERFLOWING = {"skipped": [False, True, False], "moved": [True, False, True], "rates": [0.005, 0.005, 0.0025]}
"""Of the second of three steps."""


def overflowing(accelerator: Any) -> dict[str, list[Any]]:
    """Train three steps, the second with gradients beyond fp16: which were skipped, moved weights, and rates after each."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    found: dict[str, list[Any]] = {"skipped": [], "moved": [], "rates": []}
    for factor in (1.0, 1e30, 1.0):
        before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        accelerator.backward(model(torch.ones(4, 8, dtype=torch.float16)).float().square().mean() * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if optimizer.step_was_skipped is not accelerator.optimizer_step_was_skipped:
            raise RuntimeError("optimizer and accelerator do not agree")
        found["skipped"].append(optimizer.step_was_skipped)
        after = accelerator.get_state_dict(model)
        found["moved"].append(any(not torch.equal(after[name], value) for name, value in before.items()))
        found["rates"].append(scheduler.get_last_lr()[0])
    return found
