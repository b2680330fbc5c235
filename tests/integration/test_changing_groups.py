"""Groups, ``requires_grad`` and modules that change while training goes on: each step goes by what they are when it begins."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ModelError
from tests.exactness.lockstep import PLAIN, Lockstep, engine_on_nvme, everything_on_nvme
from tests.exactness.user_edits import MODES, Named, sides, start, take_step
from tests.states import state_of
from tests.twins import Twins, adamw

in_all_modes = pytest.mark.parametrize("mode", MODES)


def _adamw(named: Named) -> torch.optim.Optimizer:
    named = {fqn: param for fqn, param in named.items() if param.requires_grad}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in named.values() if p.dim() >= 2]},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def _start(tmp_path: Path, mode: str, make: Callable[[Named], torch.optim.Optimizer] = _adamw) -> Lockstep:
    return start(tmp_path, mode, make)


def _empty(optimizer: Any, named: dict[str, Any]) -> None:
    optimizer.param_groups[0]["params"].clear()


def _pop(optimizer: Any, named: dict[str, Any]) -> None:
    optimizer.param_groups.pop(0)


def _replace(optimizer: Any, named: dict[str, Any]) -> None:
    options = {key: value for key, value in optimizer.param_groups[1].items() if key != "params"}
    optimizer.param_groups = [{**options, "params": list(named.values())[::2], "lr": 3e-2, "weight_decay": 0.5}]


def _take_all(optimizer: Any, named: dict[str, Any]) -> None:
    optimizer.param_groups.clear()


_CHANGES = [_empty, _pop, _replace, _take_all]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("change", "mode"),
    [(change, mode) for change in _CHANGES for mode in (MODES if change is _replace else ["in backward", "deferred"])],
)
def test_members_of_groups_change(change: Callable[[Any, dict[str, Any]], None], mode: str, tmp_path: Path) -> None:
    with _start(tmp_path, mode) as both:
        for step in range(2):
            take_step(both, mode, step)
        for optimizer, named in sides(both):
            change(optimizer, named)
        for step in range(2, 4):
            take_step(both, mode, step)
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["in backward", "deferred"])
def test_a_parameter_in_two_groups_is_refused_before_anything_is_updated(mode: str, tmp_path: Path) -> None:
    with _start(tmp_path, mode) as both:
        take_step(both, mode, 0)
        groups = both.optimizer.param_groups
        groups[0]["params"].append(groups[1]["params"][0])
        with pytest.raises(ModelError, match=r"is in parameter groups 0 and 1"):
            both.engine(**both.batch(1))
        groups[0]["params"].pop()
        both.engine.reset()
        take_step(both, mode, 1)
        both.require_equal()


# ------------------------------------------------------------------------------------------------------ hyperparameters


@pytest.mark.deep(but=1)
@pytest.mark.filterwarnings("ignore::infinity.errors.NonFiniteLossWarning")
@pytest.mark.parametrize("mode", ["in backward", "in backward, bf16", "deferred"])
@pytest.mark.parametrize(
    "lr",
    [numpy.float32(0.03), numpy.float64(0.03), True, torch.tensor(0.03), float("nan"), float("inf"), -0.01],
    ids=repr,
)
def test_learning_rates_of_any_kind(lr: Any, mode: str, tmp_path: Path) -> None:
    def make(named: Named) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(named.values()), lr=1e-2, fused=True)

    with _start(tmp_path, mode, make) as both:
        for optimizer, _ in sides(both):
            optimizer.param_groups[0]["lr"] = lr.clone() if isinstance(lr, torch.Tensor) else lr
        for step in range(2):
            both.reference.backward(both.reference.forward(both.batch(step)))
            both.engine.backward(both.engine(**both.batch(step)))
            both.engine.step()
            both.reference.step()
        for fqn, main in both.reference.main.items():
            found = state_of(both.engine, both.model.get_parameter(fqn))["weight"]
            torch.testing.assert_close(found, main.detach(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("cls", "change"), [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})]
)
def test_a_state_that_has_no_place_is_refused_before_anything_is_updated(
    cls: Any, change: dict[str, Any], tmp_path: Path
) -> None:
    with _start(tmp_path, "in backward", lambda named: cls(list(named.values()), lr=0.01)) as both:
        take_step(both, "in backward", 0)
        group = both.optimizer.param_groups[0]
        before = {key: group[key] for key in change}
        group.update(change)
        with pytest.raises(ModelError, match=r"needs the state .* before infinity\.initialize"):
            both.engine(**both.batch(1))
        group.update(before)
        both.engine.reset()
        take_step(both, "in backward", 1)
        both.require_equal()


@pytest.mark.deep
@in_all_modes
def test_momentum_that_has_a_place_begins_when_it_is_first_needed(mode: str, tmp_path: Path) -> None:
    def make(named: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(named.values()), lr=0.1, momentum=0.9)

    with _start(tmp_path, mode, make) as both:
        for step, momentum in enumerate([0.0, 0.0, 0.9, 0.0, 0.5]):
            for optimizer, _ in sides(both):
                optimizer.param_groups[0]["momentum"] = momentum
            take_step(both, mode, step)
            found, expected = (
                [len(state.get("momentum_buffer", ())) for state in opt.state.values()] for opt, _ in sides(both)
            )
            assert sum(found) == sum(expected)
        both.require_equal()


# ------------------------------------------------------------------------------------------------------------ freezing


def _require_grad(both: Lockstep, pattern: str, flag: bool) -> None:
    for model in (both.reference.model, both.model):
        for fqn, param in model.named_parameters():
            if pattern in fqn:
                param.requires_grad_(flag)


@pytest.mark.deep
@in_all_modes
def test_what_is_frozen_in_initialize_and_in_a_group_is_thawed(mode: str, tmp_path: Path) -> None:
    def make(named: Named) -> torch.optim.Optimizer:
        for name in frozen:
            named[name].requires_grad_(False)
        return torch.optim.AdamW(list(named.values()), lr=1e-2)

    frozen = [fqn for fqn, _ in PLAIN.make("none").named_parameters()][:-3]
    with _start(tmp_path, mode, make) as both:
        for name in frozen:
            _require_grad(both, name, False)
        for step, name in enumerate(frozen[::2]):
            take_step(both, mode, step)
            assert not both.optimizer.state[both.model.get_parameter(name)]
            _require_grad(both, name, True)
        take_step(both, mode, len(frozen))
        _require_grad(both, "", True)
        both.require_equal()


# ------------------------------------------------------------------------------------------------------- new modules


def _stack(tmp_path: Path) -> tuple[Any, Any, Any]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    config = everything_on_nvme(tmp_path, {"optimizer": None})
    engine, optimizer, *_ = infinity.initialize(model=model, config=config, optimizer=adamw(model))
    return engine, optimizer, model


def _grow(model: Any) -> nn.Linear:
    """A new layer behind a block."""
    extra = nn.Linear(8, 8)
    model[1] = nn.Sequential(model[1], extra)
    return extra


def test_a_layer_that_is_in_no_group_is_not_trained_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _, model = _stack(tmp_path)
    with engine:
        extra = _grow(model)
        before = extra.weight.detach().clone()
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
        assert torch.equal(before, extra.weight)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "1.1.weight" in warnings[0] and "add_param_group" in warnings[0]


def test_adapters_that_replace_all_that_was_trained_are_refused(tmp_path: Path) -> None:
    """As ``get_peft_model`` after ``initialize``: the loss would stay what it is."""
    engine, optimizer, model = _stack(tmp_path)
    with engine:
        model.requires_grad_(False)
        extra = _grow(model)
        with pytest.raises(ModelError, match=r"get_peft_model.* before infinity\.initialize.*add_param_group"):
            engine(torch.ones(2, 8))
        engine.reset()
        optimizer.add_param_group({"params": list(extra.parameters())})
        before = extra.weight.detach().clone()
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
        assert not torch.equal(before, extra.weight)


def test_the_base_of_adapters_has_no_room_for_states_though_it_is_in_a_group(tmp_path: Path) -> None:
    """As with ``AdamW(model.parameters())``: the plan is that of an optimizer over the adapters alone."""
    peft = pytest.importorskip("peft")

    def plan(*, is_filtered: bool) -> tuple[str, int]:
        torch.manual_seed(0)
        model = peft.get_peft_model(
            nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))),
            peft.LoraConfig(r=2, target_modules=["0", "1", "2", "3"]),
        )
        of_groups = [p for p in model.parameters() if p.requires_grad or not is_filtered]
        optimizer = torch.optim.AdamW(of_groups, lr=1e-2)
        with engine_on_nvme(tmp_path, model, optimizer=optimizer) as engine:
            engine.backward(engine(torch.ones(2, 32)).square().mean())
            engine.step()
            if not is_filtered:
                saved = copy.deepcopy(engine.optimizer.state_dict())
                moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(32, 32))
                saved["state"][0] = {"step": torch.ones(()), **moments}
                with pytest.raises(ValueError, match=r"a state of parameter '\S+base_layer\.weight'.*would be lost"):
                    engine.optimizer.load_state_dict(saved)
            thawed = model.base_model.model[0].base_layer.weight.requires_grad_(True)
            with pytest.raises(ModelError) if not is_filtered else contextlib.nullcontext():
                engine(torch.ones(2, 32))
            thawed.requires_grad_(False)
            engine.reset()
            return str(engine.plan), len(engine.optimizer.state)

    assert plan(is_filtered=False) == plan(is_filtered=True)


# --------------------------------------------------------------------------------------------------------------- norms


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["in backward", "deferred"])
def test_the_norm_goes_in_the_order_of_the_model(mode: str, tmp_path: Path) -> None:
    """Groups of two kinds put the gradients into another order, whose norm has other last bits."""
    shapes = [(11, 3), (7,), (64, 5), (3,), (300,), (9, 9), (1000,)] * 8

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

        def forward(self) -> torch.Tensor:
            return torch.stack([(w.sin() * 10 ** (i % 5)).sum() for i, w in enumerate(self.weights)]).sum()

    torch.manual_seed(0)
    norms: list[torch.Tensor] = []
    with Twins(tmp_path, Many(), lambda model: _adamw(dict(model.named_parameters())), **MODES[mode]) as twins:

        def clip(*_: Any) -> None:
            max_norm = 0.1 if mode == "deferred" else 1e30
            norms.append(torch.nn.utils.clip_grad_norm_(twins.plain.parameters(), max_norm))

        twins.expected.register_step_pre_hook(clip)
        for _ in range(4):
            twins.step(lambda model: model())
            assert twins.engine.get_global_grad_norm() == float(norms[-1])


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("changes", [{}, {"infinity": {"update": "in_backward"}}, {"gradient_clipping": 0.05}])
@pytest.mark.parametrize("by_hand", [False, True])
def test_an_optimizer_over_a_part_of_the_trainable_parameters(
    by_hand: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    """As in torch, the rest gets gradients and no updates, and an empty group is one."""

    def make(of: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [*of[2].parameters()]}, {"params": [], "lr": 0.5}], lr=1e-2)

    torch.manual_seed(0)
    with Twins(tmp_path, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), make, **changes) as twins:
        for number in range(4):
            if number == 2:
                twins.change(lambda model, optimizer: optimizer.add_param_group({"params": [model[0].weight]}))
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            max_norm = changes.get("gradient_clipping", 0.0)
            twins.step(lambda model, inputs=inputs: model(inputs).square().mean(), by_hand=by_hand, max_norm=max_norm)
            for (model, _), is_plain in zip(twins.sides, (False, True), strict=True):
                if by_hand and not max_norm:  # which clips in place
                    assert model[0].bias.grad is not None
                if is_plain or by_hand:  # what is in no group adds up, but not over the engine's steps
                    model.zero_grad()
        twins.require_equal()
