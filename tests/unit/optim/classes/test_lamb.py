"""LAMB against its formula, written down in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from infinity.optim.classes.lamb import Lamb


def _expected(weight: torch.Tensor, grads: list[torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    given = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_coeff": 10.0, "min_coeff": 0.01, **settings}
    beta1, beta2 = given["betas"]
    w, m, v = weight.double(), torch.zeros_like(weight).double(), torch.zeros_like(weight).double()
    for step, grad in enumerate(grads, start=1):
        g = grad.double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        root = (v + given["eps"]).sqrt() if given.get("eps_inside_sqrt") else v.sqrt() + given["eps"]
        u = m / root + given["weight_decay"] * w
        quotient = 1.0
        if w.norm() > 0 and u.norm() > 0:
            quotient = min(max(float(w.norm() / u.norm()), given["min_coeff"]), given["max_coeff"])
        correction = 1.0
        if given.get("bias_correction", True):
            correction = math.sqrt(1 - beta2**step) / (1 - beta1**step)
        w = w - given["lr"] * correction * quotient * u
    return w


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-3},
        {"lr": 0.1, "bias_correction": False},
        {"lr": 0.1, "eps_inside_sqrt": True, "eps": 1e-2},
        {"lr": 0.1, "max_coeff": 0.2},
        {"lr": 0.01, "min_coeff": 5.0},
    ],
)
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_lamb_follows_its_formula(start: float, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    weight = start * torch.randn(13, 11)
    grads = [torch.randn(13, 11) for _ in range(3)]
    param = torch.nn.Parameter(weight.clone())
    optimizer = Lamb([param], **settings)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(param.detach().double(), _expected(weight, grads, settings), rtol=1e-5, atol=1e-6)
    assert float(optimizer.state[param]["step"]) == 3


def test_wrong_arguments_are_named() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"lr": -1.0}, "learning rate"),
        ({"betas": (0.9, 1.0)}, "beta parameter at index 1"),
        ({"eps": -1.0}, "epsilon"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff 2.0, max_coeff 1.0"),
    ]
    for settings, message in wrong:
        with pytest.raises(ValueError, match=message):
            Lamb([param], **settings)
