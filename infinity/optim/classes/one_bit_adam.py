"""1-bit Adam's rule for one element. How ranks exchange the momentum is not an optimizer's business: see ``infinity.updates``."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from infinity.optim.classes.per_parameter import PerParameterOptimizer

IS_MOMENTUM = "is_momentum"
"""In a group's hyperparameters: what stands in the place of gradients is the new momentum."""


class OneBitAdam(PerParameterOptimizer):
    """1-bit Adam by Algorithm 1 of "1-bit Adam" (Tang et al., 2021, arXiv 2102.02888).

    In a parameter's first ``freeze_step`` steps (the warm-up) it is AdamW. Then, per element, with gradient `g`, momentum `m`,
    weight `w`, and the variance `v` as the warm-up has left it::

        m = beta1 * m + (1 - beta1) * g
        w = w - lr * (m / (sqrt(v) + eps) + weight_decay * w)

    Several processes compress `m` between these two lines. An element whose `v` is zero has had no gradient in the warm-up, and
    keeps its weight but for the decay: `m` would be divided by ``eps`` alone.

    State: `exp_avg` and `exp_avg_sq` of the parameter's shape, `step`.

    Args:
        params: parameters or groups, as in `torch.optim`.
        lr: learning rate.
        freeze_step: steps of the warm-up, at least one; 15 to 25 % of all steps are usual.
        bias_correction: whether moments are corrected as Adam does it, `v` as of the warm-up's end. False: neither is ever, as in
            the paper.
        betas: weights of the old values in momentum and variance.
        eps: added to the root of the variance.
        weight_decay: decoupled, multiplied by `lr`.
        fused: whether torch's fused kernel runs the warm-up (with ``bias_correction``).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        fused: bool | None = None,
    ) -> None:
        if freeze_step < 1:
            raise ValueError(f"Invalid freeze_step: {freeze_step}. Without a warm-up there is no variance to divide by")
        defaults = {
            "lr": lr,
            "freeze_step": freeze_step,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if group["fused"] else "cpu")
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
        is_warming_up = float(step) < group["freeze_step"]
        if is_warming_up and group["bias_correction"]:
            adam(
                [param],
                [grad],
                [exp_avg],
                [exp_avg_sq],
                [],
                [step],
                foreach=False,
                fused=bool(group["fused"]),
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            return
        step += 1
        if group.get(IS_MOMENTUM, False):
            exp_avg.copy_(grad)
        else:
            exp_avg.lerp_(grad, 1 - beta1)
        if is_warming_up:
            exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        lr, of_avg, of_sq = float(group["lr"]), 1.0, 1.0
        if group["bias_correction"]:
            of_avg, of_sq = 1 - beta1 ** float(step), 1 - beta2 ** group["freeze_step"]
        update = exp_avg / (exp_avg_sq / of_sq).sqrt_().add_(group["eps"])
        if not is_warming_up:
            update.masked_fill_(exp_avg_sq == 0, 0.0)
        param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr / of_avg)
