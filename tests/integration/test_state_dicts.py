"""State dicts of model and optimizer: true copies, tied where the model ties, usable by plain torch in both directions."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import InfinityError
from swapper import Swapper
from tests.exactness.lockstep import BF16, SHAPES_BY_NAME, Lockstep, everything_on_nvme
from tests.internals import user_copies
from tests.states import state_of


@pytest.fixture(params=["in memory", "in files"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "in files":
        monkeypatch.setattr(user_copies, "_LEAST_BYTES", 0)
    return str(request.param)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("shape", ["tied_weights", "transposed"])
@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
def test_copies_are_true_and_stay_as_they_are(shape: str, changes: dict[str, Any], where: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME[shape], changes=changes) as both:
        both.engine_step(0)
        weights, state = both.model.state_dict(), copy.deepcopy(both.optimizer.state_dict())
        kept = {key: value.clone() for key, value in both.reference.model.state_dict().items()}
        expected = copy.deepcopy(both.reference.optimizer.state_dict())["state"]
        both.engine_step(1)
        both.require_equal()
        assert list(weights) == list(kept)
        for key, value in kept.items():
            assert torch.equal(weights[key], value) and weights[key].stride() == value.stride(), key
        for index, entries in expected.items():
            for name, value in entries.items():
                assert torch.equal(torch.as_tensor(state["state"][index][name]), value)
        for value in weights.values():
            value.zero_()  # they belong to who asked for them
        both.engine_step(2)
        both.require_equal()


def test_tied_weights_are_tied_in_a_state_dict_and_saved_once(where: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["tied_weights"]) as both:
        both.engine_step(0)
        plain, found = both.reference.model.state_dict(), both.model.state_dict()
        names = list(plain)
        for one in names:
            for other in names:
                is_tied = plain[one].untyped_storage().data_ptr() == plain[other].untyped_storage().data_ptr()
                assert (found[one].untyped_storage().data_ptr() == found[other].untyped_storage().data_ptr()) == is_tied
        torch.save(plain, tmp_path / "plain.pt")
        torch.save(found, tmp_path / "found.pt")
        assert os.path.getsize(tmp_path / "found.pt") <= os.path.getsize(tmp_path / "plain.pt") + 1024
        # Another state dict is another copy.
        tied = next(name for name in names if found[name].is_floating_point())
        found[tied].zero_()
        assert torch.equal(both.model.state_dict()[tied], plain[tied])


class _Oops(Exception):
    pass


def _fail(*_: Any) -> None:
    raise _Oops


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[Any, nn.Sequential]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    with engine:
        yield engine, model


def _detached(parameter: nn.Parameter) -> str:
    """How ``detach`` answers outside of everything."""
    try:
        value = parameter.detach()
    except InfinityError as error:
        return type(error).__name__
    return type(value).__name__


@pytest.mark.parametrize("register", ["register_state_dict_pre_hook", "register_state_dict_post_hook"])
@pytest.mark.parametrize("which", [0, 1], ids=["first module", "later module"])
def test_a_hook_that_raises_in_state_dict_leaves_nothing_behind(
    register: str, which: int, started: tuple[Any, nn.Sequential]
) -> None:
    engine, model = started
    before = _detached(model[0].weight)
    handle = getattr(model[which], register)(_fail)
    with pytest.raises(_Oops):
        model.state_dict()
    handle.remove()
    assert _detached(model[0].weight) == before
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    assert torch.equal(model.state_dict()["0.weight"], model[0].weight.clone())


def test_copies_in_files_go_through_pickle_and_leave_nothing(
    started: tuple[Any, nn.Sequential], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_copies, "_LEAST_BYTES", 0)
    engine, model = started
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    num_open = len(os.listdir("/proc/self/fd"))
    state, weights = copy.deepcopy(engine.optimizer.state_dict()), model.state_dict()
    assert len(os.listdir("/proc/self/fd")) <= num_open and os.listdir(tmp_path) == []
    again = pickle.loads(pickle.dumps(weights))
    assert all(torch.equal(again[key], weights[key]) for key in weights)
    del state, weights
    assert os.listdir(tmp_path) == []


def test_writing_to_a_copy_is_told_once(started: tuple[Any, nn.Sequential], caplog: pytest.LogCaptureFixture) -> None:
    engine, model = started
    weights = model.state_dict()
    engine(torch.ones(2, 4))
    weights["0.weight"].mul_(0.5)
    model.load_state_dict(weights)
    engine(torch.ones(2, 4))
    assert torch.equal(model[0].weight.clone(), weights["0.weight"]) and "state_dict()" not in caplog.text
    weights = model.state_dict()
    with torch.no_grad():
        weights["1.0.weight"].mul_(0.5)
    for _ in range(2):
        engine(torch.ones(2, 4))
    assert caplog.text.count("state_dict() returned for '1.0.weight' was written to. It is a copy") == 1
    assert not torch.equal(model[1][0].weight.clone(), weights["1.0.weight"])


def test_optimizer_state_dict_has_torchs_layout_and_is_lazy(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        both.engine_step(1)
        both.engine.flush()
        with mock.patch.object(Swapper, "read", side_effect=AssertionError("gathered before an entry was read")):
            lazy = both.optimizer.state_dict()
            assert repr(lazy) and "blocks.0.up.weight" in repr(lazy["state"].values())
        expected = both.reference.optimizer.state_dict()
        assert lazy["param_groups"] == expected["param_groups"]
        assert list(lazy["state"]) == list(expected["state"])
        for index, entries in expected["state"].items():
            gathered = dict(lazy["state"][index])
            assert gathered.keys() == entries.keys()
            assert all(torch.equal(torch.as_tensor(gathered[key]), entries[key]) for key in entries)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("changes", [{}, BF16])
def test_optimizer_state_is_loaded_from_plain_torch(changes: dict[str, Any], tmp_path: Path) -> None:
    """An engine that gets another run's weights and optimizer state goes on as that run does."""
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(2):
            batch = both.batch(step)
            both.reference.backward(both.reference.forward(batch))
            both.reference.step()
        both.reference.param_groups[0]["lr"] = 1e-3
        weights = {fqn: param.detach().clone() for fqn, param in both.reference.model.named_parameters()}
        with infinity.GatheredParameters(both.model.parameters(), modifier_rank=0), torch.no_grad():
            for fqn, param in both.model.named_parameters():
                param.copy_(weights[fqn])
        if changes:
            # The low bits of the reference's main weights are not in its model weights.
            with torch.no_grad():
                for fqn, main in both.reference.main.items():
                    main.copy_(state_of(both.engine, both.model.get_parameter(fqn))["weight"])
        both.optimizer.load_state_dict(both.reference.optimizer.state_dict())
        assert both.optimizer.param_groups[0]["lr"] == 1e-3
        for step in range(2, 4):
            both.engine_step(step)
        both.require_equal()


@pytest.mark.parametrize("of_state_dict", [True, False])
def test_an_entry_is_read_once_and_again_after_a_step(of_state_dict: bool, tmp_path: Path) -> None:
    """Of divided states, all ranks have to look as often."""
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        both.engine.flush()
        parameter = next(iter(both.model.parameters()))
        entry: Any = both.optimizer.state_dict()["state"][0] if of_state_dict else both.optimizer.state[parameter]
        with mock.patch.object(Swapper, "read", autospec=True, side_effect=Swapper.read) as read:
            assert len(entry["exp_avg"]) and read.call_count
            num_reads = read.call_count
            for look in (entry.items, entry.values, entry.copy, lambda: list(entry), lambda: entry["step"]):
                look()
            assert {**entry}.keys() == dict(entry).keys() == (entry | {}).keys() == ({} | entry).keys()
            assert entry == entry and list(reversed(entry)) == list(entry)[::-1] and entry.get("nothing", 5) == 5
            assert read.call_count == num_reads
            copies = (copy.deepcopy, pickle.dumps) if of_state_dict else ()
            for number, make in enumerate(copies, 2):
                make(both.optimizer.state_dict()["state"][0])
                assert read.call_count == number * num_reads, "it is not kept"
        both.engine_step(1)
        assert float(entry["step"]) == 2 and entry["step"] is entry["step"]


def test_an_entry_of_a_state_dict_is_the_callers_own(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        parameter, saved = next(iter(both.model.parameters())), both.optimizer.state_dict()
        entry = saved["state"][0]
        entry["exp_avg"].zero_()
        entry["step"] = torch.tensor(7.0)
        assert float(both.optimizer.state[parameter]["step"]) == 1 and both.optimizer.state[parameter]["exp_avg"].any()
        both.engine_step(1)
        assert float(entry["step"]) == 7 and not entry["exp_avg"].any(), "once changed, it is an ordinary dict"
        for copied in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved)), saved):
            both.optimizer.load_state_dict(copied)
            state = both.optimizer.state[parameter]
            assert float(state["step"]) == 7 and not state["exp_avg"].any()


def test_hooks_of_state_dicts_run_and_the_optimizer_itself_is_not_copied(started: tuple[Any, nn.Sequential]) -> None:
    optimizer, calls = started[0].optimizer, list[str]()
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: calls.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert calls == ["saving", "loading", "loaded"]
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"optimizer\.state_dict\(\)"):
            attempt(optimizer)


_SPOILT: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda saved, entry: saved["param_groups"].pop(), "different number of parameter groups"),
    (lambda saved, entry: saved["param_groups"][0]["params"].pop(), "doesn't match the size"),
    (lambda saved, entry: entry.update(exp_avg=entry["exp_avg"][:-1]), r"'exp_avg' of parameter '{fqn}' with shape \("),
    (lambda saved, entry: entry.update(exp_avg=entry["exp_avg"].view(-1)), r"'{fqn}' with shape \(\d+,\)"),
    (lambda saved, entry: entry.pop("exp_avg_sq"), "lacks state 'exp_avg_sq' of parameter '{fqn}'"),
    (lambda saved, entry: entry.update(more=torch.zeros_like(entry["exp_avg"])), "'more' of parameter '{fqn}'"),
    (lambda saved, entry: entry.update(exp_avg=3), "'exp_avg' of parameter '{fqn}' with shape int"),
    (lambda saved, entry: saved["param_groups"][0].update(amsgrad=True), "group 0 make AdamW keep .*max_exp_avg_sq"),
]


def test_a_state_dict_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        fqn, _ = next(both.model.named_parameters())
        for spoil, message in _SPOILT:
            saved = copy.deepcopy(both.reference.optimizer.state_dict())
            saved["param_groups"][0]["lr"] = 0.77
            for entry in saved["state"].values():
                entry["exp_avg_sq"].add_(1)
            spoil(saved, saved["state"][0])
            with pytest.raises(ValueError, match=message.format(fqn=fqn)):
                both.optimizer.load_state_dict(saved)
        both.engine_step(1)
        both.require_equal()
