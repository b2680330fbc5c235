"""Adam without correction for bias, which DeepSpeed's configs ask for by ``"bias_correction": false``."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from infinity.optim.classes.per_parameter import PerParameterOptimizer


class UncorrectedAdam(PerParameterOptimizer):
    """Adam of Kingma and Ba (2015, arXiv 1412.6980) without its correction for bias, as BERT was trained.

    Per element, with gradient `g`, moments `m` and `v`, weight `w`::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr * (m / (sqrt(v) + eps) + weight_decay * w)

    With ``decoupled_weight_decay=False``, ``weight_decay * w`` is added to `g` instead.

    State: `exp_avg` and `exp_avg_sq` of the parameter's shape. There is no step count.

    Args:
        params: parameters or groups, as in `torch.optim`.
        lr: learning rate.
        betas: weights of the old values in the moments.
        eps: added to the root of `v`.
        weight_decay: see above.
        decoupled_weight_decay: whether the decay is that of AdamW.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        if decay and not group["decoupled_weight_decay"]:
            grad = grad.add(param, alpha=decay)
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if decay and group["decoupled_weight_decay"]:
            param.mul_(1 - lr * decay)
        param.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(group["eps"]), value=-lr)
