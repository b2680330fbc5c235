"""LAMB: Adam whose update of a parameter is scaled by norms of the whole parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from infinity.optim.classes.per_parameter import PerParameterOptimizer


class Lamb(PerParameterOptimizer):
    """LAMB of "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (You et al., 2020, arXiv 1904.00962).

    With gradient `g`, moments `m` and `v`, step count `t`, and `w` a whole weight::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        u = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * correction * clamp(norm(w) / norm(u), min_coeff, max_coeff) * u

    where ``correction`` is ``sqrt(1 - beta2 ** t) / (1 - beta1 ** t)``, and the quotient of the norms is 1 if one of them is 0.
    The bounds, and a correction that leaves the decay in, are those of DeepSpeed's ``FusedLamb``; the paper has neither.

    State: `exp_avg` and `exp_avg_sq` of the parameter's shape, `step`.

    Args:
        params: parameters or groups, as in `torch.optim`.
        lr: learning rate.
        bias_correction: whether the moments are corrected; False: ``correction`` is 1.
        betas: weights of the old values in the moments.
        eps: added to the root of `v`.
        eps_inside_sqrt: add it before the root is taken.
        weight_decay: see above.
        max_coeff, min_coeff: bounds of the quotient of the norms.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        if not 0.0 <= min_coeff <= max_coeff:
            raise ValueError(f"Invalid bounds of the quotient of norms: min_coeff {min_coeff}, max_coeff {max_coeff}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def get_lamb_coeffs(self) -> list[float]:
        """Empty: the quotients of norms, which scripts for DeepSpeed plot, are not kept."""
        return []

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        step, exp_avg, exp_avg_sq = state["step"], state["exp_avg"], state["exp_avg_sq"]
        step += 1
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        eps = group["eps"]
        update = (exp_avg_sq + eps).sqrt_() if group["eps_inside_sqrt"] else exp_avg_sq.sqrt().add_(eps)
        torch.div(exp_avg, update, out=update)
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        weight_norm, update_norm = param.norm(), update.norm()
        quotient = (weight_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"])
        quotient = torch.where((weight_norm != 0) & (update_norm != 0), quotient, 1.0)
        rate = float(group["lr"])
        if group["bias_correction"]:
            rate *= (1 - beta2 ** float(step)) ** 0.5 / (1 - beta1 ** float(step))
        param.sub_(update.mul_(quotient * rate))
