"""Optimizer classes that nobody listed: taken when pieces give the bits of the whole, refused in words otherwise."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.optim import AdamW, Optimizer

from infinity.errors import OptimizerNotPageableError
from infinity.optim.piece import PieceUpdater
from infinity.optim.template import build_template


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


@pytest.mark.deep(but=1)
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


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("cls", [TrustRatio, Centralized, NeighbourSum, SmallTensorsFaster, FractionalPower])
def test_classes_that_mix_elements_get_whole_parameters(cls: type[Optimizer]) -> None:
    updater = _updater(cls)
    assert updater.mixes_elements
    assert not updater.is_for_threads


class JointNorm(_Custom):
    """Clips by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            norm = torch.stack([param.grad.norm() for param in params]).norm()
            for param in params:
                param.sub_(group["lr"] * param.grad * (group["threshold"] / norm).clamp(max=1.0))


class ByTheNumber(_Custom):
    """Layers get learning rates by their places."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, param in enumerate(param for param in group["params"] if param.grad is not None):
                param.sub_(group["lr"] * 0.9**number * param.grad)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("cls", "options"),
    [(JointNorm, {"threshold": 1e-3}), (JointNorm, {"threshold": 1e9}), (ByTheNumber, {})],
)
def test_classes_that_mix_parameters_are_refused(cls: type[Optimizer], options: dict[str, Any]) -> None:
    message = _refused(cls, **options)
    assert "depends on other parameters" in message
    assert "AdamW" in message  # the cure


class RowSums(_Custom):
    """What it keeps depends on the number of dimensions, as in Adafactor."""

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        shape = grad.shape[:1] if grad.dim() > 1 else grad.shape
        sums = state.setdefault("sums", torch.zeros(shape))
        sums.add_(grad.square().reshape(*shape, -1).mean(-1) if grad.dim() > 1 else grad.square())
        param.sub_(group["lr"] * grad / sums.mean().sqrt())


class NoneForVectors(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if grad.dim() > 1:
            state.setdefault("sums", torch.zeros_like(grad)).add_(grad / grad.norm())
        param.sub_(group["lr"] * grad)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (RowSums, r"its state 'sums' has shape \(263,\) for a parameter of shape \(263, 509\)"),
        (NoneForVectors, r"which state it keeps depends on the shape of the parameter, here \(263, 509\)"),
    ],
)
def test_states_that_depend_on_the_shape_are_refused(cls: type[Optimizer], message: str) -> None:
    assert re.search(message, _refused(cls))


class MeanInState(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        state["mean"] = grad.mean()
        param.sub_(group["lr"] * grad)


def test_a_scalar_that_depends_on_all_elements_needs_whole_parameters() -> None:
    assert _updater(MeanInState).mixes_elements


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


class Estimates(_Custom):
    """As Prodigy and D-Adaptation: the size of a step follows from all gradients."""

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        group["d"] = max(group.get("d", 0.0), float(grad.norm()))
        param.sub_(grad, alpha=group["lr"])


@pytest.mark.parametrize(("cls", "name"), [(CountsInGroup, "num_steps"), (Estimates, "d")])
def test_entries_of_the_group_that_follow_from_parameters_are_refused(cls: type[Optimizer], name: str) -> None:
    assert f"entry of a parameter group, '{name}', from all parameters of the group" in _refused(cls)


class CountsOncePerGroup(_Custom):
    """As schedule-free optimizers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step(closure)

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(grad / (grad.norm() if group["k"] == 1001 else group["k"]))


class CountsElementwise(CountsOncePerGroup):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(grad / group["k"])


def test_a_count_of_the_group_may_decide() -> None:
    updater = _updater(CountsElementwise)
    assert not updater.mixes_elements
    assert updater.advanced({"lr": 0.1}, has_gradient=True) == {"k": 1}
    assert updater.advanced({"lr": 0.1, "k": 7}, has_gradient=False) == {"k": 8}
    assert _updater(CountsOncePerGroup).mixes_elements  # seen at a count that no trial has come to step by step


class CountsInTensors(CountsElementwise):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
        super(CountsOncePerGroup, self).step(closure)


def test_a_tensor_that_groups_share_and_a_step_changes_is_refused() -> None:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    named = list(zip("ab", params, strict=True))
    shared = torch.tensor(0)
    for counts, is_taken in (([torch.tensor(0), torch.tensor(0)], True), ([shared, shared], False)):
        groups = [{"params": [param], "k": count} for param, count in zip(params, counts, strict=True)]
        if is_taken:
            assert not PieceUpdater(build_template(CountsInTensors(groups), named, "cpu")).mixes_elements
            continue
        with pytest.raises(OptimizerNotPageableError, match="'k' is one tensor of several groups"):
            PieceUpdater(build_template(CountsInTensors(groups), named, "cpu"))


class Stacked(Optimizer):
    """As nanochat's MuonAdamW: one state for all matrices of a group, under the first, and numbers on itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.rate = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.rate.fill_(group["lr"])
            params = group["params"]
            if group["kind"] == "adamw":
                torch._foreach_sub_(params, [self.rate * param.grad for param in params])
                continue
            momentum = self.state[params[0]].setdefault("momentum_buffer", torch.zeros(len(params), *params[0].shape))
            momentum.lerp_(torch.stack([param.grad for param in params]), 0.1)
            torch._foreach_sub_(params, list((momentum @ momentum.mT @ momentum).unbind(0)))


def test_one_state_for_stacked_parameters_is_refused() -> None:
    params = [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    groups = [{"params": [param], "kind": kind} for param, kind in zip(params, ("adamw", "muon"), strict=True)]
    with pytest.raises(OptimizerNotPageableError, match="one tensor for all parameters of a group, stacked"):
        PieceUpdater(build_template(Stacked(groups), list(zip("ab", params, strict=True)), "cpu"))


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


class DrawsFromItsOwn(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.add_(torch.randn(grad.shape, generator=self.generator), alpha=0.1)


def test_noise_of_a_generator_of_its_own_is_called_so_and_drawn_again() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = DrawsFromItsOwn([param])
    with pytest.raises(OptimizerNotPageableError, match="draws random numbers"):
        PieceUpdater(build_template(optimizer, [("weight", param)], "cpu"))
    assert torch.equal(optimizer.generator.get_state(), torch.Generator().manual_seed(3).get_state())


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("cls", [Langevin, DrawsFromPython, DrawsFromNumpy, SignMomentum, AdamW])
def test_random_numbers_are_refused_and_the_generators_restored(cls: type[Optimizer]) -> None:
    states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    if cls in (SignMomentum, AdamW):
        _updater(cls)
    else:
        assert "draws random numbers" in _refused(cls) and "training loop" in _refused(cls)
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


class _Codes(torch.Tensor):
    """As torchao's optimizers have them for large weights."""


def test_states_of_a_class_of_their_own_are_refused() -> None:
    def codes(param: torch.Tensor) -> dict[str, Any]:
        return {"momentum": param.detach().clone().as_subclass(_Codes if param.numel() > 100 else torch.Tensor)}

    assert re.search("'momentum' is a _Codes.*infinity.state_dtype", _refused(_stateful(codes)))


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
    with pytest.raises(OptimizerNotPageableError, match=r"Wrapper cannot be paged.*'inner' \(AdamW\)\. Pass that one"):
        build_template(Wrapper(AdamW([param])), [("weight", param)], "cpu")


class _Delegating(Optimizer):
    """As many wrappers do it: the inner optimizer's groups, and a `step` that calls its."""

    def __init__(self, params: Any) -> None:
        inner = AdamW(params)
        super().__init__(inner.param_groups, {"lr": 0.1})
        self.keep(inner)

    def keep(self, inner: Optimizer) -> None:
        raise NotImplementedError


class Lookahead(_Delegating):
    def keep(self, inner: Optimizer) -> None:
        self.fast = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step()


class Several(Lookahead):
    def keep(self, inner: Optimizer) -> None:
        self.all = {"first": inner}


class HoldsTheMethod(_Delegating):
    def keep(self, inner: Optimizer) -> None:
        self.inner_step = inner.step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner_step()


class OwnListOfParameters(_Custom):
    """Its groups are for show."""

    def __init__(self, params: Any) -> None:
        self.own = list(params)
        super().__init__(self.own)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.own:
            if param.grad is not None:
                param.sub_(param.grad)


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("cls", [Lookahead, Several, HoldsTheMethod, OwnListOfParameters])
def test_an_optimizer_that_passes_its_step_on_is_refused_and_changes_nothing(cls: type[Optimizer]) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    gradient = param.grad = torch.ones(2)
    make: Any = cls
    optimizer = make([param])
    with pytest.raises(
        OptimizerNotPageableError, match=rf"{cls.__name__} cannot be paged.*another optimizer.*Pass that one"
    ):
        PieceUpdater(build_template(optimizer, [("weight", param)], "cpu"))
    assert torch.equal(param, torch.zeros(2))
    assert param.grad is gradient


def test_a_step_that_was_replaced_on_the_instance_is_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = AdamW([param])
    original = optimizer.step

    def clipped(closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        return original(closure)

    torch.optim.lr_scheduler.ConstantLR(optimizer)
    build_template(optimizer, [("weight", param)], "cpu")  # what a scheduler puts there changes nothing
    optimizer.step = clipped  # type: ignore[method-assign]
    with pytest.raises(OptimizerNotPageableError, match="`step` was replaced on the instance"):
        build_template(optimizer, [("weight", param)], "cpu")


def _rule(change: Callable[[torch.Tensor, torch.Tensor, int], Any]) -> type[Optimizer]:
    """An optimizer whose step is ``change(param, gradient, number of the step from 1)``."""

    class Ruled(_Custom):
        def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
            state["step"] = state.get("step", 0) + 1
            param.sub_(group["lr"] * change(param, grad, state["step"]))

    return Ruled


def _normalized(grad: torch.Tensor) -> Any:
    return grad / (grad.norm() + 1e-12)


_SELDOM: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Any]] = {
    "clips above a norm of 1e4": lambda p, g, n: g * (1e4 / g.norm()).clamp(max=1.0),
    "clips above a norm of 1e11": lambda p, g, n: g * (1e11 / g.norm()).clamp(max=1.0),
    "normalizes below a norm of 1e-8": lambda p, g, n: _normalized(g) if g.norm() < 1e-8 else g,
    "skips a gradient of zeros": lambda p, g, n: g if g.any() else torch.ones_like(g),
    "skips infinities": lambda p, g, n: g if g.isfinite().all() else torch.zeros_like(g),
    "trust ratio of large weights": lambda p, g, n: g * p.norm() if p.norm() > 500 else g,
    "trust ratio of small weights": lambda p, g, n: g * p.norm() if p.norm() < 1e-5 else g,
    "normalizes every 5th step": lambda p, g, n: _normalized(g) if n % 5 == 0 else g,
    "normalizes every 10th step": lambda p, g, n: _normalized(g) if n % 10 == 0 else g,
    "normalizes every 100th step": lambda p, g, n: _normalized(g) if n % 100 == 0 else g,
    "normalizes every 1000th step": lambda p, g, n: _normalized(g) if n % 1000 == 0 else g,
    "normalizes every 360th step": lambda p, g, n: _normalized(g) if n % 360 == 0 else g,
    "normalizes after 500 steps": lambda p, g, n: _normalized(g) if n > 500 else g,
    "normalizes after 100000 steps": lambda p, g, n: _normalized(g) if n > 100_000 else g,
    "centers convolutions": lambda p, g, n: g - g.mean(dim=(1, 2, 3), keepdim=True) if g.dim() == 4 else g,
    "another rule for large tensors": lambda p, g, n: g * 2 if g.numel() > 500_000 else g,
    "looks at the largest element": lambda p, g, n: g.clamp(max=float(g.median() * 1e9 + 1)) if g.max() > 1e9 else g,
}


@pytest.mark.deep
@pytest.mark.parametrize("name", _SELDOM)
def test_rules_that_mix_elements_now_and_then_get_whole_parameters(name: str) -> None:
    assert _updater(_rule(_SELDOM[name])).mixes_elements


_ELEMENTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "clamps each element": lambda p, g, n: g.clamp(-1, 1),
    "another rule after some steps": lambda p, g, n: g.sign() if n > 100 else g,
    "replaces infinities": lambda p, g, n: torch.where(g.isfinite(), g, 0.0),
    "moves every 10th step": lambda p, g, n: g if n % 10 == 0 else torch.zeros_like(g),
    "normalizes each element": lambda p, g, n: g / (g.abs() + 1e-8).sqrt(),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", _ELEMENTWISE)
def test_rules_for_single_elements_are_taken(name: str) -> None:
    updater = _updater(_rule(_ELEMENTWISE[name]))
    assert updater.schema_under({"lr": 0.125}).scalars == ("step",)
    assert not updater.mixes_elements


@pytest.mark.deep
@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"])
def test_subclasses_of_torchs_elementwise_classes_are_taken(name: str) -> None:
    _updater(type(f"My{name}", (getattr(torch.optim, name),), {}), lr=1e-2, foreach=True)


@pytest.mark.deep
def test_switches_that_come_later_are_tried_when_they_come() -> None:
    class Switchable(_Custom):
        def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
            param.sub_(group["lr"] * (grad / grad.norm() if group["normalize"] else grad))

    updater = _updater(Switchable, normalize=False)
    assert updater.names_under({"lr": 1.0, "normalize": False}) == ()
    with pytest.raises(OptimizerNotPageableError, match="mixes elements"):
        updater.names_under({"lr": 1.0, "normalize": True})


@pytest.mark.deep
def test_a_warm_up_that_starts_at_zero_hides_nothing() -> None:
    assert _updater(TrustRatio, lr=0.0).mixes_elements
    assert _updater(SignMomentum, lr=0.0).state_names(0) == ("momentum",)


@pytest.mark.deep
def test_each_group_is_tried() -> None:
    class Switchable(_Custom):
        def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
            param.sub_(group["lr"] * (grad / grad.norm() if group["normalize"] else grad))

    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": params[:1], "normalize": False}, {"params": params[1:], "normalize": True}]
    template = build_template(Switchable(groups), [("a", params[0]), ("b", params[1])], "cpu")
    assert PieceUpdater(template).mixes_elements


class _Scaled(_Custom):
    """Looks at an attribute of its own, and at one that a helper finds on parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.factor = 2.0

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * self.factor * _scale_of(param) * grad)

    def double(self) -> None:
        for group in self.param_groups:
            group["lr"] *= 2


def _scale_of(param: torch.Tensor) -> float:
    scale: float = getattr(param, "my_scale", 1.0)
    return scale


def test_attributes_of_parameters_are_refused_where_the_class_looks_at_them() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    param._is_hf_initialized = True  # type: ignore[attr-defined]  # of no concern to the class
    PieceUpdater(build_template(_Scaled([param]), [("weight", param)], "cpu"))
    param.my_scale = 3.0  # type: ignore[attr-defined]
    template = build_template(_Scaled([param]), [("weight", param)], "cpu")
    with pytest.raises(OptimizerNotPageableError, match=r"'my_scale' of parameters.*group of their own"):
        PieceUpdater(template)


class _LooksAtParameters(Optimizer):
    """With the decorator that nearly every ``step`` has, and a value of the class's."""

    factor = 2.0

    def __init__(self, params: Any, masks: Any = ()) -> None:
        super().__init__(params, {"lr": 0.1})
        self._masks = masks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    scale = getattr(param, "my_scale", 1.0) * self.factor
                    mask = self._masks.get(param, 1.0) if self._masks else 1.0
                    param.sub_(param.grad * mask, alpha=group["lr"] * scale)


def test_attributes_of_parameters_are_seen_behind_decorators() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    PieceUpdater(build_template(_LooksAtParameters([param]), [("weight", param)], "cpu"))
    param.my_scale = 3.0  # type: ignore[attr-defined]
    with pytest.raises(OptimizerNotPageableError, match=r"'my_scale' of parameters.*group of their own"):
        PieceUpdater(build_template(_LooksAtParameters([param]), [("weight", param)], "cpu"))


@pytest.mark.deep
@pytest.mark.parametrize("make", [lambda p: {p: 0.5}, lambda p: {id(p): 0.5}, lambda p: {p}])
def test_values_that_a_class_keeps_by_parameter_are_refused(make: Callable[[Any], Any]) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    template = build_template(_LooksAtParameters([param], make(param)), [("weight", param)], "cpu")
    with pytest.raises(OptimizerNotPageableError, match=r"'_masks' is looked up by parameters.*group of their own"):
        PieceUpdater(template)
    PieceUpdater(build_template(_LooksAtParameters([param], {"weight": 1.0}), [("weight", param)], "cpu"))


def test_values_of_the_users_class_that_change_later_are_refused() -> None:
    from tests.unit.optim.memory_backend import Mixed, page

    model = Mixed()
    own: Any = _LooksAtParameters(model.parameters())
    optimizer: Any = page(own, model)[0]
    assert optimizer.factor == 2.0
    optimizer._updater.check_attributes()
    optimizer.factor = 3.0
    assert own.factor == optimizer.factor == 3.0
    with pytest.raises(OptimizerNotPageableError, match=r"'factor' has changed.*parameter groups"):
        optimizer._updater.check_attributes()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("on_own_instance", [False, True])
def test_attributes_that_change_later_are_refused(on_own_instance: bool) -> None:
    from tests.unit.optim.memory_backend import Mixed, page

    model = Mixed()
    own: Any = _Scaled(model.parameters())
    optimizer: Any = page(own, model)[0]
    updater = optimizer._updater
    updater.check_attributes()
    assert optimizer.factor == 2.0
    (own if on_own_instance else optimizer).factor = 3.0
    assert own.factor == optimizer.factor == 3.0
    with pytest.raises(OptimizerNotPageableError, match=r"'factor' has changed.*parameter groups"):
        updater.check_attributes()


@pytest.mark.deep
def test_methods_of_the_users_class_work_on_the_groups() -> None:
    from tests.unit.optim.memory_backend import Mixed, page

    model = Mixed()
    optimizer: Any = page(_Scaled(model.parameters()), model)[0]
    optimizer.double()
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert not hasattr(optimizer, "nothing") and not hasattr(optimizer, "_step_supports_amp_scaling")


class CountsForAll(_Custom):
    """As Madgrad does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        common: dict[Any, Any] = self.state
        common.setdefault("k", torch.tensor([0]))
        super().step()
        common["k"] += 1

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        common: dict[Any, Any] = self.state
        param.sub_(group["lr"] * (common["k"].item() + 1) * grad)


def test_a_count_for_all_parameters_is_refused() -> None:
    assert re.search(r"self\.state\['k'\].*self\.state\[parameter\]", _refused(CountsForAll))


class ByRatesAtFirst(_Custom):
    """As AdaBound does: what is of a group is found by its place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.rates = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, rate in zip(self.param_groups, self.rates, strict=False):
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] / rate * param.grad)


class ByTheFirstGroup(_Custom):
    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(self.param_groups[0]["lr"] * grad)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("cls", "rates", "is_refused"),
    [
        (ByRatesAtFirst, (0.1, 0.2), True),
        (ByRatesAtFirst, (0.1, 0.1), False),
        (ByTheFirstGroup, (0.1, 0.1), True),
        (SignMomentum, (0.1, 0.2), False),
    ],
)
def test_groups_that_know_of_each_other_are_refused(
    cls: type[Optimizer], rates: tuple[float, float], is_refused: bool
) -> None:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in rates]
    make: Any = cls
    optimizer = make([{"params": [param], "lr": rate} for param, rate in zip(params, rates, strict=True)])
    template = build_template(optimizer, [(f"p{index}", param) for index, param in enumerate(params)], "cpu")
    if not is_refused:
        PieceUpdater(template)
        return
    with pytest.raises(OptimizerNotPageableError, match=r"all its groups together.*an entry of each group"):
        PieceUpdater(template)


class WarmsUp(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._is_warm = True

    def set_warm(self, is_warm: bool) -> None:
        self._is_warm = is_warm

    def _warmth(self) -> float:
        return 0.1 if self._is_warm else 1.0

    def warmth(self) -> float:
        return self._warmth()

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * self._warmth() * grad)


@pytest.mark.deep
@pytest.mark.parametrize("on_own_instance", [False, True])
def test_private_attributes_that_change_later_are_refused(on_own_instance: bool) -> None:
    from tests.unit.optim.memory_backend import Mixed, page

    model = Mixed()
    own: Any = WarmsUp(model.parameters())
    optimizer: Any = page(own, model)[0]
    optimizer._updater.check_attributes()
    assert optimizer.warmth() == 0.1
    (own if on_own_instance else optimizer).set_warm(False)
    assert not own._is_warm and optimizer.warmth() == 1.0
    with pytest.raises(OptimizerNotPageableError, match=r"'_is_warm' has changed.*parameter groups"):
        optimizer._updater.check_attributes()
