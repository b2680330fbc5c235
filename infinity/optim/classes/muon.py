"""Muon for the matrices inside a model and Adam for the rest of it, as DeepSpeed's configs ask for by ``"type": "Muon"``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from infinity.optim.classes.per_parameter import PerParameterOptimizer

_OTHERS = ("embed", "lm_head")
"""In names of matrices that go by Adam: those that meet single tokens."""
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x**3 and x**5: they bring singular values between 0 and 1 near 1 in few rounds (Jordan, 2024)."""
_NUM_ROUNDS = 5


def is_for_muon(fqn: str, param: Tensor) -> bool:
    """Whether a parameter is one of the matrices, as its attribute ``use_muon`` says, or DeepSpeed's rule for names."""
    is_inside = param.dim() >= 2 and not any(word in fqn.lower() for word in _OTHERS)
    return bool(getattr(param, "use_muon", is_inside))


class Muon(PerParameterOptimizer):
    """Muon of Jordan et al. (2024, kellerjordan.github.io/posts/muon), with Adam for what is no matrix.

    With gradient `g`, momentum buffer `m`, weight `w` of (rows, columns), in groups with ``use_muon``::

        m = momentum * m + (1 - momentum) * g
        u = orthogonal(momentum * m + (1 - momentum) * g) * sqrt(max(1, rows / columns))
        w = (1 - lr * weight_decay) * w - lr * u

    where `orthogonal` brings all singular values near 1, by five rounds of a polynomial of degree 5 (Newton-Schulz), in
    bf16 on a GPU and in fp32 on a CPU. Kernels of convolutions are one matrix each, with a row for each channel of their
    output. In the other groups: Adam of Kingma and Ba, whose decay is AdamW's.

    State: `momentum_buffer`; or `exp_avg` and `exp_avg_sq`, all of the parameter's shape, and `step`.

    Args:
        params: groups, each with ``use_muon``.
        lr: learning rate of groups without one. None: 0.02 with `use_muon`, and 3e-4.
        muon_lr, adam_lr: the same, of one kind of groups.
        momentum: weight of the old value in `m`.
        weight_decay: see above.
        betas, eps: of Adam.
        ns_method: "standard" or "gram", DeepSpeed's names of two ways to the same product: without effect.

    Raises:
        ValueError: an argument is out of range, a group does not say `use_muon`, or does and holds a vector.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        *,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        ns_method: str = "gram",
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"Invalid momentum: {momentum}")
        if ns_method not in ("gram", "standard"):
            raise ValueError(f"Invalid ns_method: {ns_method!r}, not 'gram' or 'standard'")
        rates = {True: (muon_lr, lr, 0.02), False: (adam_lr, lr, 3e-4)}
        groups = []
        for index, group in enumerate(params):
            if not isinstance(group, dict) or "use_muon" not in group:
                raise ValueError(f"group {index} does not say whether it is Muon's: 'use_muon': True or False")
            rate = next(rate for rate in rates[bool(group["use_muon"])] if rate is not None)
            if not rate >= 0.0:
                raise ValueError(f"Invalid learning rate: {rate}")
            groups.append({"lr": rate, **group})
        defaults = {"lr": 0.0, "momentum": momentum, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim`.

        Raises:
            ValueError: it does not say `use_muon`, or does and holds a vector.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        vectors = [param for param in group["params"] if param.dim() < 2 and group.get("use_muon")]
        if vectors or "use_muon" not in group:
            self.param_groups.pop()
            what = f"holds a parameter of shape {tuple(vectors[0].shape)}" if vectors else "does not say 'use_muon'"
            raise ValueError(f"group {len(self.param_groups)} {what}, and Muon is for matrices")

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, lr = self.state[param], float(group["lr"])
        names = ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq")
        if not state:
            state.update({name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in names})
        param.mul_(1 - lr * group["weight_decay"])
        if group["use_muon"]:
            buffer, momentum = state["momentum_buffer"], group["momentum"]
            buffer.lerp_(grad, 1 - momentum)
            update = grad.lerp(buffer, momentum)
            matrix = update.flatten(1) if update.dim() == 4 else update
            scale = max(1.0, grad.shape[-2] / grad.shape[-1]) ** 0.5
            param.add_(_orthogonal(matrix).reshape(param.shape).to(param.dtype), alpha=-lr * scale)
            return
        state["step"] = state.get("step", 0) + 1
        (beta1, beta2), exp_avg, exp_avg_sq = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = exp_avg_sq.div(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
        param.addcdiv_(exp_avg, root, value=-lr / (1 - beta1 ** state["step"]))


def _orthogonal(matrix: Tensor) -> Tensor:
    """(..., rows, columns), any dtype -> the same shape, bf16 or fp32."""
    is_high = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    x = x.mT if is_high else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    first, third, fifth = _POLYNOMIAL
    for _ in range(_NUM_ROUNDS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * square @ square) @ x
    result: Tensor = x.mT if is_high else x
    return result
