"""Optimizer classes that nobody listed: taken when pieces give the bits of the whole, refused in words otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.optim import AdamW, Optimizer

from infinity.errors import OptimizerNotPageableError
from infinity.optim import PieceUpdater, build_template


class _Custom(Optimizer):
    """Calls `update` for each parameter: what a user's own class comes down to."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param, param.grad, self.state[param])

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


def _updater(cls: type[Optimizer], **options: Any) -> PieceUpdater:
    param = torch.nn.Parameter(torch.zeros(2))
    make: Any = cls
    return PieceUpdater(build_template(make([param], **options), [("weight", param)], "cpu"))


def _refused(cls: type[Optimizer], **options: Any) -> str:
    with pytest.raises(OptimizerNotPageableError) as caught:
        _updater(cls, **options)
    message = str(caught.value)
    assert message.startswith(f"optimizer {cls.__name__} cannot be paged: ")
    return message


class SignMomentum(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state.update(momentum=torch.zeros_like(param), count=0)
        state["count"] += 1
        state["momentum"].mul_(0.9).add_(grad, alpha=0.1)
        param.sub_(group["lr"] / state["count"] * state["momentum"].sign())


class PlainAdamW(AdamW):
    """A subclass may change anything; this one changes nothing."""


@pytest.mark.parametrize(
    ("cls", "options", "names"),
    [
        (SignMomentum, {}, ("momentum",)),
        (PlainAdamW, {}, ("exp_avg", "exp_avg_sq")),
        (PlainAdamW, {"fused": True}, ("exp_avg", "exp_avg_sq")),
        (PlainAdamW, {"foreach": True}, ("exp_avg", "exp_avg_sq")),
    ],
)
def test_elementwise_classes_are_taken(cls: type[Optimizer], options: dict[str, Any], names: tuple[str, ...]) -> None:
    assert _updater(cls, **options).state_names(0) == names


class TrustRatio(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * grad * (param.norm() / grad.norm()))


class Centralized(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if grad.dim() > 1:
            grad = grad - grad.mean(dim=-1, keepdim=True)
        param.sub_(group["lr"] * grad)


class NeighbourSum(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * grad.reshape(-1).roll(1).reshape(grad.shape))


class SmallTensorsFaster(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * (2 if param.numel() < 1000 else 1) * grad)


class FractionalPower(_Custom):
    """Element by element, but torch's vector and scalar code for it differ in a few percent of the values."""

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * grad.sign() * grad.abs() ** 0.37)


@pytest.mark.parametrize("cls", [TrustRatio, Centralized, NeighbourSum, SmallTensorsFaster, FractionalPower])
def test_classes_that_mix_elements_are_refused(cls: type[Optimizer]) -> None:
    message = _refused(cls)
    assert "different bits in the weights" in message
    assert "AdamW" in message  # the cure


class MeanInState(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        state["mean"] = grad.mean()
        param.sub_(group["lr"] * grad)


def test_a_scalar_that_depends_on_all_elements_is_refused() -> None:
    assert "different bits in state 'mean'" in _refused(MeanInState)


class GlobalNorm(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(0.1 * param.grad / norm)


def test_a_norm_over_all_parameters_is_refused() -> None:
    assert "different bits" in _refused(GlobalNorm)


class CountsInGroup(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        group["num_steps"] = group.get("num_steps", 0) + 1
        param.sub_(grad / group["num_steps"])


def test_counters_in_the_group_are_refused() -> None:
    assert "changes the parameter group" in _refused(CountsInGroup)


class CountsOnItself(_Custom):
    num_steps = 0

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        self.num_steps += 1
        param.sub_(grad)


class Remembers(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.norms: list[float] = []

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        self.norms.append(float(grad.norm()))
        param.sub_(grad)


@pytest.mark.parametrize("cls", [CountsOnItself, Remembers])
def test_values_on_the_optimizer_are_refused(cls: type[Optimizer]) -> None:
    assert "keeps values on the optimizer object" in _refused(cls)


class Langevin(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(0.1 * grad + 0 * torch.randn_like(grad))


class DrawsFromPython(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(0.1 * grad + 0 * random.random())


class DrawsFromNumpy(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(0.1 * grad + 0 * numpy.random.random())


@pytest.mark.parametrize("cls", [Langevin, DrawsFromPython, DrawsFromNumpy, SignMomentum, AdamW])
def test_random_numbers_are_refused_and_the_generators_restored(cls: type[Optimizer]) -> None:
    states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    if cls in (SignMomentum, AdamW):
        _updater(cls)
    else:
        assert "draws random numbers" in _refused(cls)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(numpy.random.get_state())) == states[1:]


class StateInConstructor(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = torch.zeros_like(param)

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        state["sum"].add_(grad)
        param.sub_(state["sum"])


def test_state_started_in_the_constructor_alone_is_refused() -> None:
    message = _refused(StateInConstructor)
    assert "KeyError" in message and "started in step()" in message


class NeedsClosure(_Custom):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


def test_a_needed_closure_is_refused() -> None:
    assert "failed (TypeError" in _refused(NeedsClosure)


def _stateful(make_state: Callable[[torch.Tensor], dict[str, Any]]) -> type[Optimizer]:
    class Stateful(_Custom):
        def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
            if not state:
                state.update(make_state(param))
            param.sub_(grad)

    return Stateful


@pytest.mark.parametrize(
    ("make_state", "message"),
    [
        (lambda param: {"codes": torch.zeros_like(param, dtype=torch.int8)}, "'codes' is torch.int8"),
        (lambda param: {"rows": torch.zeros(3)}, r"'rows' has shape \(3,\)"),
        (lambda param: {"history": [torch.zeros_like(param)]}, "'history' holds tensors inside a container"),
    ],
)
def test_state_that_cannot_be_cut_is_refused(make_state: Any, message: str) -> None:
    with pytest.raises(OptimizerNotPageableError, match=message):
        _updater(_stateful(make_state))


class StartsLate(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 2:
            state["slow"] = param.clone()
        param.sub_(grad)


def test_state_that_starts_in_a_later_step_is_refused() -> None:
    assert "'slow' does not exist after the first step" in _refused(StartsLate)


def test_wrappers_around_optimizers_are_refused() -> None:
    class Wrapper(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner = inner
            self.defaults = inner.defaults

        @property
        def param_groups(self) -> Any:
            return self.inner.param_groups

        @property
        def state(self) -> Any:
            return self.inner.state

    param = torch.nn.Parameter(torch.zeros(2))
    template = build_template(Wrapper(AdamW([param])), [("weight", param)], "cpu")
    with pytest.raises(OptimizerNotPageableError, match=r"Wrapper cannot be paged.*Pass the wrapped optimizer"):
        PieceUpdater(template)


def test_a_warm_up_that_starts_at_zero_hides_nothing() -> None:
    assert "different bits" in _refused(TrustRatio, lr=0.0)
    assert _updater(SignMomentum, lr=0.0).state_names(0) == ("momentum",)


def test_each_group_is_tried() -> None:
    class Switchable(_Custom):
        def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
            param.sub_(group["lr"] * (grad / grad.norm() if group["normalize"] else grad))

    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": params[:1], "normalize": False}, {"params": params[1:], "normalize": True}]
    template = build_template(Switchable(groups), [("a", params[0]), ("b", params[1])], "cpu")
    with pytest.raises(OptimizerNotPageableError, match="different bits"):
        PieceUpdater(template)
