"""Optimizer classes that torch does not have: those of DeepSpeed's configs. Each updates one parameter after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

_Betas = tuple[float, float]


class PerParameterOptimizer(Optimizer):
    """Updates each parameter from its gradient alone. A subclass says how."""

    def __init__(self, params: ParamsT, lr: float | Tensor, betas: _Betas, weight_decay: float, **more: Any) -> None:
        """
        Args:
            params: parameters or groups, as in `torch.optim`.
            lr, betas, weight_decay: hyperparameters.
            more: further ones.

        Raises:
            ValueError: one of those, or "eps", is out of range.
        """
        # `not x >= 0`, so that NaN is refused as well.
        if not float(lr) >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not more.get("eps", 0.0) >= 0.0:
            raise ValueError(f"Invalid epsilon value: {more['eps']}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, **more})

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the model's loss with gradients; called once, before the update.

        Returns:
            What the closure returned, or None without one.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    # As in torch: a parameter without a gradient is left alone, and its weight does not decay.
                    if param.grad is None:
                        continue
                    if param.grad.is_sparse:
                        raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
                    self._update(param, param.grad, group)
        return loss

    @abstractmethod
    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update ``param`` and its state, without recording a graph."""

    def _state_of(self, param: Tensor, *names: str, step_on: Any = None) -> dict[str, Any]:
        """The parameter's state; in its first update zeros of these names, and a step count if it has a device for one."""
        state: dict[str, Any] = self.state[param]
        if not state:
            if step_on is not None:
                state["step"] = torch.zeros((), dtype=torch.float32, device=step_on)
            state.update({name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in names})
        return state


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
        lr: float | Tensor = 1e-4,
        betas: _Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay, maximize=maximize)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        exp_avg, (beta1, beta2) = self._state_of(param, "exp_avg")["exp_avg"], group["betas"]
        # A tensor lr may be mutated in place by schedulers, and `alpha` wants a number.
        lr = float(group["lr"])
        if group["maximize"]:
            grad = -grad
        # Decoupled decay before the step, as torch's AdamW does it.
        if group["weight_decay"] != 0:
            param.mul_(1 - lr * group["weight_decay"])
        # The update mixes with beta1, the stored momentum with beta2: it is advanced only after the update was taken.
        direction = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        param.add_(direction, alpha=-lr)
        exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


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
        lr: float | Tensor = 1e-3,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay, eps=eps, decoupled_weight_decay=decoupled_weight_decay)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(param, "exp_avg", "exp_avg_sq")
        lr, decay = float(group["lr"]), group["weight_decay"]
        if decay and not group["decoupled_weight_decay"]:
            grad = grad.add(param, alpha=decay)
        _advance_moments(state, grad, group["betas"])
        if decay and group["decoupled_weight_decay"]:
            param.mul_(1 - lr * decay)
        param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-lr)


def _advance_moments(state: dict[str, Any], grad: Tensor, betas: _Betas) -> None:
    state["exp_avg"].lerp_(grad, 1 - betas[0])
    state["exp_avg_sq"].mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])


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
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        if not 0.0 <= min_coeff <= max_coeff:
            raise ValueError(f"Invalid bounds of the quotient of norms: min_coeff {min_coeff}, max_coeff {max_coeff}")
        of_moments = {"bias_correction": bias_correction, "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        super().__init__(params, lr, betas, weight_decay, **of_moments, max_coeff=max_coeff, min_coeff=min_coeff)

    def get_lamb_coeffs(self) -> list[float]:
        """Empty: the quotients of norms, which scripts for DeepSpeed plot, are not kept."""
        return []

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(param, "exp_avg", "exp_avg_sq", step_on="cpu")
        step, exp_avg_sq, eps, (beta1, beta2) = state["step"], state["exp_avg_sq"], group["eps"], group["betas"]
        step += 1
        _advance_moments(state, grad, group["betas"])
        # A fresh tensor: it becomes the update in place, so that a step needs one temporary of the parameter's size.
        update = (exp_avg_sq + eps).sqrt_() if group["eps_inside_sqrt"] else exp_avg_sq.sqrt().add_(eps)
        torch.div(state["exp_avg"], update, out=update)
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        weight_norm, update_norm = param.norm(), update.norm()
        quotient = (weight_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"])
        # A weight of zeros, or an update of zeros, would make the quotient 0 or infinite: such a step is Adam's.
        quotient = torch.where((weight_norm != 0) & (update_norm != 0), quotient, 1.0)
        rate = float(group["lr"])
        if group["bias_correction"]:
            # DeepSpeed corrects the rate and not the moments, so the decay term is corrected along with them.
            rate *= (1 - beta2 ** float(step)) ** 0.5 / (1 - beta1 ** float(step))
        param.sub_(update.mul_(quotient * rate))


# Embeddings and output heads meet single tokens: their rows are vectors, not maps between spaces.
_OTHERS = ("embed", "lm_head")
"""In names of matrices that Adam updates."""
# Of x, x**3 and x**5 (Jordan, 2024). Five rounds bring singular values from 0.01 to 1 to between 0.68 and 1.13;
# converging to 1 would take more rounds.
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
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
        betas: _Betas = (0.9, 0.95),
        eps: float = 1e-10,
        ns_method: str = "gram",
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"Invalid momentum: {momentum}")
        if ns_method not in ("gram", "standard"):
            raise ValueError(f"Invalid ns_method: {ns_method!r}, not 'gram' or 'standard'")
        # A kind's own rate, then the common one, then the default.
        rates = {True: (muon_lr, lr, 0.02), False: (adam_lr, lr, 3e-4)}
        groups = []
        for index, group in enumerate(params):
            if not isinstance(group, dict) or "use_muon" not in group:
                raise ValueError(f"group {index} has no 'use_muon': set it to True for Muon, or to False for Adam")
            rate = next(rate for rate in rates[bool(group["use_muon"])] if rate is not None)
            if not rate >= 0.0:
                raise ValueError(f"Invalid learning rate: {rate}")
            groups.append({"lr": rate, **group})  # a group's own "lr" wins
        super().__init__(groups, 0.0, betas, weight_decay, momentum=momentum, eps=eps)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim`.

        Raises:
            ValueError: it does not say `use_muon`, or does and holds a vector.
        """
        super().add_param_group(param_group)  # torch checks it, and fills in the defaults
        group = self.param_groups[-1]
        vectors = [param for param in group["params"] if param.dim() < 2 and group.get("use_muon")]
        if vectors or "use_muon" not in group:
            self.param_groups.pop()  # nothing is kept of a refused group
            what = f"holds a parameter of shape {tuple(vectors[0].shape)}" if vectors else "has no 'use_muon'"
            raise ValueError(f"group {len(self.param_groups)} {what}, and Muon is for matrices")

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        names = ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq")
        state = self._state_of(param, *names)
        param.mul_(1 - lr * group["weight_decay"])
        if group["use_muon"]:
            buffer, momentum = state["momentum_buffer"], group["momentum"]
            buffer.lerp_(grad, 1 - momentum)
            # Nesterov: the gradient is mixed in once more.
            update = grad.lerp(buffer, momentum)
            matrix = update.flatten(1) if update.dim() == 4 else update  # a convolution: (out, in * height * width)
            # Tall matrices get larger updates. The last two dimensions count, of convolutions, too.
            scale = max(1.0, grad.shape[-2] / grad.shape[-1]) ** 0.5
            param.add_(_orthogonal(matrix).reshape(param.shape).to(param.dtype), alpha=-lr * scale)
            return
        state["step"] = state.get("step", 0) + 1
        _advance_moments(state, grad, group["betas"])
        root = state["exp_avg_sq"].div(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
        param.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1 ** state["step"]))


def _orthogonal(matrix: Tensor) -> Tensor:
    """(..., rows, columns), any dtype -> the same shape, bf16 or fp32."""
    # Wide: x @ x.mT then has the smaller of both sizes.
    is_high = matrix.shape[-2] > matrix.shape[-1]
    # bf16 on a GPU, as in Jordan's code: rounds that do not converge need no more.
    x = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    x = x.mT if is_high else x
    # The Frobenius norm bounds the largest singular value: all lie between 0 and 1. 1e-7: a gradient of zeros stays
    # zero.
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    first, third, fifth = _POLYNOMIAL
    for _ in range(_NUM_ROUNDS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * square @ square) @ x
    result: Tensor = x.mT if is_high else x
    return result


IS_MOMENTUM = "is_momentum"
"""In a group's hyperparameters: what stands in the place of gradients is the new momentum."""
_ADAMW: dict[str, Any] = {"foreach": False, "decoupled_weight_decay": True, "amsgrad": False, "maximize": False}


class OneBitAdam(PerParameterOptimizer):
    """1-bit Adam by Algorithm 1 of "1-bit Adam" (Tang et al., 2021, arXiv 2102.02888).

    In a parameter's first ``freeze_step`` steps (the warm-up) it is AdamW. Then, per element, with gradient `g`, momentum `m`,
    weight `w`, and the variance `v` as the warm-up has left it::

        m = beta1 * m + (1 - beta1) * g
        w = w - lr * (m / (sqrt(v) + eps) + weight_decay * w)

    Several processes compress `m` between these two lines (``infinity.updates.momenta``). An element whose `v` is zero has had no
    gradient in the warm-up, and keeps its weight but for the decay: `m` would be divided by ``eps`` alone.

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
        lr: float | Tensor = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        fused: bool | None = None,
    ) -> None:
        if freeze_step < 1:
            raise ValueError(f"Invalid freeze_step: {freeze_step}. Without a warm-up there is no variance to divide by")
        of_warm_up = {"freeze_step": freeze_step, "bias_correction": bias_correction, "fused": fused}
        super().__init__(params, lr, betas, weight_decay, eps=eps, **of_warm_up)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        step_on = param.device if group["fused"] else "cpu"
        state = self._state_of(param, "exp_avg", "exp_avg_sq", step_on=step_on)
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
        is_warming_up = float(step) < group["freeze_step"]
        if is_warming_up and group["bias_correction"]:
            # torch's own function: the warm-up has AdamW's bits.
            rates = {name: group[name] for name in ("lr", "weight_decay", "eps")} | {"beta1": beta1, "beta2": beta2}
            adam([param], [grad], [exp_avg], [exp_avg_sq], [], [step], fused=bool(group["fused"]), **_ADAMW, **rates)
            return
        step += 1
        if group.get(IS_MOMENTUM, False):
            exp_avg.copy_(grad)  # the ranks have mixed it with the old momentum, and compressed their mean
        else:
            exp_avg.lerp_(grad, 1 - beta1)
        if is_warming_up:
            exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        lr, of_avg, of_sq = float(group["lr"]), 1.0, 1.0
        if group["bias_correction"]:
            # The variance does not change after the warm-up, so its correction is that of the last warm-up step.
            of_avg, of_sq = 1 - beta1 ** float(step), 1 - beta2 ** group["freeze_step"]
        update = exp_avg / (exp_avg_sq / of_sq).sqrt_().add_(group["eps"])
        if not is_warming_up:
            update.masked_fill_(exp_avg_sq == 0, 0.0)  # no gradient in the warm-up: eps alone would divide
        param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr / of_avg)
