"""1-bit Adam of one process: AdamW in the warm-up, and the paper's formula with the variance that it left."""

from __future__ import annotations

import pytest
import torch

from infinity.optim.classes.one_bit_adam import IS_MOMENTUM, OneBitAdam

_FREEZE, _BETAS, _LR, _DECAY = 3, (0.9, 0.99), 1e-2, 0.1


def _trained(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> torch.Tensor:
    [param] = optimizer.param_groups[0]["params"]
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    return param.detach()


def _param(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=dtype))


def _gradients(num: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(50, generator=generator, dtype=dtype) for _ in range(num)]


@pytest.mark.parametrize("fused", [True, False])
def test_the_warm_up_has_the_bits_of_adamw(fused: bool) -> None:
    one_bit = OneBitAdam([_param()], lr=_LR, betas=_BETAS, weight_decay=_DECAY, freeze_step=_FREEZE, fused=fused)
    adamw = torch.optim.AdamW([_param()], lr=_LR, betas=_BETAS, weight_decay=_DECAY, fused=fused, foreach=False)
    assert torch.equal(_trained(one_bit, _gradients(_FREEZE)), _trained(adamw, _gradients(_FREEZE)))
    [last] = _gradients(1)
    assert not torch.equal(_trained(one_bit, [last]), _trained(adamw, [last]))


@pytest.mark.parametrize("corrects", [True, False])
def test_after_it_the_variance_stays(corrects: bool) -> None:
    """With and without Adam's correction, in fp64."""
    gradients = _gradients(7, torch.float64)
    param = _param(torch.float64)
    optimizer = OneBitAdam([param], _LR, _FREEZE, corrects, _BETAS, weight_decay=_DECAY)
    weight, momentum, variance = _param(torch.float64).detach(), torch.zeros(50), torch.zeros(50)
    for number, gradient in enumerate(gradients, 1):
        momentum = _BETAS[0] * momentum + (1 - _BETAS[0]) * gradient
        if number <= _FREEZE:
            variance = _BETAS[1] * variance + (1 - _BETAS[1]) * gradient.square()
        of_momentum = 1 - _BETAS[0] ** number if corrects else 1.0
        of_variance = 1 - _BETAS[1] ** min(number, _FREEZE) if corrects else 1.0
        update = (momentum / of_momentum) / ((variance / (of_variance)).sqrt() + 1e-8)
        weight = weight - _LR * (update + _DECAY * weight)
    torch.testing.assert_close(_trained(optimizer, gradients), weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], variance, rtol=1e-12, atol=1e-12)


def test_a_momentum_from_elsewhere_is_taken_as_it_is() -> None:
    param = _param()
    optimizer = OneBitAdam([param], freeze_step=1)
    _trained(optimizer, _gradients(1))
    optimizer.param_groups[0][IS_MOMENTUM] = True
    given = _gradients(2)[1]
    _trained(optimizer, [given])
    assert torch.equal(optimizer.state[param]["exp_avg"], given)


def test_an_element_without_a_variance_stays_where_it_is() -> None:
    param = _param()
    before = param.detach().clone()
    never, later = torch.ones(50), torch.ones(50)
    never[7] = 0.0
    trained = _trained(OneBitAdam([param], freeze_step=2), [never, never, later])
    assert trained[7] == before[7]
    assert (trained != before).sum() == 49


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"freeze_step": 0}, "freeze_step"),
        ({"lr": -1.0}, "learning rate"),
        ({"betas": (0.9, 1.0)}, "beta parameter at index 1"),
        ({"eps": -1.0}, "epsilon"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_values_out_of_range(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OneBitAdam([_param()], **arguments)  # type: ignore[arg-type]
