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

import infinity
from infinity.errors import GradientNotResidentError, StepError, StepOrderError
from tests.exactness.case import loss_of
from tests.exactness.lockstep import BF16, Lockstep, everything_on_nvme


def _weights(both: Lockstep) -> dict[str, torch.Tensor]:
    params = dict(both.model.named_parameters())
    with infinity.GatheredParameters(list(params.values())):
        return {fqn: param.detach().clone() for fqn, param in params.items()}


@pytest.mark.parametrize("changes", [{}, BF16, {"gradient_clipping": 0.1}, {"gradient_clipping": 0.1, **BF16}])
def test_steps_are_those_of_plain_torch(changes: dict[str, Any], tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(3):
            both.plain_step(step)
        assert both.engine.global_steps == 3
        both.require_equal()


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
        assert any(not torch.equal(before[fqn], value) for fqn, value in _weights(both).items())
        both.require_equal()


def test_zero_grad_drops_what_was_accumulated(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.plain_step(0)
        loss_of(both.model(**both.batch(7))).backward()
        both.optimizer.zero_grad()
        both.plain_step(1)
        both.require_equal()


def test_module_zero_grad_drops_too_or_raises(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.plain_step(0)
        loss_of(both.model(**both.batch(7))).backward()
        try:
            both.model.zero_grad()
        except GradientNotResidentError as error:
            assert "optimizer.zero_grad()" in str(error)
            both.optimizer.zero_grad()
        both.plain_step(1)
        both.require_equal()


def test_gradients_left_standing_are_accumulated_into_the_next_step(tmp_path: Path) -> None:
    """Without zero_grad, torch adds the next gradients to those of the step before; so must this, or it must raise."""
    with Lockstep.start(tmp_path) as both:
        batch = both.batch(0)
        loss_of(both.model(**batch)).backward()
        both.optimizer.step()
        loss = loss_of(both.model(**both.batch(1)))

        # The reference has no zero_grad of its own to leave out: this is its optimizer's state after such a step.
        both.reference.backward(both.reference.forward(batch))
        kept = {fqn: main.grad.clone() for fqn, main in both.reference.main.items() if main.grad is not None}
        both.reference.step()
        for fqn, gradient in kept.items():
            both.reference.main[fqn].grad = gradient
        both.reference.backward(both.reference.forward(both.batch(1)))
        both.reference.step()
        try:
            loss.backward()
            both.optimizer.step()
        except StepError:
            return
        both.require_equal()


def test_step_without_backward_changes_nothing(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.plain_step(0)
        before = _weights(both)
        both.optimizer.step()
        after = _weights(both)
        assert all(torch.equal(before[fqn], after[fqn]) for fqn in before)
        both.plain_step(1)
        both.require_equal()


def test_backward_twice_through_one_graph(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        for step in range(2):
            batch = both.batch(step)
            expected = both.reference.forward(batch)
            expected.backward(retain_graph=True)
            both.reference.backward(expected)
            both.reference.step()
            loss = loss_of(both.model(**batch))
            loss.backward(retain_graph=True)
            loss.backward()
            both.optimizer.step()
            both.optimizer.zero_grad()
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


def test_a_forward_without_backward_between(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        for step in range(3):
            loss_of(both.model(**both.batch(step + 10)))
            with torch.no_grad():
                loss_of(both.model(**both.batch(step + 20)))
            both.plain_step(step)
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


def test_closure_as_torch_defines_it(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        for step in range(2):
            batch = both.batch(step)

            def closure(batch: dict[str, Any] = batch) -> torch.Tensor:
                both.optimizer.zero_grad()
                loss = loss_of(both.model(**batch))
                loss.backward()
                return loss

            loss = both.optimizer.step(closure)
            expected = both.reference.forward(batch)
            both.reference.backward(expected)
            both.reference.step()
            both.note(f"loss {step}", expected, loss)
        both.optimizer.zero_grad()
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


def _schedules() -> dict[str, Any]:
    from torch.optim import lr_scheduler as s

    return {
        "LambdaLR": lambda o: s.LambdaLR(o, lambda epoch: 0.9**epoch),
        "StepLR": lambda o: s.StepLR(o, 1, 0.5),
        "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 4),
        "OneCycleLR": lambda o: s.OneCycleLR(o, 0.01, total_steps=6),
        "CyclicLR": lambda o: s.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),
        "SequentialLR": lambda o: s.SequentialLR(
            o, [s.LinearLR(o, 0.1, total_iters=2), s.ExponentialLR(o, 0.5)], milestones=[2]
        ),
    }


@pytest.mark.parametrize("name", _schedules())
def test_torch_schedules_drive_it(name: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        schedules = [_schedules()[name](optimizer) for optimizer in both.each_optimizer()]
        for step in range(4):
            both.plain_step(step)
            for schedule in schedules:
                schedule.step()
            lrs = [[group["lr"] for group in optimizer.param_groups] for optimizer in both.each_optimizer()]
            assert lrs[0] == lrs[1] == both.engine.get_lr()
        both.require_equal()


def test_a_plateau_schedule_drives_it(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        make = torch.optim.lr_scheduler.ReduceLROnPlateau
        schedules = [make(optimizer, patience=0, factor=0.1) for optimizer in both.each_optimizer()]
        for step in range(3):
            both.plain_step(step)
            for schedule in schedules:
                schedule.step(1.0)
        assert both.optimizer.param_groups[0]["lr"] < 1e-3
        both.require_equal()


def test_step_hooks_of_the_optimizer_run(tmp_path: Path) -> None:
    seen = []
    with Lockstep.start(tmp_path) as both:
        both.optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
        both.optimizer.register_step_post_hook(lambda *_: seen.append("post"))
        both.plain_step(0)
        both.require_equal()
    assert seen == ["pre", "post"]


# ------------------------------------------------------------------------------------- the optimizer that was passed


def _passed(directory: Path, changes: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = everything_on_nvme(directory, {"optimizer": None, **changes})
    return model, optimizer, infinity.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("changes", [{}, {"infinity": {"tile_above": "1KiB"}}])
def test_state_dicts_of_the_optimizer_that_was_passed_are_those_of_the_returned_one(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model, optimizer, engine = _passed(tmp_path, changes)
    with engine:
        _step(model, engine.optimizer, 0)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        saved = copy.deepcopy(optimizer.state_dict())
        mine = engine.optimizer.state_dict()
        assert saved["state"].keys() == mine["state"].keys() == set(range(4))
        for key, entry in saved["state"].items():
            assert all(torch.equal(value, mine["state"][key][name]) for name, value in entry.items())
        expected = [_step(model, engine.optimizer, number) for number in (1, 2)]
    model, optimizer, engine = _passed(tmp_path, changes)
    with engine:
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        assert [_step(model, engine.optimizer, number) for number in (1, 2)] == expected
        with pytest.raises(StepOrderError, match=r"has no states.*the one that was returned"):
            _step(model, optimizer, 3)


def test_the_optimizer_that_was_passed_does_not_begin_anew_unnoticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, engine = _passed(tmp_path, {})
    _step(model, engine.optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    engine.close()
    with pytest.raises(StepOrderError, match="went with its engine"):
        optimizer.state_dict()
    with pytest.raises(StepOrderError, match="load what its state_dict"):
        _step(model, optimizer, 1)
    config = everything_on_nvme(tmp_path, {"optimizer": None})
    infinity.initialize(model=model, optimizer=optimizer, config=config)[0].close()
    assert "it begins anew" in caplog.text
    optimizer.load_state_dict(saved)
    model.zero_grad()
    _step(model, optimizer, 1)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_one_that_nobody_else_steps_is_an_ordinary_optimizer(tmp_path: Path) -> None:
    model, optimizer, engine = _passed(tmp_path, {})
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    with engine:
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
