"""What torch offers around a forward: it gives plain torch's numbers at the smallest budget, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import infinity
from infinity.errors import BudgetTooSmallError, UnsupportedModelError
from tests.exactness.lockstep import everything_on_nvme

# Forward-mode AD scripts its decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")


class Recursive(nn.Module):
    """Calls itself, twice at each level."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            return torch.tanh(self.leaf(x))
        left, right = self(x, depth - 1), self(self.right(x), depth - 1)
        for layer in self.layers:
            left = torch.tanh(layer(left))
        return left + right


class Selective(nn.Module):
    """Saves the results of matrix products, and recomputes the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False, context_fn=_contexts)
        return x


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@contextmanager
def _both(model: nn.Module, directory: Path) -> Iterator[tuple[nn.Module, Any]]:
    """A plain copy, and an engine with the smallest budget."""
    plain = copy.deepcopy(model)
    config = everything_on_nvme(
        directory, {"optimizer": None, "infinity": {"host_memory_budget": 1, "page_bytes": None}}
    )
    with pytest.raises(BudgetTooSmallError) as refused:
        infinity.initialize(model=model, optimizer=_optimizer(model), config=config)
    config["infinity"]["host_memory_budget"] = refused.value.minimum_bytes
    with infinity.initialize(model=model, optimizer=_optimizer(model), config=config)[0] as engine:
        yield plain, engine


def _input(step: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(step))


def _train(plain: nn.Module, engine: Any) -> None:
    optimizer = _optimizer(plain)
    for step in range(3):
        expected, loss = plain(_input(step)).square().sum(), engine(_input(step)).square().sum()
        assert torch.equal(loss, expected)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(loss)
        engine.step()
    for parameter, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
        with infinity.GatheredParameters(parameter):
            assert torch.equal(parameter, other)


@pytest.mark.parametrize("kind", [Recursive, Selective])
def test_models_that_call_themselves_or_checkpoint_selectively_train(kind: type[nn.Module], tmp_path: Path) -> None:
    with _both(kind(), tmp_path) as (plain, engine):
        _train(plain, engine)


def test_a_mode_of_the_user_sees_his_operations_only(tmp_path: Path) -> None:
    with _both(Recursive(), tmp_path) as (plain, engine):
        with FlopCounterMode(display=False) as counted:
            engine.backward(engine(_input(0)).sum())
        with FlopCounterMode(display=False) as expected:
            plain(_input(0)).sum().backward()
        assert counted.get_flop_counts()["Global"] == expected.get_flop_counts()["Global"]


_CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "functional_call": lambda model, x: functional_call(model, {"leaf.weight": torch.full((6, 6), 0.25)}, (x,)),
    "functional_call_own": lambda model, x: functional_call(model, dict(model.named_parameters()), (x,)),
    "vmap": lambda model, x: vmap(lambda row: model(row[None]))(x),
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1],
    "forward_ad": lambda model, x: _tangent(model, x),
    "input_gradient": lambda model, x: torch.autograd.functional.jacobian(lambda y: model(y).sum(), x),
}


def _tangent(model: Any, x: Tensor) -> Tensor | None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent


@pytest.mark.parametrize("call", _CALLS)
def test_transforms_of_a_forward(call: str, tmp_path: Path) -> None:
    with _both(Recursive(), tmp_path) as (plain, engine):
        expected = _CALLS[call](plain, _input(0))
        assert torch.equal(_CALLS[call](engine.module, _input(0)), expected)
        _train(plain, engine)


def test_tracing_is_refused_by_name(tmp_path: Path) -> None:
    with _both(Recursive(), tmp_path) as (plain, engine):
        with pytest.raises(UnsupportedModelError, match=r"torch\.jit\.trace makes constants .*deepcopy"):
            torch.jit.trace(engine.module, (_input(0),))
        engine.reset()
        _train(plain, engine)
