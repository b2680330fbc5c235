"""Templates from every kind of source, their groups, and the state a passed optimizer brings along."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW

from infinity.config.resolved import OptimizerSection
from infinity.errors import ConfigError, ModelError, OptimizerNotPageableError
from infinity.optim.wrapped_optimizer import WrappedOptimizer, wrap_optimizer
from tests.unit.optim.slices import group_index


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


def _build(source: Any, model: torch.nn.Module, model_parameters: Any = None) -> WrappedOptimizer:
    return wrap_optimizer(source, model.named_parameters(), "cpu", model_parameters=model_parameters)


_SOURCES = {
    "section": lambda model: OptimizerSection("AdamW", {"lr": 0.5}),
    "class": lambda model: AdamW,
    "partial": lambda model: partial(AdamW, lr=0.5),
    "callable": lambda model: lambda params: AdamW(params, lr=0.5),
    "instance": lambda model: AdamW(model.parameters(), lr=0.5),
}


@pytest.mark.parametrize("kind", _SOURCES)
def test_every_source_holds_the_models_own_parameters(kind: str, model: torch.nn.Module) -> None:
    wrapped_optimizer = _build(_SOURCES[kind](model), model)
    params = list(model.parameters())
    assert wrapped_optimizer.name == "AdamW"
    assert all(one is other for one, other in zip(wrapped_optimizer.params(), params, strict=True))
    assert [group_index(wrapped_optimizer, param) for param in params] == [0, 0, 0, 0]
    assert wrapped_optimizer.fqn(params[2]) == "1.weight"
    assert params[0] in wrapped_optimizer and torch.zeros(3) not in wrapped_optimizer
    assert wrapped_optimizer.param_groups is wrapped_optimizer.optimizer.param_groups
    assert wrapped_optimizer.param_groups[0]["lr"] == (1e-3 if kind == "class" else 0.5)
    assert not wrapped_optimizer.optimizer.state


@pytest.mark.parametrize("kind", ["section", "class", "partial"])
def test_known_classes_never_see_the_true_parameters(
    kind: str, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adagrad's constructor allocates the whole state: on stand-ins that is a few bytes."""
    sizes: list[int] = []
    construct = Adagrad.__init__

    def watched(self: Adagrad, params: Any, *arguments: Any, **options: Any) -> None:
        construct(self, params, *arguments, **options)
        sizes.extend(state["sum"].numel() for state in self.state.values())

    monkeypatch.setattr(Adagrad, "__init__", functools.wraps(construct)(watched))
    sources = {
        "section": OptimizerSection("Adagrad", {"lr": 0.5}),
        "class": Adagrad,
        "partial": partial(Adagrad, lr=0.5),
    }
    wrapped_optimizer = _build(sources[kind], model)
    assert sizes[-4:] == [1, 1, 1, 1] and set(sizes) == {1}
    assert not wrapped_optimizer.optimizer.state
    assert [tuple(param.shape) for param in wrapped_optimizer.params()] == [(3, 4), (3,), (2, 3), (2,)]


def test_a_class_of_the_users_sees_the_true_parameters(model: torch.nn.Module) -> None:
    class BySize(AdamW):
        def __init__(self, params: Any, lr: float) -> None:
            params = list(params)
            large, small = [p for p in params if p.numel() > 4], [p for p in params if p.numel() <= 4]
            super().__init__([{"params": large, "weight_decay": 0.3}, {"params": small}], lr)

    wrapped_optimizer = _build(partial(BySize, lr=0.1), model)
    assert [group_index(wrapped_optimizer, param) for param in model.parameters()] == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match=r"optimizer BySize: .*lr"):
        _build(BySize, model)


class _CountsForAll(SGD):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.state["k"] = torch.tensor([0])  # type: ignore[index]


@pytest.mark.parametrize(
    "source", [OptimizerSection("SGD", {"lr": 0.5}), partial(SGD, lr=0.5), lambda groups: SGD(groups, 0.5)]
)
def test_groups_keep_their_options_and_the_users_dicts_stay_as_they_were(source: Any, model: torch.nn.Module) -> None:
    weights, biases = list(model.parameters())[::2], list(model.parameters())[1::2]
    groups = [{"params": weights, "lr": 0.25, "note": "w"}, {"params": iter(biases)}]
    wrapped_optimizer = _build(source, model, groups)
    assert [group["lr"] for group in wrapped_optimizer.param_groups] == [0.25, 0.5]
    assert wrapped_optimizer.param_groups[0]["note"] == "w"
    assert [group_index(wrapped_optimizer, param) for param in model.parameters()] == [0, 1, 0, 1]
    assert groups[0] == {"params": weights, "lr": 0.25, "note": "w"} and groups[0]["params"] is weights
    assert list(groups[1]) == ["params"]


def test_one_group_and_one_parameter() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    for given in (model.weight, {"params": model.weight}, {"params": [model.weight]}, model.parameters()):
        wrapped_optimizer = _build(AdamW, model, given)
        assert next(wrapped_optimizer.params()) is model.weight


def test_named_parameters_keep_their_names(model: torch.nn.Module) -> None:
    wrapped_optimizer = _build(AdamW, model, model.named_parameters())
    assert wrapped_optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_frozen_parameters_are_left_out_unless_given(model: torch.nn.Module) -> None:
    frozen, *trainable = model.parameters()
    frozen.requires_grad_(False)
    assert [id(param) for param in _build(AdamW, model).params()] == [id(param) for param in trainable]
    given = _build(AdamW, model, list(model.parameters()))
    assert len(list(given.params())) == 4 and not next(given.params()).requires_grad
    assert len(list(_build(AdamW(model.parameters()), model).params())) == 4


# --------------------------------------------------------------------------------------------------------- bad groups


@pytest.mark.parametrize("as_instance", [False, True])
def test_a_trainable_parameter_in_no_group(
    as_instance: bool, model: torch.nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    params = list(model.parameters())[:2]
    wrapped_optimizer = _build(AdamW(params) if as_instance else AdamW, model, params)
    assert caplog.text.count("2 trainable parameters are in no parameter group (the first is '1.weight')") == 1
    assert list(wrapped_optimizer.params()) == params and len(wrapped_optimizer.with_states()) == 4


class _Mine(torch.optim.Adafactor):
    pass


@pytest.mark.parametrize(
    ("source", "groups", "error", "message"),
    [
        (AdamW, lambda p: [*p, p[0]], ModelError, "is in parameter groups 0 and 0"),
        # The usual mistake: the optimizer was made from another copy of the model.
        (
            AdamW(torch.nn.Linear(4, 3).parameters()),
            None,
            ModelError,
            r"shape \(3, 4\) that is not a parameter of the model.*after any",
        ),
        (AdamW, lambda p: ["0.weight"], ConfigError, "holds a str"),
        (
            OptimizerSection("AdamW", {"lr": -1}),
            None,
            ConfigError,
            "optimizer AdamW with {'lr': -1.*Invalid learning rate: -1",
        ),
        (partial(SGD, momentun=0.9), None, ConfigError, "optimizer SGD"),
        (list, None, ConfigError, "returned list"),
        (3, None, ConfigError, "cannot make an optimizer from int"),
        (_Mine, None, OptimizerNotPageableError, "optimizer _Mine cannot be paged"),
        (
            lambda p: SGD(p, lr=0.1, differentiable=True),
            None,
            OptimizerNotPageableError,
            "group 0 has differentiable=True",
        ),
        (_CountsForAll, None, OptimizerNotPageableError, r"self.state\['k'\].*Keep it for each parameter"),
    ],
)
def test_what_is_refused(
    source: Any, groups: Any, error: type[Exception], message: str, model: torch.nn.Module
) -> None:
    with pytest.raises(error, match=message):
        _build(source, model, None if groups is None else groups(list(model.parameters())))


# ------------------------------------------------------------------------------------------------------- initial state


def test_state_of_a_bfloat16_optimizer_becomes_float32() -> None:
    model = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    ((_, state),) = _build(optimizer, model).pop_initial_states()
    assert {name: value.dtype for name, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }


@pytest.mark.parametrize("optimizer_class", [AdamW, Adagrad])
def test_numbers_written_into_states_are_kept_though_their_step_is_0(
    optimizer_class: type[torch.optim.Optimizer], model: torch.nn.Module
) -> None:
    optimizer = optimizer_class(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].zero_()
    expected = {param: dict(state) for param, state in optimizer.state.items()}
    taken = dict(_build(optimizer, model).pop_initial_states())
    assert list(taken) == list(model.parameters())
    assert all(torch.equal(taken[param][name], value) for param in taken for name, value in expected[param].items())
