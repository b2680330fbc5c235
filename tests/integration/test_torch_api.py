"""What torch offers around a forward: it gives plain torch's numbers at the smallest budget, or is refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from infinity.errors import BudgetTooSmallError, ModelError
from tests.twins import Twins

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


def _both(model: nn.Module, directory: Path) -> Twins:
    return Twins(directory, model, is_tight=True)


def _input(step: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(step))


def _train(twins: Twins) -> None:
    for step in range(3):
        twins.step(lambda model, step=step: model(_input(step)).square().sum())
    twins.require_equal(has_states=False)


@pytest.mark.parametrize("kind", [Recursive, Selective])
def test_models_that_call_themselves_or_checkpoint_selectively_train(kind: type[nn.Module], tmp_path: Path) -> None:
    with _both(kind(), tmp_path) as twins:
        _train(twins)


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


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("call", _CALLS)
def test_transforms_of_a_forward(call: str, tmp_path: Path) -> None:
    with _both(Recursive(), tmp_path) as twins:
        plain, engine = twins.plain, twins.engine
        expected = _CALLS[call](plain, _input(0))
        assert torch.equal(_CALLS[call](engine.module, _input(0)), expected)
        _train(twins)


class Normed(nn.Module):
    """Saves weights as they are (of norms), and views of them (of linear layers)."""

    def __init__(self, around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(4))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            for layer in self.layers:
                x = x + layer(x)
        return x


def _narrow(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.bfloat16() if tensor.is_floating_point() else tensor.clone()


class _Counting:
    """Looks at all that is saved, and keeps it as it is."""

    def __init__(self) -> None:
        self.numel = 0

    def pack(self, tensor: Tensor) -> dict[str, Any]:
        self.numel += tensor.numel()
        return {"kept": [(tensor, "as it is")]}

    def unpack(self, packed: dict[str, Any]) -> Tensor:
        return packed["kept"][0][0]


class Mixed(Normed):
    """Hooks inside the module that owns the weights."""

    def __init__(self, around: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__(around)
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            return super().forward(torch.nn.functional.linear(x.tanh(), self.weight, self.bias))


def _around() -> contextlib.AbstractContextManager[Any]:
    """Hooks that keep nothing of what they get: see `test_views_that_hooks_inside_a_forward_keep_cost_memory`."""
    return saved_tensors_hooks(_narrow, lambda packed: packed[1].to(packed[0]))


def test_hooks_of_the_user_inside_a_forward(tmp_path: Path) -> None:
    with _both(Mixed(_around), tmp_path) as twins:
        engine = twins.engine
        _train(twins)
        for step in range(2):  # an error inside of them
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                engine(torch.ones(2, 5 + 2 * step))
            engine.reset()
        loss = engine(_input(0)).sum()
        engine.backward(loss)
        engine.step()


class KeepsViews(nn.Module):
    """Keeps views of the weights of all its blocks until backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


class KeepingLinear(nn.Linear):
    """A linear layer with hooks inside its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return super().forward(x)


def test_views_that_hooks_inside_a_forward_keep_cost_memory(tmp_path: Path) -> None:
    model = KeepsViews()
    for block in model.blocks:
        block.__class__ = KeepingLinear
    with (
        _both(model, tmp_path) as twins,
        pytest.raises(BudgetTooSmallError, match=r"hooks for saved tensors.*around the call of the model"),
    ):
        twins.engine(torch.ones(2, 64))
    model = KeepsViews()
    for block in model.blocks:
        block.__class__ = KeepingLinear
    with Twins(tmp_path, model) as twins:
        twins.step(lambda model: model(torch.ones(2, 64)).square().sum())
        twins.require_equal()


class _Times(torch.autograd.Function):
    """Saves its weight itself, or a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, saves_view: bool) -> Tensor:
        ctx.saves_view = saves_view
        ctx.save_for_backward(x, weight.T if saves_view else weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ (weight if ctx.saves_view else weight.T), x.T @ gradients[0], None


class SavesWeights(nn.Module):
    """Gives a function weights that are paged out: no module enters their units."""

    def __init__(
        self, around: Callable[[], contextlib.AbstractContextManager[Any]], saves_view: bool, how: str
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.around, self.saves_view, self.is_checkpointed = around, saves_view, how == "checkpointed"

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return checkpoint(self.times, x, use_reentrant=False) if self.is_checkpointed else self.times(x)

    def times(self, x: Tensor) -> Tensor:
        with self.around():
            result: Tensor = _Times.apply(x, self.blocks[0].weight, self.saves_view)
            return result


@pytest.mark.deep(but=8)
@pytest.mark.parametrize("saves_view", [True, False])
@pytest.mark.parametrize("how", ["inside", "around", "checkpointed"])
@pytest.mark.parametrize(
    "pack", [None, Tensor.detach, lambda x: x.view_as(x), lambda x: x.data], ids=["none", "detach", "view", "data"]
)
def test_hooks_that_keep_another_tensor_of_a_weight_that_a_function_saves(
    pack: Callable[[Tensor], Tensor] | None, how: str, saves_view: bool, tmp_path: Path
) -> None:
    def hooks() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if pack is None else saved_tensors_hooks(pack, lambda packed: packed)

    is_around = how == "around"
    model = SavesWeights(contextlib.nullcontext if is_around else hooks, saves_view, how)
    with Twins(tmp_path, model) as twins:
        for step in range(2):
            with hooks() if is_around else contextlib.nullcontext():
                twins.step(lambda model, step=step: model(torch.full((2, 8), 0.1 + step)).square().sum())
        twins.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("which", ["narrow", "kept", "moved"])
def test_hooks_of_the_user_around_a_forward_see_all_that_is_saved(which: str, tmp_path: Path) -> None:
    counts = [_Counting(), _Counting()]

    def hooks(counting: _Counting) -> contextlib.AbstractContextManager[Any]:
        if which == "narrow":
            return saved_tensors_hooks(_narrow, lambda packed: packed[1].to(packed[0]))
        return save_on_cpu() if which == "moved" else saved_tensors_hooks(counting.pack, counting.unpack)

    with _both(Normed(), tmp_path) as twins:
        plain, engine = twins.plain, twins.engine
        optimizer = twins.expected
        for step in range(3):
            with hooks(counts[0]):
                expected = plain(_input(step)).square().sum()
            with hooks(counts[1]):
                loss = engine(_input(step)).square().sum()
            assert torch.equal(loss, expected)
            expected.backward()
            engine.backward(loss)
            for parameter, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
                assert torch.equal(parameter.grad, other.grad)
            optimizer.step()
            optimizer.zero_grad()
            engine.step()
        assert counts[0].numel == counts[1].numel


def test_derivatives_by_torch_func_around_a_forward(tmp_path: Path) -> None:
    """Weights that it uses stay in memory: torch forbids hooks for saved tensors meanwhile."""
    with Twins(tmp_path, Recursive()) as twins:
        for transform in (grad, grad_and_value, jacrev):
            expected = transform(lambda x: twins.plain(x).square().sum())(_input(0))
            found = transform(lambda x: twins.engine(x).square().sum())(_input(0))
            for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (expected, found)), strict=True):
                assert torch.equal(a, b)
        _train(twins)


def test_tracing_is_refused_by_name(tmp_path: Path) -> None:
    with _both(Recursive(), tmp_path) as twins:
        engine = twins.engine
        with pytest.raises(ModelError, match=r"torch\.jit\.trace would record the weights as constants.*deepcopy"):
            torch.jit.trace(engine.module, (_input(0),))
        engine.reset()
        _train(twins)


def test_weights_are_looked_at_and_scaled_inside_hooks_of_the_script(tmp_path: Path) -> None:
    with Twins(tmp_path, nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), is_tight=True) as twins:
        for model, optimizer in twins.sides:
            with saved_tensors_hooks(lambda x: x.detach(), lambda packed: packed):
                looks = [look for parameter in model.parameters() for look in (parameter.detach(), parameter.data)]
                loss = model(torch.full((2, 64), 0.5)).square().sum()
                for parameter in model.parameters():
                    parameter.data.mul_(0.5)
                loss.backward()
            assert len(looks) == 32
            optimizer.step()
            optimizer.zero_grad()
        twins.require_equal()
