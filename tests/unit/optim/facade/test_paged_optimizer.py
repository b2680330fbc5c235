"""The optimizer that users hold: a torch optimizer in front of a backend, here one in memory.

Its steps, schedules, hooks and edited states are compared with torch's in the integration tests.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from infinity.optim.facade.paged_optimizer import PagedOptimizer
from tests.unit.optim.memory_backend import Mixed, different_state, page


def _adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=1e-2, fused=True)


def _groups(model: Mixed) -> list[dict[str, Any]]:
    return [
        {"params": [model.matrix], "weight_decay": 0.3},
        {"params": [model.vector, model.one, model.scalar], "lr": 3e-2},
    ]


def _train(optimizer: Optimizer, model: Mixed, steps: range, *, skip: tuple[str, ...] = ()) -> None:
    for step in steps:
        model.set_grads(step, skip=skip)
        optimizer.step()


def _stepped() -> tuple[PagedOptimizer, Any, Mixed, Optimizer, Mixed]:
    plain_model, model = Mixed(), Mixed()
    plain = _adamw(_groups(plain_model))
    optimizer, backend = page(_adamw, model, _groups(model))
    _train(plain, plain_model, range(2), skip=("one",))
    _train(optimizer, model, range(2), skip=("one",))
    return optimizer, backend, model, plain, plain_model


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


def test_state_dict_costs_nothing_and_its_entries_gather() -> None:
    optimizer, backend, *_ = _stepped()
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0, 1, 3], "as in torch, a parameter without a step has no state"
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1, 2, 3]]
    entry = saved["state"][0]
    assert repr(saved) and "matrix" in repr(entry) and backend.num_gathers == 0
    for read in (entry.gather, lambda: copy.deepcopy(entry), lambda: pickle.dumps(entry)):
        before = backend.num_gathers
        read()
        assert backend.num_gathers == before + 1 and not entry.is_read, "it is not kept"
    assert entry["exp_avg"].shape == (37, 29)
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
    assert of_state_dict or ("step" in optimizer.state[model.matrix] and backend.num_gathers == 1)
    _train(optimizer, model, range(2, 3))
    assert float(entry["step"]) == 3 and entry["step"] is entry["step"]
    assert backend.num_gathers == 2


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


def test_the_optimizer_itself_is_not_copied_or_pickled() -> None:
    optimizer, *_ = _stepped()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"optimizer\.state_dict\(\)"):
            attempt(optimizer)


def test_a_group_that_torch_refuses_is_not_added() -> None:
    optimizer, _, model, *_ = _stepped()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.matrix]})
    assert len(optimizer.param_groups) == 2


# ------------------------------------------------------------------------------------------------------------- loading


def test_state_of_a_parameter_without_a_place_is_refused() -> None:
    *_, plain, _ = _stepped()
    model = Mixed()
    model.matrix.requires_grad_(False)
    optimizer, _ = page(_adamw, model, _groups(model))
    with pytest.raises(ValueError, match=r"state of parameter 'matrix'.*would be lost"):
        optimizer.load_state_dict(plain.state_dict())
    assert not optimizer.state_dict()["state"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda saved, entry: saved["param_groups"].pop(), "different number of parameter groups"),
        (lambda saved, entry: saved["param_groups"][1]["params"].pop(), "doesn't match the size"),
        (
            lambda saved, entry: entry.update(exp_avg=entry["exp_avg"][:-1]),
            r"'exp_avg' of parameter 'vector' with shape \(130,\).*has shape \(131,\)",
        ),
        (lambda saved, entry: saved["state"][0].update(exp_avg=torch.zeros(1073)), r"'matrix' with shape \(1073,\)"),
        (lambda saved, entry: entry.pop("exp_avg_sq"), "lacks state 'exp_avg_sq' of parameter 'vector'"),
        (lambda saved, entry: entry.update(more=torch.zeros(131)), "'more' of parameter 'vector'"),
        (lambda saved, entry: entry.update(exp_avg=3), "'exp_avg' of parameter 'vector' with shape int"),
        (
            lambda saved, entry: saved["param_groups"][1].update(amsgrad=True),
            r"group 1 make AdamW keep .*max_exp_avg_sq",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(spoil: Callable[[Any, Any], Any], message: str) -> None:
    optimizer, _, model, plain, _ = _stepped()
    before = copy.deepcopy(optimizer.state_dict())
    _train(plain, Mixed(), range(3, 4))
    saved = copy.deepcopy(plain.state_dict())
    saved["param_groups"][0]["lr"] = 0.77
    spoil(saved, saved["state"][1])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert different_state(optimizer.state_dict(), before) == []
    assert optimizer.param_groups[0]["lr"] == 1e-2 and optimizer.param_groups[0]["params"][0] is model.matrix
