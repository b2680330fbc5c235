"""Lion against the formula of its paper, in float64."""

from __future__ import annotations

import pytest
import torch

from infinity.optim.classes.lion import Lion


@pytest.mark.parametrize("maximize", [False, True])
def test_follows_the_papers_formula(maximize: bool) -> None:
    lr, beta1, beta2, weight_decay = 1e-2, 0.9, 0.99, 0.3
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator, dtype=torch.float64)
    param = torch.nn.Parameter(start.clone())
    optimizer = Lion([param], lr=lr, betas=(beta1, beta2), weight_decay=weight_decay, maximize=maximize)
    weight, momentum = start, torch.zeros_like(start)
    for _ in range(5):
        grad = torch.randn(50, generator=generator, dtype=torch.float64)
        param.grad = grad.clone()
        optimizer.step()
        if maximize:
            grad = -grad
        direction = torch.sign(beta1 * momentum + (1 - beta1) * grad)
        weight = weight - lr * (direction + weight_decay * weight)
        momentum = beta2 * momentum + (1 - beta2) * grad
    torch.testing.assert_close(param.detach(), weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], momentum, rtol=1e-12, atol=1e-12)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Lion([param], weight_decay=0.5)
    optimizer.step()
    assert param.tolist() == [1.0, 1.0, 1.0]
    assert not optimizer.state


def test_closure_runs_once_with_gradients() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Lion([param], lr=0.5)
    calls: list[bool] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        param.grad = torch.ones(3)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert calls == [True]
    assert param.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "learning rate"),
        ({"betas": (0.9, 1.0)}, "beta parameter at index 1"),
        ({"betas": (-0.1, 0.9)}, "beta parameter at index 0"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"lr": float("nan")}, "learning rate"),
    ],
)
def test_bad_arguments(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lion([torch.nn.Parameter(torch.ones(1))], **arguments)  # type: ignore[arg-type]


def test_sparse_gradients_are_refused() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)
    with pytest.raises(RuntimeError, match="sparse"):
        Lion([param]).step()
