"""``optimizer.state`` as users change it: what is assigned counts, and what would be lost raises."""

from __future__ import annotations

import copy
import io
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import AccessError
from tests.exactness import user_edits
from tests.exactness.lockstep import Lockstep
from tests.exactness.user_edits import Named, sides, start, take_step
from tests.states import state_of

_NAME = "blocks.0.up.weight"
MODES = [mode for mode in user_edits.MODES if mode != "step"]


def _adamw(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(named.values()), lr=1e-2)


def _start(tmp_path: Path, mode: str) -> Lockstep:
    return start(tmp_path, mode, _adamw)


def _load_an_edited_state_dict(optimizer: Any, named: Named) -> None:
    found = optimizer.state_dict()
    for entry in found["state"].values():
        entry["exp_avg"].zero_()
        assert not entry["exp_avg"].any()
    optimizer.load_state_dict(found)


def _steps(optimizer: Any, named: Named) -> None:
    for state in optimizer.state.values():
        state["step"] = torch.full_like(state["step"], 7)


def _assign_values(optimizer: Any, named: Named) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone() * 0.5 if name == "exp_avg" else value


def _assign_entries(optimizer: Any, named: Named) -> None:
    for param, state in optimizer.state.items():
        optimizer.state[param] = {name: value * 2 if name == "exp_avg_sq" else value for name, value in state.items()}


def _new(optimizer: Any, named: Named) -> None:
    optimizer.state = defaultdict(dict)


def _restore(optimizer: Any, named: Named) -> None:
    kept = {param: {name: value.clone() for name, value in state.items()} for param, state in optimizer.state.items()}
    _assign_values(optimizer, named)
    del kept[named[_NAME]]
    optimizer.state = defaultdict(dict, kept)


_EDITS = [_load_an_edited_state_dict, _steps, _assign_values, _assign_entries, _new, _restore]


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("edit", "mode"),
    [
        (edit, mode)
        for edit in _EDITS
        for mode in (MODES if edit in (_load_an_edited_state_dict, _new) else ["in backward"])
    ],
)
def test_the_next_step_goes_by_what_was_changed(edit: Callable[[Any, Named], None], mode: str, tmp_path: Path) -> None:
    with _start(tmp_path, mode) as both:
        for step in range(2):
            take_step(both, mode, step)
        for optimizer, named in sides(both):
            edit(optimizer, named)
        take_step(both, mode, 2)
        both.require_equal()


def _numpy_write(tensor: torch.Tensor) -> None:
    tensor.numpy()[0] = 1


@pytest.mark.deep(but=3)
@pytest.mark.parametrize(
    "write",
    [
        torch.Tensor.zero_,
        lambda tensor: tensor.__setitem__(0, 1.0),
        lambda tensor: tensor.chunk(2)[1].zero_(),
        lambda tensor: tensor.data.mul_(0.5),
        lambda tensor: setattr(tensor, "data", torch.zeros_like(tensor)),
        lambda tensor: torch.mul(torch.ones_like(tensor), 2, out=tensor),
        lambda tensor: torch._foreach_mul_([torch.ones(1), tensor], 2.0),
    ],
)
def test_writing_to_what_was_read_raises_and_changes_nothing(write: Callable[[Any], Any], tmp_path: Path) -> None:
    with _start(tmp_path, "in backward") as both:
        take_step(both, "in backward", 0)
        state = both.optimizer.state[both.model.get_parameter(_NAME)]
        cure = r"optimizer\.state\[parameter\]\['exp_avg'\] = tensor"
        with pytest.raises(AccessError, match=rf"'{_NAME}', 'exp_avg'.*would be lost.*{cure}"):
            write(state["exp_avg"])
        with pytest.raises(AccessError, match="'step'"):
            state["step"].add_(1)
        with pytest.raises(ValueError, match="read-only"):
            _numpy_write(state["exp_avg"])
        take_step(both, "in backward", 1)
        both.require_equal()


def test_what_was_read_is_used_like_any_tensor(tmp_path: Path) -> None:
    with _start(tmp_path, "in backward") as both:
        take_step(both, "in backward", 0)
        moment = both.optimizer.state[both.model.get_parameter(_NAME)]["exp_avg"]
        expected = both.reference.optimizer.state[both.reference.main[_NAME]]["exp_avg"]
        file = io.BytesIO()
        torch.save({"moment": moment}, file)
        file.seek(0)
        results = [moment.clone(), moment * 1, copy.deepcopy(moment), torch.load(file)["moment"]]
        for result in results:
            assert type(result) is torch.Tensor and torch.equal(result, expected)
            result.zero_()
        assert torch.equal(moment, expected) and (moment.numpy() == expected.numpy()).all()
        assert isinstance(moment, torch.Tensor) and moment.tolist() == expected.tolist() and repr(moment)


def test_what_was_read_is_that_of_the_last_step(tmp_path: Path) -> None:
    with _start(tmp_path, "in backward") as both:
        parameter = both.model.get_parameter(_NAME)
        take_step(both, "in backward", 0)
        state = both.optimizer.state[parameter]
        assert state["exp_avg"] is state["exp_avg"] and float(state["step"]) == 1
        infinity.safe_set_full_optimizer_state(parameter, torch.ones_like(state["exp_avg"]), "exp_avg")
        assert bool((state["exp_avg"] == 1).all())
        state["exp_avg"] = torch.zeros(parameter.shape)
        assert not state["exp_avg"].any()
        assert not copy.deepcopy(state)["exp_avg"].any()
        assert not state_of(both.engine, parameter)["exp_avg"].any()
        take_step(both, "in backward", 1)
        assert float(state["step"]) == 2


def test_states_that_were_read_do_not_stay_in_memory(tmp_path: Path) -> None:
    with _start(tmp_path, "in backward") as both:
        take_step(both, "in backward", 0)
        held = [weakref.ref(state["exp_avg"]) for state in both.optimizer.state.values()]
        assert len(held) > 2 and sum(reference() is not None for reference in held) == 1, "the last one"
        take_step(both, "in backward", 1)
        assert not any(reference() is not None for reference in held)


@pytest.mark.parametrize(
    "look", [lambda both: take_step(both, "in backward", 1), lambda both: both.optimizer.state_dict()]
)
def test_writing_to_what_was_assigned_raises(look: Callable[[Lockstep], Any], tmp_path: Path) -> None:
    with _start(tmp_path, "in backward") as both:
        take_step(both, "in backward", 0)
        for optimizer, named in sides(both):
            state = optimizer.state[named[_NAME]]
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        both.optimizer.state[both.model.get_parameter(_NAME)] = {
            **both.optimizer.state[both.model.get_parameter(_NAME)],
            "exp_avg_sq": (mine := torch.ones(both.model.get_parameter(_NAME).shape)),
        }
        mine.zero_()
        with pytest.raises(AccessError, match=rf"'{_NAME}', 'exp_avg_sq': the tensor was written to after"):
            look(both)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("exp_avg"), "lacks 'exp_avg'"),
        (lambda state: state.update(exp_avg=state["exp_avg"].double()), "is torch.float64"),
        (lambda state: state.update(exp_avg=torch.zeros(3)), "exp_avg"),
        (lambda state: state.update(more=torch.zeros(3)), "'more' of parameter"),
    ],
    ids=["without a moment", "double", "other shape", "another tensor"],
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
            optimizer.state[named[_NAME]]["sum"] = torch.full(named[_NAME].shape, 2.0)
        both.engine_step(0)
        both.require_equal()
