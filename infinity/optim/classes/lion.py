"""Lion: an optimizer whose update is the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from infinity.optim.classes.per_parameter import PerParameterOptimizer


class Lion(PerParameterOptimizer):
    """Lion by Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023).

    Per element, with gradient `g`, momentum `m`, weight `w`::

        c = beta1 * m + (1 - beta1) * g
        w = w - lr * (sign(c) + weight_decay * w)
        m = beta2 * m + (1 - beta2) * g

    State: `exp_avg`, of the parameter's shape and dtype. There is no step count: nothing is corrected for bias.

    Args:
        params: parameters or groups, as in `torch.optim`.
        lr: learning rate; three to ten times smaller than AdamW's is usual.
        betas: weights of the old momentum in the update and in the new momentum.
        weight_decay: decoupled, multiplied by `lr`.
        maximize: go up the gradient instead of down.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        exp_avg = state["exp_avg"]
        beta1, beta2 = group["betas"]
        # A tensor lr may be mutated in place by schedulers, and `alpha` wants a number.
        lr = float(group["lr"])
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"] != 0:
            param.mul_(1 - lr * group["weight_decay"])
        direction = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        param.add_(direction, alpha=-lr)
        exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
