"""What autograd has saved of weights until backward: conjugated views, weights that change meanwhile, those of two engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.exactness.case import Case
from tests.exactness.lockstep import PLAIN
from tests.twins import Side, Twins, config_for, require_same

in_modes = pytest.mark.parametrize("mode", ["smallest", "resident"])


def _adamw(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in named.values() if p.requires_grad], lr=1e-2)


# ------------------------------------------------------------------------------------------------- read as conjugated


class _Complex(nn.Module):
    """Products with weights that ``conj`` gives, which are read as conjugated, and parts of them, which are read as negated."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.pairs = nn.Parameter(torch.randn(6, 6, 2))
        self.frozen = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        z = torch.complex(x, x.flip(0)) @ torch.view_as_complex(self.pairs).conj()
        z = z * z @ self.frozen.mH
        return (z.real * z.imag @ self.frozen.conj().imag).square().mean()


_COMPLEX = Case("complex", lambda checkpointing: _Complex(), lambda draw: {"x": draw.floats(3, 6)}, False)


@in_modes
def test_gradients_of_products_with_conjugated_weights(mode: str, tmp_path: Path) -> None:
    def scenario(side: Side) -> None:
        for number in range(3):
            loss = side.loss(number)
            side.note(loss)
            loss.backward()
            side.note(side.named("pairs").grad, side.named("before.weight").grad)
            side.optimizer.step()
            side.optimizer.zero_grad()

    require_same(scenario, tmp_path, mode, case=_COMPLEX, optimizer=_adamw)


# -------------------------------------------------------------------------------------------- others before backward


def _halve(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.5 + 0.01


def _one_by_one(model: nn.Module) -> None:
    for parameter in model.parameters():
        _halve(parameter)


def _as_a_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.75, model.parameters())


@pytest.mark.deep(but=2)
@in_modes
@pytest.mark.parametrize("change", [_one_by_one, _as_a_vector])
def test_data_that_is_assigned_between_forward_and_backward(
    change: Callable[[nn.Module], None], mode: str, tmp_path: Path
) -> None:
    """What is saved of a linear layer's weight is a view, of the old values; of a norm's it is the parameter."""

    def scenario(side: Side) -> None:
        for number in range(2):
            loss = side.loss(number)
            change(side.model)
            loss.backward()
            side.note_gradients()
            side.optimizer.step()
            side.optimizer.zero_grad()

    require_same(scenario, tmp_path, mode)


@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("fqn", ["blocks.1.up.weight", "blocks.2.up.weight"])
def test_a_write_that_torch_counts_is_an_error_in_backward(fqn: str, is_gathered: bool, tmp_path: Path) -> None:
    """Also while weights are gathered, and to a frozen one."""
    model = PLAIN.make("none")
    model.get_parameter("blocks.2.up.weight").requires_grad_(False)
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path, "roomy", model))
    side = Side(model, None, PLAIN, engine)
    with engine:
        with infinity.GatheredParameters(model.parameters(), enabled=is_gathered):
            loss = side.loss(0)
            with torch.no_grad():
                model.get_parameter(fqn).mul_(2)
            with pytest.raises(RuntimeError, match=f"modified by an inplace operation.*'{fqn}'"):
                loss.backward()
        engine.reset()
        engine.backward(side.loss(1))
        engine.step()


class Product(torch.autograd.Function):
    """Saves the weights themselves."""

    @staticmethod
    def forward(ctx, u: Tensor, v: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(u, v)
        return u * v

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def, override]
        u, v = ctx.saved_tensors
        return gradient * v, gradient * u


def _all_products(a: nn.Module, b: nn.Module) -> Tensor:
    return torch.stack([(p * q).sin().sum() for p, q in zip(a.parameters(), b.parameters(), strict=True)]).sum()


def _in_a_forward(a: nn.Module, b: nn.Module) -> Tensor:
    weights = [module.weight for module in b.children() if isinstance(module, nn.Linear)]
    others = [module for module in a.children() if isinstance(module, nn.Linear)]

    def mixed(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        for weight in weights:
            output = output @ Product.apply(others[-1].weight, weight)
        return torch.tanh(b(output))

    handle = others[0].register_forward_hook(mixed)
    try:
        return a(torch.ones(3, 16)).square().sum()
    finally:
        handle.remove()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("loss_of", [_all_products, _in_a_forward])
def test_weights_of_two_engines_in_one_graph_train_as_in_torch(
    loss_of: Callable[[nn.Module, nn.Module], Tensor], tmp_path: Path
) -> None:
    pairs = [
        Twins(tmp_path / str(i), nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]), is_tight=True) for i in (0, 1)
    ]
    for _ in range(2):
        expected, loss = (loss_of(*(each.sides[side][0] for each in pairs)) for side in (1, 0))
        assert torch.equal(loss, expected)
        expected.backward()
        loss.backward()
        for _, optimizer in (side for each in pairs for side in each.sides):
            optimizer.step()
            optimizer.zero_grad()
    for each in pairs:
        each.require_equal()
        each.engine.close()
