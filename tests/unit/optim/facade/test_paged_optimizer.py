"""The optimizer that users hold: a torch optimizer in front of a backend, here one in memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from infinity.optim.facade.paged_optimizer import PagedOptimizer
from tests.unit.optim.memory_backend import Mixed, Section, different, different_state, page

_KINDS: dict[str, Any] = {
    "AdamW-fused": lambda params: AdamW(params, lr=1e-2, fused=True),
    "AdamW-foreach-amsgrad": lambda params: AdamW(params, lr=1e-2, foreach=True, amsgrad=True),
    "SGD": lambda params: SGD(params, lr=1e-2),
    "SGD-momentum": lambda params: SGD(params, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "Adagrad": lambda params: Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "NAdam": lambda params: NAdam(params, lr=1e-2),
}


def _groups(model: Mixed) -> list[dict[str, Any]]:
    return [
        {"params": [model.matrix], "weight_decay": 0.3},
        {"params": [model.vector, model.one, model.scalar], "lr": 3e-2},
    ]


def _train(optimizer: Optimizer, model: Mixed, steps: range, *, skip: tuple[str, ...] = ()) -> None:
    for step in steps:
        model.set_grads(step, skip=skip)
        optimizer.step()


@pytest.mark.parametrize("kind", _KINDS)
def test_steps_as_the_plain_optimizer_does(kind: str) -> None:
    plain_model, model = Mixed(), Mixed()
    plain = _KINDS[kind](_groups(plain_model))
    optimizer, _ = page(_KINDS[kind], model, _groups(model))
    # One parameter joins late and stays a step behind the others.
    for steps, skip in ((range(2), ("vector",)), (range(2, 5), ())):
        _train(plain, plain_model, steps, skip=skip)
        _train(optimizer, model, steps, skip=skip)
        assert different(model, plain_model) == []
        assert different_state(optimizer.state_dict(), plain.state_dict()) == []


def test_is_a_torch_optimizer() -> None:
    model = Mixed()
    own = AdamW(model.parameters(), lr=0.5)
    optimizer, _ = page(own, model)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups is own.param_groups
    assert optimizer.defaults["lr"] == 0.5
    assert "PagedAdamW (" in repr(optimizer) and "lr: 0.5" in repr(optimizer)


@pytest.mark.parametrize("on_own_instance", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    ],
)
def test_learning_rate_schedulers(make: Any, on_own_instance: bool) -> None:
    """Made on what `initialize` returns or, before it, on the user's instance. Torch warns (an error here) when it
    does not see the optimizer's step come first."""

    def train(paged: bool) -> tuple[Mixed, list[float]]:
        model = Mixed()
        own: Optimizer = AdamW(model.parameters(), lr=1e-2)
        early = make(own) if on_own_instance else None
        optimizer: Optimizer = page(own, model)[0] if paged else own
        scheduler: LRScheduler = early or make(optimizer)
        rates = []
        for step in range(4):
            model.set_grads(step)
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return model, rates

    (model, rates), (plain_model, plain_rates) = train(True), train(False)
    assert rates == plain_rates and len(set(rates)) == 4
    assert different(model, plain_model) == []


def test_reduce_on_plateau() -> None:
    model = Mixed()
    optimizer, _ = page(Section("SGD", {"lr": 1.0}), model)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for _ in range(3):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_closure_and_zero_grad() -> None:
    model = Mixed()
    optimizer, _ = page(SGD(model.parameters(), lr=1.0), model)
    seen: list[bool] = []

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        model.one.grad = torch.ones(1)
        return 3.0

    before = model.one.item()
    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert seen == [True]
    assert model.one.item() == before - 1.0
    assert optimizer.step() is None
    optimizer.zero_grad(set_to_none=False)
    assert model.one.grad is not None and float(model.one.grad) == 0.0
    optimizer.zero_grad()
    assert model.one.grad is None


def test_hooks_of_the_users_instance_and_of_the_paged_optimizer_run() -> None:
    model = Mixed()
    own = SGD(model.parameters(), lr=1.0)
    calls: list[tuple[str, Optimizer]] = []
    early = own.register_step_post_hook(lambda optimizer, *_: calls.append(("early", optimizer)))
    optimizer, _ = page(own, model)
    optimizer.register_step_pre_hook(lambda optimizer, *_: calls.append(("late", optimizer)))
    optimizer.step()
    assert calls == [("late", optimizer), ("early", optimizer)]
    early.remove()
    optimizer.step()
    assert [name for name, _ in calls] == ["late", "early", "late"]


def test_state_dict_hooks_run() -> None:
    model = Mixed()
    optimizer, _ = page(SGD(model.parameters(), lr=1.0), model)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: calls.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert calls == ["saving", "loading", "loaded"]


# ---------------------------------------------------------------------------------------------------------- state dict


def _stepped(kind: str = "AdamW-fused") -> tuple[PagedOptimizer, Any, Mixed, Optimizer, Mixed]:
    plain_model, model = Mixed(), Mixed()
    plain = _KINDS[kind](_groups(plain_model))
    optimizer, backend = page(_KINDS[kind], model, _groups(model))
    _train(plain, plain_model, range(2), skip=("one",))
    _train(optimizer, model, range(2), skip=("one",))
    return optimizer, backend, model, plain, plain_model


def test_state_dict_costs_nothing_and_its_entries_gather() -> None:
    optimizer, backend, *_ = _stepped()
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0, 1, 3], "as in torch, a parameter without a step has no state"
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1, 2, 3]]
    assert repr(saved) and backend.num_gathers == 0
    entry = saved["state"][0]
    assert "matrix" in repr(entry)
    assert entry["exp_avg"].shape == (37, 29)
    assert backend.num_gathers == 1
    assert set(entry) == {"step", "exp_avg", "exp_avg_sq"} and len(entry) == 3 and "step" in entry and entry
    assert entry.get("nothing", 5) == 5
    assert {**entry}.keys() == dict(entry).keys() == entry.copy().keys() == (entry | {}).keys() == ({} | entry).keys()
    assert entry == entry and list(reversed(entry)) == list(entry)[::-1]


@pytest.mark.parametrize("of_state_dict", [True, False])
def test_an_entry_reads_once_and_again_after_a_step(of_state_dict: bool) -> None:
    """Of divided states, all ranks have to look as often."""
    optimizer, backend, model, *_ = _stepped()
    entry = optimizer.state_dict()["state"][0] if of_state_dict else optimizer.state[model.matrix]
    for _ in range(2):
        for look in (entry.items, entry.values, entry.copy, lambda: list(entry), lambda: entry["step"]):
            look()
        assert backend.num_gathers == 1
    _train(optimizer, model, range(2, 3))
    assert float(entry["step"]) == 3 and entry["step"] is entry["step"]
    assert backend.num_gathers == 2


def test_whoever_looks_at_several_states_of_a_parameter_reads_once() -> None:
    optimizer, backend, model, *_ = _stepped()
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert name in optimizer.state[model.matrix]
        optimizer.state[model.matrix][name].sum()
    assert backend.num_gathers == 1


def test_an_entry_that_nobody_has_looked_at_is_read_without_being_kept() -> None:
    optimizer, backend, *_ = _stepped()
    entry = optimizer.state_dict()["state"][0]
    for read in (entry.gather, lambda: copy.deepcopy(entry), lambda: pickle.dumps(entry)):
        before = backend.num_gathers
        read()
        assert backend.num_gathers == before + 1
    assert not entry.is_read


def test_an_entry_of_a_state_dict_is_the_callers_own() -> None:
    optimizer, _, model, *_ = _stepped()
    saved = optimizer.state_dict()
    entry = saved["state"][0]
    entry["exp_avg"].zero_()
    entry["step"] = torch.tensor(7.0)
    assert float(optimizer.state[model.matrix]["step"]) == 2 and optimizer.state[model.matrix]["exp_avg"].any()
    _train(optimizer, model, range(2, 3))
    assert float(entry["step"]) == 7 and not entry["exp_avg"].any(), "once changed, it is an ordinary dict"
    for copied in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved)), saved):
        optimizer.load_state_dict(copied)
        assert float(optimizer.state[model.matrix]["step"]) == 7
        assert not optimizer.state[model.matrix]["exp_avg"].any()


def test_an_entry_that_was_changed_is_checked_before_anything_is_loaded() -> None:
    optimizer, *_ = _stepped()
    saved, before = optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.tensor(9.0)
    saved["state"][3]["exp_avg"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 'scalar' with shape \(5,\)"):
        optimizer.load_state_dict(saved)
    assert different_state(optimizer.state_dict(), before) == []


def test_state_maps_parameters_that_have_state() -> None:
    optimizer, backend, model, *_ = _stepped()
    assert list(map(id, optimizer.state)) == list(map(id, (model.matrix, model.vector, model.scalar)))
    assert len(optimizer.state) == 3
    assert model.one not in optimizer.state and torch.zeros(1) not in optimizer.state and "step" not in optimizer.state
    assert isinstance(optimizer.state[model.one], dict)  # torch's state is a defaultdict
    assert "3 parameters" in repr(optimizer.state)
    assert backend.num_gathers == 0
    assert float(optimizer.state[model.matrix]["step"]) == 2.0


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_save_and_load(weights_only: bool) -> None:
    optimizer, _, _, plain, _ = _stepped()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert type(loaded["state"][0]) is OrderedDict
    assert different_state(loaded, plain.state_dict()) == []


def test_deepcopy_and_pickle_of_a_state_dict_hold_values() -> None:
    optimizer, _, model, plain, plain_model = _stepped()
    expected = copy.deepcopy(plain.state_dict())
    copied, pickled = copy.deepcopy(optimizer.state_dict()), pickle.loads(pickle.dumps(optimizer.state_dict()))
    live = optimizer.state_dict()
    _train(optimizer, model, range(2, 3))
    _train(plain, plain_model, range(2, 3))
    assert different_state(copied, expected) == []
    assert different_state(pickled, expected) == []
    assert type(copied["state"][0]) is dict
    assert float(live["state"][0]["step"]) == 3.0, "an entry that was not read gives what is now, as torch's do"


def test_a_backend_that_cannot_read_says_so_instead_of_giving_nothing() -> None:
    optimizer, backend, *_ = _stepped()
    saved = optimizer.state_dict()

    def fail(param: Any) -> Any:
        raise RuntimeError("the engine is closed")

    backend.gather_state = fail
    for read in (
        lambda: saved["state"][0]["step"],
        lambda: pickle.dumps(saved),
        lambda: copy.deepcopy(saved),
        lambda: torch.save(saved, io.BytesIO()),
        lambda: list(saved["state"][0]),
    ):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            read()


def test_the_optimizer_itself_is_not_copied_or_pickled() -> None:
    optimizer, *_ = _stepped()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"optimizer\.state_dict\(\)"):
            attempt(optimizer)


def test_a_group_of_new_parameters_is_updated_as_in_torch() -> None:
    optimizer, backend, _, plain, _ = _stepped()
    added = [torch.nn.Parameter(torch.arange(5.0)) for _ in range(2)]
    for side, param in zip((optimizer, plain), added, strict=True):
        side.add_param_group({"params": [param], "lr": 0.5})
        param.grad = torch.ones(5)
    plain.step()
    backend.loose.update(optimizer._template.read(), None)
    assert torch.equal(*added)
    assert torch.equal(plain.state[added[1]]["exp_avg"], optimizer.state[added[0]]["exp_avg"])
    optimizer.zero_grad()
    assert added[0].grad is None


def test_a_group_that_torch_refuses_is_not_added() -> None:
    optimizer, _, model, *_ = _stepped()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.matrix]})
    assert len(optimizer.param_groups) == 2


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("kind", _KINDS)
def test_loads_a_plain_state_dict_and_goes_on_as_it_would(kind: str) -> None:
    *_, plain, plain_model = _stepped(kind)
    plain.param_groups[0]["lr"] = 0.123
    model = Mixed()
    optimizer, _ = page(_KINDS[kind], model, _groups(model))
    _train(optimizer, model, range(7, 9))  # has state of its own, which must go
    groups = list(optimizer.param_groups)
    model.load_state_dict(plain_model.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))
    assert groups[0]["lr"] == 0.123 and groups[0]["params"][0] is model.matrix
    assert different_state(optimizer.state_dict(), plain.state_dict()) == []
    _train(plain, plain_model, range(3, 6))
    _train(optimizer, model, range(3, 6))
    assert different(model, plain_model) == []
    assert different_state(optimizer.state_dict(), plain.state_dict()) == []


@pytest.mark.parametrize("kind", _KINDS)
def test_a_plain_optimizer_loads_what_was_saved_and_goes_on_as_we_would(kind: str) -> None:
    optimizer, _, model, *_ = _stepped(kind)
    other_model = Mixed(seed=5)
    other = _KINDS[kind](_groups(other_model))
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())  # lazy entries, straight
    _train(other, other_model, range(3, 6))
    _train(optimizer, model, range(3, 6))
    assert different(other_model, model) == []


def test_loading_ones_own_state_dict() -> None:
    optimizer, _, model, plain, plain_model = _stepped()
    optimizer.load_state_dict(optimizer.state_dict())
    _train(plain, plain_model, range(3, 5))
    _train(optimizer, model, range(3, 5))
    assert different(model, plain_model) == []


def test_what_was_loaded_is_not_shared() -> None:
    """Also not the step tensors, which updates advance in place."""
    optimizer, _, model, plain, _ = _stepped()
    optimizer.load_state_dict(plain.state_dict())
    expected = copy.deepcopy(plain.state_dict())
    _train(optimizer, model, range(3, 5))
    assert different_state(plain.state_dict(), expected) == []
    assert plain.param_groups is not optimizer.param_groups


def test_old_layouts_are_converted_by_the_class_itself() -> None:
    """Torch once kept `step` as an int and had fewer group keys."""
    *_, plain, plain_model = _stepped("AdamW-fused")
    saved = copy.deepcopy(plain.state_dict())
    for entry in saved["state"].values():
        entry["step"] = int(entry["step"])
    for group in saved["param_groups"]:
        del group["maximize"]
    model = Mixed()
    optimizer, _ = page(_KINDS["AdamW-fused"], model, _groups(model))
    model.load_state_dict(plain_model.state_dict())
    optimizer.load_state_dict(saved)
    step = optimizer.state[model.matrix]["step"]
    assert isinstance(step, torch.Tensor) and step.dtype == torch.float32
    _train(plain, plain_model, range(3, 5))
    _train(optimizer, model, range(3, 5))
    assert different(model, plain_model) == []


def test_a_passed_optimizer_brings_its_state_along() -> None:
    *_, plain, plain_model = _stepped()
    model = Mixed()
    own = _KINDS["AdamW-fused"](_groups(model))
    model.load_state_dict(plain_model.state_dict())
    own.load_state_dict(copy.deepcopy(plain.state_dict()))
    optimizer, _ = page(own, model)
    _train(plain, plain_model, range(3, 5))
    _train(optimizer, model, range(3, 5))
    assert different(model, plain_model) == []
    assert different_state(optimizer.state_dict(), plain.state_dict()) == []


def test_state_of_a_parameter_without_a_place_is_refused() -> None:
    *_, plain, _ = _stepped()
    model = Mixed()
    model.matrix.requires_grad_(False)
    optimizer, _ = page(_KINDS["AdamW-fused"], model, _groups(model))
    with pytest.raises(ValueError, match=r"state of parameter 'matrix'.*would be lost"):
        optimizer.load_state_dict(plain.state_dict())
    assert not optimizer.state_dict()["state"]


def _break(saved: dict[str, Any], how: str) -> None:
    entry = saved["state"][1]
    if how == "fewer groups":
        saved["param_groups"].pop()
    elif how == "smaller group":
        saved["param_groups"][1]["params"].pop()
    elif how == "other shape":
        entry["exp_avg"] = entry["exp_avg"][:-1]
    elif how == "flat shape":
        saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].reshape(-1)
    elif how == "missing":
        del entry["exp_avg_sq"]
    elif how == "unknown":
        entry["max_exp_avg_sq"] = entry["exp_avg"].clone()
    elif how == "no tensor":
        entry["exp_avg"] = 3
    elif how == "other hyperparameters":
        saved["param_groups"][1]["amsgrad"] = True


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fewer groups", "different number of parameter groups"),
        ("smaller group", "doesn't match the size"),
        ("other shape", r"'exp_avg' of parameter 'vector' with shape \(130,\).*has shape \(131,\)"),
        ("flat shape", r"'exp_avg' of parameter 'matrix' with shape \(1073,\)"),
        ("missing", "lacks state 'exp_avg_sq' of parameter 'vector'"),
        ("unknown", "'max_exp_avg_sq' of parameter 'vector'"),
        ("no tensor", "'exp_avg' of parameter 'vector' with shape int"),
        ("other hyperparameters", r"group 1 make AdamW keep .*max_exp_avg_sq"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(how: str, message: str) -> None:
    optimizer, _, model, plain, _ = _stepped()
    before = copy.deepcopy(optimizer.state_dict())
    _train(plain, Mixed(), range(3, 4))
    saved = copy.deepcopy(plain.state_dict())
    saved["param_groups"][0]["lr"] = 0.77
    _break(saved, how)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert different_state(optimizer.state_dict(), before) == []
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.param_groups[0]["params"][0] is model.matrix


def test_a_state_dict_of_another_class_is_refused() -> None:
    model, other_model = Mixed(), Mixed()
    optimizer, _ = page(Section("AdamW"), model)
    other = SGD(other_model.parameters(), lr=0.1, momentum=0.9)
    _train(other, other_model, range(1))
    with pytest.raises(ValueError, match="another kind of optimizer"):
        optimizer.load_state_dict(other.state_dict())
    assert len(optimizer.state) == 0


def test_a_state_dict_from_before_the_first_momentum_step() -> None:
    """SGD of older torch saved `momentum_buffer: None` then."""
    model = Mixed()
    optimizer, _ = page(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    saved = optimizer.state_dict()
    saved["state"] = {index: {"momentum_buffer": None} for index in range(4)}
    optimizer.load_state_dict(saved)
    assert len(optimizer.state) == 0


def test_adam_is_loaded_into_adamw_with_its_decay_rule() -> None:
    """As in torch, the loaded groups decide: their `decoupled_weight_decay` comes with them."""
    plain_model, model = Mixed(), Mixed()
    plain = Adam(plain_model.parameters(), lr=1e-2, weight_decay=0.1)
    _train(plain, plain_model, range(2))
    reference = AdamW(plain_model.parameters(), lr=1e-2)
    reference.load_state_dict(copy.deepcopy(plain.state_dict()))
    optimizer, _ = page(AdamW(model.parameters(), lr=1e-2), model)
    model.load_state_dict(plain_model.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    _train(reference, plain_model, range(2, 4))
    _train(optimizer, model, range(2, 4))
    assert different(model, plain_model) == []
