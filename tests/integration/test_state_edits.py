"""``optimizer.state`` as users change it: in place, by assignment, as a whole. The next step goes by it, or raises."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import StaleStateError
from tests.exactness import user_edits
from tests.exactness.lockstep import Lockstep, everything_on_nvme
from tests.exactness.user_edits import Named, sides, start, take_step
from tests.states import state_of

_NAME = "blocks.0.up.weight"
MODES = [mode for mode in user_edits.MODES if mode != "step"]


def _adamw(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(named.values()), lr=1e-2)


def _start(tmp_path: Path, mode: str, make: Callable[..., torch.optim.Optimizer] = _adamw) -> Lockstep:
    return start(tmp_path, mode, make)


def _zero(optimizer: Any, named: Named) -> None:
    optimizer.state[named[_NAME]]["exp_avg"].zero_()


def _through_data(optimizer: Any, named: Named) -> None:
    optimizer.state[named[_NAME]]["exp_avg"].data.mul_(0.5)


def _through_numpy(optimizer: Any, named: Named) -> None:
    optimizer.state[named[_NAME]]["exp_avg"].numpy()[0] = 1.0


def _through_a_view(optimizer: Any, named: Named) -> None:
    row = optimizer.state[named[_NAME]]["exp_avg"][1]
    for other in named.values():  # others are read meanwhile
        optimizer.state[other]["exp_avg_sq"].sum()
    row.fill_(0.25)


def _of_the_state_dict(optimizer: Any, named: Named) -> None:
    for number, entry in enumerate(optimizer.state_dict()["state"].values()):
        entry["exp_avg"].mul_(0.5)
        if number % 2:
            dict(entry)["exp_avg_sq"].zero_()


def _load_an_edited_state_dict(optimizer: Any, named: Named) -> None:
    found = optimizer.state_dict()
    for entry in found["state"].values():
        entry["exp_avg"].zero_()
        assert not entry["exp_avg"].any()
    optimizer.load_state_dict(found)


def _steps(optimizer: Any, named: Named) -> None:
    for state in optimizer.state.values():
        state["step"].fill_(7)


def _steps_by_adding(optimizer: Any, named: Named) -> None:
    optimizer.state[named[_NAME]]["step"] += 3


def _all_moments(optimizer: Any, named: Named) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                value.mul_(0.5)


def _assign_values(optimizer: Any, named: Named) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone() * 0.5 if name == "exp_avg" else value


def _assign_and_change(optimizer: Any, named: Named) -> None:
    mine = torch.zeros_like(named[_NAME], dtype=torch.float32)
    optimizer.state[named[_NAME]]["exp_avg"] = mine
    mine.fill_(0.125)


def _assign_entries(optimizer: Any, named: Named) -> None:
    for param, state in optimizer.state.items():
        optimizer.state[param] = {name: value * 2 if name == "exp_avg_sq" else value for name, value in state.items()}


def _update(optimizer: Any, named: Named) -> None:
    optimizer.state[named[_NAME]].update(step=torch.tensor(50.0))


def _more_scalars(optimizer: Any, named: Named) -> None:
    optimizer.state[named[_NAME]]["note"] = 3
    assert optimizer.state[named[_NAME]]["note"] == 3


def _delete(optimizer: Any, named: Named) -> None:
    del optimizer.state[named[_NAME]]
    assert named[_NAME] not in optimizer.state


def _pop(optimizer: Any, named: Named) -> None:
    assert set(optimizer.state.pop(named[_NAME])) == {"step", "exp_avg", "exp_avg_sq"}


def _clear_entry(optimizer: Any, named: Named) -> None:
    optimizer.state[named[_NAME]].clear()
    assert not optimizer.state[named[_NAME]]


def _empty_entry(optimizer: Any, named: Named) -> None:
    optimizer.state[named[_NAME]] = {}


def _clear(optimizer: Any, named: Named) -> None:
    optimizer.state.clear()
    assert len(optimizer.state) == 0


def _new(optimizer: Any, named: Named) -> None:
    optimizer.state = defaultdict(dict)


def _restore(optimizer: Any, named: Named) -> None:
    kept = {param: {name: value.clone() for name, value in state.items()} for param, state in optimizer.state.items()}
    _all_moments(optimizer, named)
    del kept[named[_NAME]]
    optimizer.state = defaultdict(dict, kept)


def _set_state(optimizer: Any, named: Named) -> None:
    optimizer.__setstate__({"state": defaultdict(dict), "param_groups": optimizer.param_groups[:1]})


def _as_lightning_does(optimizer: Any, named: Named) -> None:
    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("cpu")
        return type(value)({key: move(item) for key, item in value.items()})

    for param, state in optimizer.state.items():
        optimizer.state[param] = move(state)


_EDITS = [
    _zero,
    _through_data,
    _through_numpy,
    _through_a_view,
    _of_the_state_dict,
    _load_an_edited_state_dict,
    _steps,
    _steps_by_adding,
    _all_moments,
    _assign_values,
    _assign_and_change,
    _assign_entries,
    _update,
    _more_scalars,
    _delete,
    _pop,
    _clear_entry,
    _empty_entry,
    _clear,
    _new,
    _restore,
    _set_state,
    _as_lightning_does,
]


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("edit", "mode"),
    [
        (edit, mode)
        for edit in _EDITS
        for mode in (MODES if edit in (_zero, _of_the_state_dict, _new) else ["in backward"])
    ],
)
def test_the_next_step_goes_by_what_was_changed(edit: Callable[[Any, Named], None], mode: str, tmp_path: Path) -> None:
    with _start(tmp_path, mode) as both:
        for step in range(2):
            take_step(both, mode, step)
        for optimizer, named in sides(both):
            edit(optimizer, named)
        if edit is _more_scalars:
            for optimizer, named in sides(both):
                optimizer.state[named[_NAME]].pop("note")
        take_step(both, mode, 2)
        both.require_equal()


def test_reading_again_gives_the_same_tensors(tmp_path: Path) -> None:
    with _start(tmp_path, "in backward") as both:
        take_step(both, "in backward", 0)
        state = both.optimizer.state[both.model.get_parameter(_NAME)]
        assert state["exp_avg"] is state["exp_avg"]
        state["exp_avg"].zero_()
        assert not state["exp_avg"].any()
        assert not copy.deepcopy(state)["exp_avg"].any()
        assert not state_of(both.engine, both.model.get_parameter(_NAME))["exp_avg"].any()


def test_states_that_were_read_do_not_stay_in_memory(tmp_path: Path) -> None:
    with _start(tmp_path, "in backward") as both:
        take_step(both, "in backward", 0)
        sums = [state["exp_avg"].sum() for state in both.optimizer.state.values()]
        assert len(sums) > 2
        assert len(both.optimizer._shown._shown) == 1
        take_step(both, "in backward", 1)
        both.optimizer.settle_states()
        assert not both.optimizer._shown._shown and not both.optimizer._shown._stale


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", ["in backward", "deferred"])
def test_a_change_of_what_was_read_before_a_step_is_an_error(mode: str, tmp_path: Path) -> None:
    with _start(tmp_path, mode) as both:
        take_step(both, mode, 0)
        moment = both.optimizer.state[both.model.get_parameter(_NAME)]["exp_avg"]
        take_step(both, mode, 1)
        moment.zero_()
        with pytest.raises(StaleStateError, match=rf"'{_NAME}': the tensor 'exp_avg' was read before a step"):
            both.engine(**both.batch(2))
        both.engine.reset()
        take_step(both, mode, 2)
        both.require_equal()


@pytest.mark.deep
def test_what_was_read_before_a_step_may_be_let_go_of_one_by_one(tmp_path: Path) -> None:
    with _start(tmp_path, "in backward") as both:
        take_step(both, "in backward", 0)
        held = [state["exp_avg"] for state in both.optimizer.state.values()]
        for step in range(1, 4):
            take_step(both, "in backward", step)
            held.pop()
        both.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("exp_avg"), "lacks 'exp_avg'"),
        (lambda state: state.__delitem__("step"), "lacks 'step'"),
        (lambda state: state.update(exp_avg=state["exp_avg"].double()), "is torch.float64"),
        (lambda state: state.update(exp_avg=torch.zeros(3)), "exp_avg"),
        (lambda state: state.update(more=torch.zeros(3)), "'more' of shape"),
    ],
    ids=["without a moment", "without a step", "double", "other shape", "another tensor"],
)
def test_a_state_that_cannot_be_is_refused_at_once(change: Any, message: str, tmp_path: Path) -> None:
    with _start(tmp_path, "in backward") as both:
        take_step(both, "in backward", 0)
        with pytest.raises(ValueError, match=message):
            change(both.optimizer.state[both.model.get_parameter(_NAME)])
        take_step(both, "in backward", 1)
        both.require_equal()


def test_state_is_loaded_for_parameters_that_are_frozen_at_the_moment(tmp_path: Path) -> None:
    with _start(tmp_path, "in backward") as both:
        take_step(both, "in backward", 0)
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer, _ in sides(both)]
        take_step(both, "in backward", 1)
        both.model.requires_grad_(False)
        for (optimizer, _), state in zip(sides(both), saved, strict=True):
            optimizer.load_state_dict(state)
        both.model.requires_grad_(True)
        take_step(both, "in backward", 2)
        both.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("as_instance", [False, True])
def test_adagrad_has_its_states_before_the_first_step(as_instance: bool, tmp_path: Path) -> None:
    def make(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(list(named.values()), lr=0.1, initial_accumulator_value=0.5, fused=True)

    section = {"type": "Adagrad", "params": {"lr": 0.1, "initial_accumulator_value": 0.5}}
    with Lockstep.start(
        tmp_path,
        changes={"optimizer": None if as_instance else section},
        reference_optimizer=make,
        arguments=lambda model: {"optimizer": make(dict(model.named_parameters()))} if as_instance else {},
    ) as both:
        assert len(both.optimizer.state) == len(both.reference.optimizer.state)
        both.require_equal()
        for optimizer, named in sides(both):
            optimizer.state[named[_NAME]]["sum"].fill_(2.0)
        both.engine_step(0)
        both.require_equal()


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"bf16": {"enabled": True}}, "main_weight"), ({"infinity": {"tile_above": 256}}, "exp_avg")],
    ids=["main weight", "tiled"],
)
def test_a_change_of_a_copy_in_a_state_dict_is_an_error(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.Linear(32, 4))
    config = everything_on_nvme(tmp_path, {"optimizer": None, **changes})
    engine, optimizer, *_ = infinity.initialize(
        model=model, optimizer=_adamw(dict(model.named_parameters())), config=config
    )
    with engine:
        engine.backward(engine(torch.ones(2, 24, dtype=engine.module[0].bias.dtype)).float().sum())
        engine.step()
        entry = optimizer.state_dict()["state"][0]
        assert entry[name].any()
        entry[name].add_(1)
        with pytest.raises(StaleStateError, match=r"state_dict\(\) of '0\.weight': the tensor .* is a copy.*deepcopy"):
            dict(optimizer.state_dict()["state"][0])
        dict(optimizer.state_dict()["state"][0])
