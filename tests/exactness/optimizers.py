"""The AdamW of the grid, in the three ways a user can ask for it, and what torch would run for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.05

# Small enough to clip every step of every case; the suite's own tests make sure of it.
MAX_NORM = 0.1

CONFIG_SECTION = {
    "type": "AdamW",
    "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY},
}


def parameter_groups(named: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Groups in another order than the model's: one without decay, one with other betas, and the rest."""
    few_dims = [p for p in named.values() if p.dim() < 2]
    many_dims = [p for p in named.values() if p.dim() >= 2]
    groups = [
        {"params": few_dims, "weight_decay": 0.0},
        {"params": many_dims[1::2], "betas": (0.8, 0.9), "lr": 2 * LEARNING_RATE},
        {"params": many_dims[0::2]},
    ]
    return [group for group in groups if group["params"]]


def torch_optimizer(kind: str, named: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """What runs in plain torch for the row's ``optimizer``.

    The config's AdamW is torch's fused one; an instance runs as its owner made it, here with torch's defaults.
    """
    params: Any = list(named.values()) if kind == "config" else parameter_groups(named)
    fused = None if kind == "instance" else True
    return torch.optim.AdamW(params, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=fused)


def decay_learning_rates(param_groups: list[dict[str, Any]]) -> None:
    """A schedule in one line: a hyperparameter that changes between steps, in every group."""
    for group in param_groups:
        group["lr"] *= 0.75
