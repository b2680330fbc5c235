"""Optimizer classes that nobody listed: taken when slices give the bits of the whole, refused in words otherwise."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch.optim import AdamW, Optimizer

from infinity.errors import OptimizerNotPageableError
from infinity.optim.facade.loose_parameters import LooseParameters
from infinity.optim.facade.paged_optimizer import PagedOptimizer
from infinity.optim.slice_updater import SliceUpdater
from infinity.optim.wrapped_optimizer import wrap_optimizer


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


def _by(rule: Callable[[Any, Any, Any, Any], Any]) -> type[Optimizer]:
    """A class that subtracts ``lr * rule(group, param, grad, state)`` from each parameter."""

    class Ruled(_Custom):
        def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
            param.sub_(group["lr"] * rule(group, param, grad, state))

    return Ruled


def _counted(change: Callable[[Any, Any, int], Any]) -> type[Optimizer]:
    """One that subtracts ``lr * change(param, grad, number of the step from 1)``."""

    def rule(group: Any, param: Any, grad: Any, state: Any) -> Any:
        state["step"] = state.get("step", 0) + 1
        return change(param, grad, state["step"])

    return _by(rule)


def _stateful(make_state: Callable[[Any], dict[str, Any]]) -> type[Optimizer]:
    return _by(lambda group, param, grad, state: grad if state else (state.update(make_state(param)), grad)[1])


def _updater(cls: Any, *, groups: Sequence[dict[str, Any]] = ({},), **options: Any) -> SliceUpdater:
    params = [torch.nn.Parameter(torch.zeros(2, 2)) for _ in groups]
    optimizer = cls([{"params": [param], **group} for param, group in zip(params, groups, strict=True)], **options)
    return SliceUpdater(wrap_optimizer(optimizer, [(f"p{index}", param) for index, param in enumerate(params)], "cpu"))


def _refused(cls: type[Optimizer], *, groups: Sequence[dict[str, Any]] = ({},), **options: Any) -> str:
    states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    with pytest.raises(OptimizerNotPageableError) as caught:
        _updater(cls, groups=groups, **options)
    message = str(caught.value)
    assert message.startswith(f"optimizer {cls.__name__} cannot be paged: ")
    assert torch.equal(torch.get_rng_state(), states[0]), "generators are as they were"
    assert (random.getstate(), str(numpy.random.get_state())) == states[1:]
    return message


# ----------------------------------------------------------------------------------------------------------- taken


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
        (SignMomentum, {"lr": 0.0}, ("momentum",)),
        (PlainAdamW, {}, ("exp_avg", "exp_avg_sq")),
        (PlainAdamW, {"fused": True}, ("exp_avg", "exp_avg_sq")),
        (PlainAdamW, {"foreach": True}, ("exp_avg", "exp_avg_sq")),
    ],
)
def test_elementwise_classes_are_taken(cls: type[Optimizer], options: dict[str, Any], names: tuple[str, ...]) -> None:
    before = torch.get_rng_state(), random.getstate()
    updater = _updater(cls, **options)
    assert updater.state_names(0) == names and not updater.mixes_elements
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"])
def test_subclasses_of_torchs_elementwise_classes_are_taken(name: str) -> None:
    _updater(type(f"My{name}", (getattr(torch.optim, name),), {}), lr=1e-2, foreach=True)


def _normalized(grad: Any) -> Any:
    return grad / (grad.norm() + 1e-12)


_ELEMENTWISE: dict[str, Callable[[Any, Any, int], Any]] = {
    "clamps each element": lambda p, g, n: g.clamp(-1, 1),
    "another rule after some steps": lambda p, g, n: g.sign() if n > 100 else g,
    "replaces infinities": lambda p, g, n: torch.where(g.isfinite(), g, 0.0),
    "moves every 10th step": lambda p, g, n: g if n % 10 == 0 else torch.zeros_like(g),
    "normalizes each element": lambda p, g, n: g / (g.abs() + 1e-8).sqrt(),
}
_MIXING: dict[str, Callable[[Any, Any, int], Any]] = {
    "trust ratio": lambda p, g, n: g * (p.norm() / g.norm()),
    "centers": lambda p, g, n: g - g.mean(dim=-1, keepdim=True) if g.dim() > 1 else g,
    "sums neighbours": lambda p, g, n: g.reshape(-1).roll(1).reshape(g.shape),
    "small tensors faster": lambda p, g, n: (2 if p.numel() < 1000 else 1) * g,
    # Element by element, but torch's vector and scalar code for it differ in a few percent of the values.
    "a fractional power": lambda p, g, n: g.sign() * g.abs() ** 0.37,
    "clips above a norm of 1e4": lambda p, g, n: g * (1e4 / g.norm()).clamp(max=1.0),
    "skips a gradient of zeros": lambda p, g, n: g if g.any() else torch.ones_like(g),
    "trust ratio of large weights": lambda p, g, n: g * p.norm() if p.norm() > 500 else g,
    "trust ratio of small weights": lambda p, g, n: g * p.norm() if p.norm() < 1e-5 else g,
    "normalizes every 100th step": lambda p, g, n: _normalized(g) if n % 100 == 0 else g,
    "normalizes every 1000th step": lambda p, g, n: _normalized(g) if n % 1000 == 0 else g,
    "normalizes after 100000 steps": lambda p, g, n: _normalized(g) if n > 100_000 else g,
    "centers convolutions": lambda p, g, n: g - g.mean(dim=(1, 2, 3), keepdim=True) if g.dim() == 4 else g,
    "another rule for large tensors": lambda p, g, n: g * 2 if g.numel() > 500_000 else g,
}


@pytest.mark.deep(but=2)
@pytest.mark.parametrize(
    ("rule", "mixes"),
    [*((rule, True) for rule in _MIXING.values()), *((rule, False) for rule in _ELEMENTWISE.values())],
    ids=[*_MIXING, *_ELEMENTWISE],
)
def test_rules_that_mix_elements_even_now_and_then_get_whole_parameters(rule: Any, mixes: bool) -> None:
    updater = _updater(_counted(rule))
    assert updater.mixes_elements == mixes and not (mixes and updater.is_for_threads)
    assert mixes or updater.schema_under({"lr": 0.125}).scalars == ("step",)


def _mean_in_state(group: Any, param: Any, grad: Any, state: Any) -> Any:
    state["mean"] = grad.mean()
    return grad


@pytest.mark.deep
def test_a_scalar_of_all_elements_is_a_mixture() -> None:
    assert _updater(_by(_mean_in_state)).mixes_elements


def _switchable(group: Any, param: Any, grad: Any, state: Any) -> Any:
    return grad / grad.norm() if group["normalize"] else grad


@pytest.mark.deep
def test_switches_groups_and_warm_ups_hide_nothing() -> None:
    switchable = _by(_switchable)
    updater = _updater(switchable, normalize=False)
    assert updater.schema_under({"lr": 1.0, "normalize": False}).elementwise == ()
    with pytest.raises(OptimizerNotPageableError, match="mixes elements"):
        updater.schema_under({"lr": 1.0, "normalize": True})
    assert _updater(switchable, groups=[{"normalize": False}, {"normalize": True}]).mixes_elements
    assert _updater(_counted(_MIXING["trust ratio"]), lr=0.0).mixes_elements


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


# ---------------------------------------------------------------------------------------------------------- refused


class JointNorm(_Custom):
    """Clips by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(0.1 * param.grad * (self.defaults["threshold"] / norm).clamp(max=1.0))


class ByTheNumber(_Custom):
    """Layers get learning rates by their places."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, param in enumerate(param for param in group["params"] if param.grad is not None):
                param.sub_(group["lr"] * 0.9**number * param.grad)


class Remembers(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.norms: list[float] = []

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        self.norms.append(float(grad.norm()))
        param.sub_(grad)


class StateInConstructor(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = torch.zeros_like(param)

    def update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        param.sub_(state["sum"].add_(grad))


class NeedsClosure(_Custom):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


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


class _Codes(torch.Tensor):
    """As torchao's optimizers have them for large weights."""


def _row_sums(group: Any, param: Any, grad: Any, state: Any) -> Any:
    """What it keeps depends on the number of dimensions, as in Adafactor."""
    shape = grad.shape[:1] if grad.dim() > 1 else grad.shape
    sums = state.setdefault("sums", torch.zeros(shape))
    sums.add_(grad.square().reshape(*shape, -1).mean(-1) if grad.dim() > 1 else grad.square())
    return grad / sums.mean().sqrt()


def _none_for_vectors(group: Any, param: Any, grad: Any, state: Any) -> Any:
    if grad.dim() > 1:
        state.setdefault("sums", torch.zeros_like(grad)).add_(grad / grad.norm())
    return grad


def _counts_in_group(group: Any, param: Any, grad: Any, state: Any) -> Any:
    group["num_steps"] = group.get("num_steps", 0) + 1
    return grad / group["num_steps"]


def _estimates(group: Any, param: Any, grad: Any, state: Any) -> Any:
    """As Prodigy and D-Adaptation: the size of a step follows from all gradients."""
    group["d"] = max(group.get("d", 0.0), float(grad.norm()))
    return grad


def _starts_late(group: Any, param: Any, grad: Any, state: Any) -> Any:
    state["count"] = state.get("count", 0) + 1
    if state["count"] == 2:
        state["slow"] = param.clone()
    return grad


@pytest.mark.deep(but=6)
@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (JointNorm, {"threshold": 1e-3}, "depends on other parameters.*AdamW"),
        (JointNorm, {"threshold": 1e9}, "depends on other parameters.*AdamW"),
        (ByTheNumber, {}, "depends on other parameters.*AdamW"),
        (_by(_row_sums), {}, r"its state 'sums' has shape \(263,\) for a parameter of shape \(263, 509\)"),
        (_by(_none_for_vectors), {}, r"which state it keeps depends on the shape of the parameter, here \(263, 509\)"),
        (_by(_counts_in_group), {}, "entry of a parameter group, 'num_steps', from all parameters of the group"),
        (_by(_estimates), {}, "entry of a parameter group, 'd', from all parameters of the group"),
        (Remembers, {}, "keeps values on the optimizer object"),
        (_by(lambda group, p, g, s: g + 0 * torch.randn_like(g)), {}, "draws random numbers.*training loop"),
        (_by(lambda group, p, g, s: g + 0 * random.random()), {}, "draws random numbers.*training loop"),
        (_by(lambda group, p, g, s: g + 0 * numpy.random.random()), {}, "draws random numbers.*training loop"),
        (StateInConstructor, {}, r"KeyError.*start its state in step\(\)"),
        (torch.optim.AdamW, {"betas": (0.9, 0.95, 0.99)}, r"too many values.*Correct its hyperparameters"),
        (NeedsClosure, {}, r"failed \(TypeError"),
        (_stateful(lambda p: {"codes": torch.zeros_like(p, dtype=torch.int8)}), {}, "'codes' is torch.int8"),
        (_stateful(lambda p: {"rows": torch.zeros(3)}), {}, r"'rows' has shape \(3,\)"),
        (_stateful(lambda p: {"all": [torch.zeros_like(p)]}), {}, "'all' holds tensors inside a container"),
        (
            _stateful(lambda p: {"m": p.detach().clone().as_subclass(_Codes if p.numel() > 100 else torch.Tensor)}),
            {},
            "'m' is a _Codes.*infinity.state_dtype",
        ),
        (_by(_starts_late), {}, "'slow' does not exist after the first step"),
        (CountsForAll, {}, r"self\.state\['k'\].*self\.state\[parameter\]"),
    ],
)
def test_what_cannot_be_run_by_parameters_is_refused(
    cls: type[Optimizer], options: dict[str, Any], message: str
) -> None:
    assert re.search(message, _refused(cls, **options))


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


_TOGETHER = r"all its groups together.*an entry of each parameter group"


@pytest.mark.deep(but=2)
@pytest.mark.parametrize(
    ("cls", "groups", "message"),
    [
        (ByRatesAtFirst, [{"lr": 0.1}, {"lr": 0.2}], _TOGETHER),
        (ByRatesAtFirst, [{"lr": 0.1}, {"lr": 0.1}], None),
        (ByTheFirstGroup, [{"lr": 0.1}, {"lr": 0.1}], _TOGETHER),
        (SignMomentum, [{"lr": 0.1}, {"lr": 0.2}], None),
        (Stacked, [{"kind": "adamw"}, {"kind": "muon"}], "one tensor for all parameters of a group, stacked"),
    ],
)
def test_groups_that_know_of_each_other_are_refused(cls: Any, groups: list[dict[str, Any]], message: Any) -> None:
    if message is None:
        assert not _updater(cls, groups=groups).mixes_elements
    else:
        assert re.search(message, _refused(cls, groups=groups))


class Lookahead(Optimizer):
    """As many wrappers do it: the inner optimizer's groups, and a `step` that calls its."""

    def __init__(self, params: Any) -> None:
        self.fast = AdamW(params)
        super().__init__(self.fast.param_groups, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step()


def test_an_optimizer_that_passes_its_step_on_is_refused_and_changes_nothing() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    gradient = param.grad = torch.ones(2)
    with pytest.raises(OptimizerNotPageableError, match=r"Lookahead cannot be paged.*another optimizer.*Pass that one"):
        SliceUpdater(wrap_optimizer(Lookahead([param]), [("weight", param)], "cpu"))
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
    wrap_optimizer(optimizer, [("weight", param)], "cpu")  # what a scheduler puts there changes nothing
    optimizer.step = clipped  # type: ignore[method-assign]
    with pytest.raises(OptimizerNotPageableError, match="`step` was replaced on the instance"):
        wrap_optimizer(optimizer, [("weight", param)], "cpu")


# ------------------------------------------------------------------------------------------------------- attributes


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
    return getattr(param, "my_scale", 1.0)


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


@pytest.mark.parametrize("cls", [_Scaled, _LooksAtParameters])
def test_attributes_of_parameters_are_refused_where_the_class_looks_at_them(cls: Any) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    param._is_hf_initialized = True  # type: ignore[attr-defined]  # of no concern to the class
    SliceUpdater(wrap_optimizer(cls([param]), [("weight", param)], "cpu"))
    param.my_scale = 3.0  # type: ignore[attr-defined]
    with pytest.raises(OptimizerNotPageableError, match=r"'my_scale' of parameters.*group of their own"):
        SliceUpdater(wrap_optimizer(cls([param]), [("weight", param)], "cpu"))


@pytest.mark.deep
@pytest.mark.parametrize("make", [lambda p: {p: 0.5}, lambda p: {id(p): 0.5}, lambda p: {p}])
def test_values_that_a_class_keeps_by_parameter_are_refused(make: Callable[[Any], Any]) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    wrapped_optimizer = wrap_optimizer(_LooksAtParameters([param], make(param)), [("weight", param)], "cpu")
    with pytest.raises(OptimizerNotPageableError, match=r"'_masks' is looked up by parameters.*group of their own"):
        SliceUpdater(wrapped_optimizer)
    SliceUpdater(wrap_optimizer(_LooksAtParameters([param], {"weight": 1.0}), [("weight", param)], "cpu"))


def _paged(optimizer: Optimizer) -> Any:
    named = [(str(number), param) for number, param in enumerate(optimizer.param_groups[0]["params"])]
    wrapped_optimizer = wrap_optimizer(optimizer, named, "cpu")
    return PagedOptimizer(
        wrapped_optimizer, SliceUpdater(wrapped_optimizer), None, None, LooseParameters(wrapped_optimizer)
    )


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("on_own_instance", [False, True])
@pytest.mark.parametrize("cls", [_Scaled, _LooksAtParameters])
def test_attributes_that_change_later_are_refused(cls: Any, on_own_instance: bool) -> None:
    own: Any = cls(torch.nn.Linear(3, 2).parameters())
    optimizer = _paged(own)
    optimizer._updater.check_attributes()
    assert optimizer.factor == own.factor == 2.0
    (own if on_own_instance else optimizer).factor = 3.0
    assert optimizer.factor == own.factor == 3.0
    with pytest.raises(OptimizerNotPageableError, match=r"'factor' has changed.*parameter groups"):
        optimizer._updater.check_attributes()


@pytest.mark.deep
def test_methods_of_the_users_class_work_on_the_groups() -> None:
    optimizer = _paged(_Scaled(torch.nn.Linear(3, 2).parameters()))
    optimizer.double()
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert not hasattr(optimizer, "nothing") and not hasattr(optimizer, "_step_supports_amp_scaling")
