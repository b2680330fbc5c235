"""The plain loop on the hooked module: ``loss.backward(); optimizer.step(); optimizer.zero_grad()``.

There the user owns accumulation: ``step`` is the boundary, nothing is divided, the config's clipping applies in it,
and no update happens earlier.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import infinity
from infinity.errors import EngineClosedError, StepError
from tests.exactness.case import loss_of
from tests.exactness.lockstep import BF16, Lockstep, engine_on_nvme
from tests.twins import Twins


def _weights(both: Lockstep) -> dict[str, torch.Tensor]:
    params = dict(both.model.named_parameters())
    with infinity.GatheredParameters(list(params.values())):
        return {fqn: param.detach().clone() for fqn, param in params.items()}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("configured", [1, 3])
@pytest.mark.parametrize("changes", [{}, BF16, {"gradient_clipping": 0.1}])
def test_losses_are_not_divided_whatever_the_config_says(
    configured: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**changes, "gradient_accumulation_steps": configured}
    with Lockstep.start(tmp_path, changes=changes, loop="plain") as both:
        for step in range(3):
            for micro_batch in range(step + 1):
                both.plain_backward(step, micro_batch)
            both.plain_update()
        both.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_update_happens_before_step(accumulation: int, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.plain_step(0)
        before = _weights(both)
        for micro_batch in range(accumulation):
            both.plain_backward(1, micro_batch)
        after = _weights(both)
        assert all(torch.equal(before[fqn], after[fqn]) for fqn in before)
        both.plain_update()
        both.optimizer.step()  # without a gradient: it changes nothing
        both.require_equal()


@pytest.mark.parametrize("of", ["optimizer", "model"])
def test_zero_grad_drops_what_was_accumulated(of: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.plain_step(0)
        loss_of(both.model(**both.batch(7))).backward()
        getattr(both, of).zero_grad()
        both.plain_step(1)
        both.require_equal()


def test_two_graphs_alive_at_once(tmp_path: Path) -> None:
    """Two forwards before the first backward, the losses added: GAN and contrastive loops do so."""
    with Lockstep.start(tmp_path) as both:
        for step in range(3):
            first, second = both.batch(step, 0), both.batch(step, 1)
            expected = both.reference.forward(first) + both.reference.forward(second)
            both.reference.backward(expected)
            both.reference.step()
            loss = loss_of(both.model(**first)) + loss_of(both.model(**second))
            loss.backward()
            both.optimizer.step()
            both.optimizer.zero_grad()
            both.note(f"loss {step}", expected, loss)
        both.require_equal()


def test_a_backward_after_the_next_forward(tmp_path: Path) -> None:
    """An old graph is run backward after a newer one; its gradients count just the same."""
    with Lockstep.start(tmp_path) as both:
        for step in range(2):
            pairs = [
                (both.reference.forward(b), loss_of(both.model(**b))) for b in (both.batch(step), both.batch(step, 1))
            ]
            for expected, loss in pairs:
                both.reference.backward(expected)
                loss.backward()
            both.plain_update()
        both.require_equal()


def test_hyperparameters_count_as_they_are_at_step(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        for step in range(3):
            both.plain_backward(step)
            for optimizer in both.each_optimizer():
                optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
                optimizer.param_groups[0]["weight_decay"] = 0.3 - 0.1 * step
            both.plain_update()
            # The update may still be running, or not have begun: it must not see this.
            for optimizer in both.each_optimizer():
                optimizer.param_groups[0]["lr"] = 123.0
                optimizer.param_groups[0]["betas"] = (0.0, 0.0)
                optimizer.param_groups[0]["betas"] = (0.9, 0.95)
        both.require_equal()


# ------------------------------------------------------------------------------------- the optimizer that was passed


def _passed(directory: Path, changes: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, engine_on_nvme(directory, model, changes, optimizer=optimizer)


def _loss(model: nn.Module, number: int) -> torch.Tensor:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def _step(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    loss = _loss(model, number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("makes_scheduler_first", [True, False])
@pytest.mark.parametrize("changes", [{}, {"infinity": {"tile_above": "1KiB"}}])
def test_the_passed_optimizer_trains_as_in_plain_torch(
    changes: dict[str, Any], makes_scheduler_first: bool, tmp_path: Path
) -> None:
    """Torch warns, which is an error here, if a scheduler does not see the optimizer's step come first."""

    early: dict[int, Any] = {}
    extra: dict[Any, nn.Parameter] = {}

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if makes_scheduler_first:
            early[id(optimizer)] = schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        scheduler = early.get(id(optimizer)) or schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for number in range(4):
            if number == 2:
                extra[model] = nn.Parameter(torch.ones(3))
                optimizer.add_param_group({"params": [extra[model]], "lr": 0.5})
                scheduler = schedules.ExponentialLR(optimizer, 0.5)
            if number == 3:
                extra[model].grad = torch.ones(3)

            def closure(number: int = number) -> Any:
                loss = _loss(model, number)
                loss.backward()
                return loss

            optimizer.zero_grad()
            losses.append(optimizer.step(closure).detach())
            scheduler.step()
        losses.append(extra[model].detach())
        losses.append(torch.tensor([group["lr"] for group in optimizer.param_groups]))

    losses: list[torch.Tensor] = []
    torch.manual_seed(0)
    with Twins(tmp_path, nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8)), make, **changes) as twins:
        twins.change(train)
        assert twins.engine.global_steps == 4
        assert all(torch.equal(a, b) for a, b in zip(losses[:6], losses[6:], strict=True))
        twins.require_equal(has_states=False)
        groups = twins.optimizer.param_groups
    assert twins.optimizer.param_groups is groups and type(twins.optimizer) is torch.optim.AdamW


def test_the_passed_optimizer_with_a_gradient_scaler_and_hooks(tmp_path: Path) -> None:
    seen: list[Any] = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
        optimizer.register_state_dict_post_hook(lambda *_: seen.append("state_dict"))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(3):
            scaler.scale(_loss(model, number)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        optimizer.state_dict()

    with Twins(tmp_path, nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8))) as twins:
        twins.change(train)
        assert seen == ["step", "step", "step", "state_dict"] * 2
        twins.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("loads_checkpoint", [False, True])
def test_the_passed_optimizer_does_not_begin_anew_unnoticed(
    loads_checkpoint: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, engine = _passed(tmp_path, {})
    _step(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    if loads_checkpoint:
        engine.save_checkpoint(str(tmp_path / "saved"))
        engine.close()
        model, optimizer, engine = _passed(tmp_path, {})
        engine.load_checkpoint(str(tmp_path / "saved"))
    engine.close()
    with pytest.raises(StepError, match="the states are lost"):
        optimizer.state_dict()
    with pytest.raises(StepError, match="load the result with optimizer"):
        _step(model, optimizer, 1)
    engine_on_nvme(tmp_path, model, optimizer=optimizer).close()
    assert "it starts without states" in caplog.text
    optimizer.load_state_dict(saved)
    model.zero_grad()
    _step(model, optimizer, 1)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_a_state_dict_that_outlives_its_engine_has_what_was_read(tmp_path: Path) -> None:
    model, optimizer, engine = _passed(tmp_path, {})
    _step(model, optimizer, 0)
    saved = optimizer.state_dict()
    first = saved["state"][0]["exp_avg"].clone()
    engine.close()
    assert torch.equal(saved["state"][0]["exp_avg"], first)
    with pytest.raises(EngineClosedError, match=r"'0.bias' was not read before the engine was closed.*deepcopy"):
        optimizer.load_state_dict(saved)


def test_a_passed_optimizer_that_made_no_step_is_an_ordinary_one_again(tmp_path: Path) -> None:
    model, optimizer, engine = _passed(tmp_path, {})
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    engine.close()
    assert [_step(model, optimizer, n) for n in range(3)] == [_step(twin, plain, n) for n in range(3)]
    assert len(optimizer.state_dict()["state"]) == 4


def test_gradients_that_are_added_to_clipped_ones_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, engine = _passed(tmp_path, {"gradient_clipping": 0.01})
    with engine:
        for number in range(2):
            _step(model, engine.optimizer, number)
        assert "clip_grad_norm_" not in caplog.text
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            engine.optimizer.step()
        assert caplog.text.count("gradients are added to those of the step before") == 1
