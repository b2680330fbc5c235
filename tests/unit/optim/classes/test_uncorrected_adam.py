"""Adam without correction for bias against its formula, written down in float64."""

from __future__ import annotations

import pytest
import torch

from infinity.optim.classes.uncorrected_adam import UncorrectedAdam


@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_it_follows_its_formula(decay: float, is_decoupled: bool) -> None:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(13, 11))
    w = param.detach().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    optimizer = UncorrectedAdam(
        [param], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=decay, decoupled_weight_decay=is_decoupled
    )
    for _ in range(3):
        param.grad = torch.randn(13, 11)
        g = param.grad.double() + (0.0 if is_decoupled else decay) * w
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w = w - 0.1 * (m / (v.sqrt() + 1e-3) + (decay if is_decoupled else 0.0) * w)
        optimizer.step()
    torch.testing.assert_close(param.detach().double(), w, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_named() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    for settings, message in (
        ({"lr": -1.0}, "learning rate"),
        ({"betas": (1.0, 0.9)}, "beta parameter at index 0"),
        ({"eps": -1.0}, "epsilon"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ):
        with pytest.raises(ValueError, match=message):
            UncorrectedAdam([param], **settings)  # type: ignore[arg-type]
