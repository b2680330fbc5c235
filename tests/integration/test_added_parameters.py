"""Parameters that come into the groups after `initialize`: frozen ones that are thawed, and new ones in memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import infinity
from infinity.errors import BudgetTooSmallError, ModelError, StepError
from tests.exactness.lockstep import PLAIN, Lockstep, everything_on_nvme, make_batch, take_steps
from tests.exactness.user_edits import MODES, Named, take_step
from tests.twins import Twins, adamw

_NAMES = [fqn for fqn, _ in PLAIN.make("none").named_parameters()]
_FROZEN = _NAMES[:-3]


def _adamw(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def _momentum(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def _start(
    tmp_path: Path, changes: dict[str, Any], kind: Callable[[list[Any]], torch.optim.Optimizer] = _adamw
) -> Lockstep:
    """Under 16 bits, a frozen parameter is the one that the model has: its main weight begins with that."""

    def make(named: Named) -> torch.optim.Optimizer:
        for fqn in _FROZEN:
            named[fqn].requires_grad_(False)
        return kind([param for fqn, param in named.items() if fqn not in _FROZEN])

    both = Lockstep.start(tmp_path, changes=changes, optimizer=make)
    for fqn in _FROZEN:
        param = both.reference.model.get_parameter(fqn).requires_grad_(False)
        both.reference.main[fqn].data.copy_(param)
    return both


def _thaw(both: Lockstep, names: list[str], **options: Any) -> None:
    both.optimizer.add_param_group({"params": [both.model.get_parameter(fqn) for fqn in names], **options})
    both.reference.optimizer.add_param_group({"params": [both.reference.main[fqn] for fqn in names], **options})
    for model in (both.model, both.reference.model):
        for fqn in names:
            model.get_parameter(fqn).requires_grad_(True)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("kind", [_adamw, _momentum])
@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_model_is_thawed_group_by_group(
    mode: str, kind: Callable[[list[Any]], torch.optim.Optimizer], tmp_path: Path
) -> None:
    with _start(tmp_path, MODES[mode], kind) as both:
        take_step(both, mode, 0)
        half = len(_FROZEN) // 2
        for step, names in enumerate([_FROZEN[half:], _FROZEN[:half]], start=1):
            _thaw(both, names, lr=3e-2)
            take_step(both, mode, 2 * step)
            take_step(both, mode, 2 * step + 1)
        both.require_equal()


def test_gradients_and_hooks_of_a_plain_loop_survive(tmp_path: Path) -> None:
    fired: list[int] = []
    with _start(tmp_path, MODES["step"]) as both:
        last = both.model.get_parameter(_NAMES[-1])
        last.register_post_accumulate_grad_hook(lambda param: fired.append(1))
        both.plain_backward(0)
        both.reference.step()
        both.optimizer.step()  # the gradients stay until zero_grad
        before = last.grad.clone()
        _thaw(both, _FROZEN)
        assert torch.equal(last.grad, before)
        both.optimizer.zero_grad()
        both.plain_step(1)
        assert fired == [1, 1]
        both.require_equal()


def _engine(tmp_path: Path, **changes: Any) -> tuple[Any, Any, nn.Module]:
    model = PLAIN.make("none")
    for fqn in _FROZEN:
        model.get_parameter(fqn).requires_grad_(False)
    config = everything_on_nvme(tmp_path, {"optimizer": None, **changes})
    own = _adamw([param for param in model.parameters() if param.requires_grad])
    engine, optimizer, *_ = infinity.initialize(model=model, config=config, optimizer=own)
    return engine, optimizer, model


def _group(model: nn.Module) -> dict[str, Any]:
    return {"params": [model.get_parameter(fqn).requires_grad_(True) for fqn in _FROZEN]}


def test_where_there_is_no_room_the_error_names_the_key_and_the_training_goes_on(tmp_path: Path) -> None:
    results: list[dict[str, torch.Tensor]] = []
    for tries in (False, True):
        with pytest.raises(BudgetTooSmallError) as least:
            _engine(tmp_path, infinity={"host_memory_budget": 1})
        engine, optimizer, model = _engine(tmp_path, infinity={"host_memory_budget": least.value.minimum_bytes})
        with engine:
            take_steps(engine, 0)
            if tries:
                group = _group(model)
                with pytest.raises(BudgetTooSmallError, match=r"host_memory_budget"):
                    optimizer.add_param_group(group)
                for param in group["params"]:
                    param.requires_grad_(False)
                assert len(optimizer.param_groups) == 1
            take_steps(engine, 1)
            results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


_FP16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 2, "hysteresis": 1}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("changes", [{}, {"gradient_clipping": 0.1}, {"bf16": {"enabled": True}}, {"fp16": _FP16}])
def test_between_the_micro_batches_of_a_step(changes: dict[str, Any], tmp_path: Path) -> None:
    with _start(tmp_path, {"gradient_accumulation_steps": 2, **changes}) as both:
        both.engine_step(0)
        for micro_batch in range(2):
            batch = both.batch(1, micro_batch)
            both.reference.backward(both.reference.forward(batch))
            both.engine.backward(both.engine(**batch))
            if micro_batch == 0:
                both.engine.step()
                _thaw(both, _FROZEN)
        both.reference.step()
        both.engine.step()
        both.engine_step(2)
        both.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("moment", ["gathered", "in forward"])
def test_not_in_the_midst_of_things(moment: str, tmp_path: Path) -> None:
    engine, optimizer, model = _engine(tmp_path)
    with engine:
        group = _group(model)

        def add(*_: Any) -> None:
            with pytest.raises(StepError, match=r"add_param_group.* Call it "):
                optimizer.add_param_group(group)

        if moment == "gathered":
            with infinity.GatheredParameters(list(model.parameters())[:1]):
                add()
        else:
            handle = model.get_submodule("blocks.1").register_forward_hook(add)
            with torch.no_grad():
                engine(**make_batch(0))
            handle.remove()
        optimizer.add_param_group(group)
        take_steps(engine, 2)


def test_a_durable_run_wants_it_in_a_group_from_the_start(tmp_path: Path) -> None:
    engine, optimizer, model = _engine(tmp_path, infinity={"durable": True})
    with engine, pytest.raises(ModelError, match=r"durable run .* before infinity\.initialize"):
        optimizer.add_param_group(_group(model))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-1)


def _twins(tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw, **changes: Any) -> Twins:
    torch.manual_seed(3)
    return Twins(tmp_path, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), make, **changes)


def _add(model: nn.Sequential, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(8, 8, dtype=dtype)
    model.append(layer)
    optimizer.add_param_group({"params": list(layer.parameters())})
    return layer


def _added_loss(number: int, dtype: torch.dtype = torch.float32) -> Callable[[Any], torch.Tensor]:
    batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(number)).to(dtype)
    return lambda model: model(batch).float().square().mean()


@pytest.mark.parametrize("make", [adamw, _sgd])
def test_each_state_is_there_once_and_in_torchs_order(make: Any, tmp_path: Path) -> None:
    def move(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        groups[0]["params"].insert(0, groups[1]["params"].pop())

    def count_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["step"] = state["step"] + 3

    with _twins(tmp_path, make) as twins:
        twins.step(_added_loss(0))
        twins.change(_add)
        twins.change(move)
        for number in range(1, 3):
            twins.step(_added_loss(number))
            names = [
                [name for key in optimizer.state for name, each in model.named_parameters() if each is key]
                for model, optimizer in twins.sides
            ]
            assert names[0] == names[1]
            twins.change(count_on)
        twins.require_equal()
        twins.optimizer.state = {}
        assert len(twins.optimizer.state) == 0


@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_states_of_16_bits_are_loaded_as_what_they_were(way: str, tmp_path: Path) -> None:
    with _twins(tmp_path / "drive", bf16={"enabled": True}) as twins:
        engine, optimizer = twins.engine, twins.optimizer
        layer = _add(twins.model, optimizer, torch.bfloat16)
        engine.backward(_added_loss(0, torch.bfloat16)(engine))
        engine.step()
        before = copy.deepcopy(optimizer.state[layer.weight])
        assert before["exp_avg"].dtype == torch.bfloat16
        if way == "checkpoint":
            engine.save_checkpoint(tmp_path / "saved")
            engine.load_checkpoint(tmp_path / "saved")
        else:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        after = optimizer.state[layer.weight]
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert after[name].dtype == value.dtype and torch.equal(after[name], value)


def test_gradients_of_a_step_that_is_forgotten_are_gone(tmp_path: Path) -> None:
    with _twins(tmp_path) as twins:
        twins.change(_add)
        twins.engine.backward(_added_loss(0)(twins.engine))
        twins.engine.reset()
        assert twins.model[2].weight.grad is None
        twins.step(_added_loss(1))
        twins.require_equal()


def test_two_kinds_of_backward_in_one_step_are_refused(tmp_path: Path) -> None:
    """What comes to parameters that the engine holds is divided as it comes; to these it has come already."""
    with _twins(tmp_path, gradient_accumulation_steps=2) as twins:
        twins.change(_add)
        twins.engine.backward(_added_loss(0)(twins.engine))
        twins.engine.step()
        _added_loss(1)(twins.model).backward()
        with pytest.raises(StepError, match=r"loss\.backward\(\) and engine\.backward.*Call engine\.reset\(\)"):
            twins.engine.step()
        twins.engine.reset()
        twins.step(_added_loss(0), _added_loss(1))
        twins.require_equal()


def test_a_parameter_outside_of_the_model_is_clipped_with_it(tmp_path: Path) -> None:
    factors = {True: nn.Parameter(torch.ones(())), False: nn.Parameter(torch.ones(()))}
    norms: list[torch.Tensor] = []
    with _twins(tmp_path, gradient_clipping=0.01) as twins:

        def clip(*_: Any) -> None:
            norms.append(torch.nn.utils.clip_grad_norm_([*twins.plain.parameters(), factors[True]], 0.01))

        twins.expected.register_step_pre_hook(clip)
        twins.change(lambda model, optimizer: optimizer.add_param_group({"params": [factors[model is twins.plain]]}))
        for number in range(3):
            twins.step(lambda model, number=number: _added_loss(number)(model) * factors[model is twins.plain])
            assert twins.engine.get_global_grad_norm() == float(norms[-1])
        assert torch.equal(factors[True], factors[False])


class _Recorded(Dataset[torch.Tensor]):
    """Four samples, and the order in which they were drawn."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.drawn.append(index)
        return torch.full((8,), float(index))


def test_a_new_layout_keeps_the_place_in_the_data_and_the_timeline(tmp_path: Path) -> None:
    model, samples, trace = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), _Recorded(), tmp_path / "trace.json"
    model[0].requires_grad_(False)
    engine, optimizer, *_ = infinity.initialize(
        model=model,
        optimizer=_adamw(list(model[1].parameters())),
        training_data=samples,
        config=everything_on_nvme(tmp_path, {"optimizer": None, "infinity": {"timeline": str(trace)}}),
    )
    with engine:
        for _ in range(2):
            engine.train_batch(loss_fn=lambda output, batch: output.square().mean())
        optimizer.add_param_group({"params": list(model[0].requires_grad_(True).parameters())})
        for _ in range(2):
            engine.train_batch(loss_fn=lambda output, batch: output.square().mean())
    assert sorted(samples.drawn) == [0, 1, 2, 3]
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {event["tid"] for event in events if event["name"] == "thread_name" and event["args"]["name"] == "steps"}
    assert sum(event["ph"] == "X" and event["tid"] in rows for event in events) == 4
