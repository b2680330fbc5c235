"""Steps whose gradients are not finite: fp16 with its loss scaling, and bf16 where the config asks for the check.

The reference is torch's own `GradScaler` over fp32 main weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import StepError
from tests.exactness import lockstep
from tests.exactness.case import loss_of
from tests.exactness.lockstep import SHAPES_BY_NAME, Lockstep, with_smallest_budget
from tests.exactness.reference import PlainTorch
from tests.states import state_of
from tests.updates_on_demand import num_pending, updates_on_demand

_FP16 = {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 3, "hysteresis": 1}
"""The first steps of the test model overflow at 2^22; doubled after three others, it overflows again."""
_SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 50}}}


def _fp16(**changes: Any) -> dict[str, Any]:
    return {"fp16": {**_FP16, **changes}}


def _run(both: Lockstep, num_steps: int, *, vertically: bool = False) -> int:
    """Trains and compares; returns how many steps were skipped."""
    num_skipped = 0
    for step in range(num_steps):
        (both.batch_step if vertically else both.engine_step)(step)
        num_skipped += both.reference.was_skipped
        assert both.engine.was_step_applied() == (not both.reference.was_skipped)
        assert both.optimizer.overflow == both.reference.was_skipped  # type: ignore[attr-defined]
        assert both.engine.report.is_skipped == both.reference.was_skipped
        assert ("skipped" in both.engine.report.describe()) == both.reference.was_skipped
    assert both.engine.skipped_steps == num_skipped
    assert both.engine.global_steps == num_steps
    both.require_equal()
    return num_skipped


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("update", ["auto", "deferred", "step"])
@pytest.mark.parametrize("clipping", [0.0, 0.05])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_fp16_trains_as_with_torchs_scaler(
    update: str, clipping: float, num_micro_batches: int, tmp_path: Path
) -> None:
    changes = {
        **_fp16(),
        "gradient_clipping": clipping,
        "gradient_accumulation_steps": num_micro_batches,
        "infinity": {"update": update},
    }
    with Lockstep.start(tmp_path, changes=changes) as both:
        assert both.engine.loss_scale() == 2.0**22
        num_skipped = _run(both, 14)
        assert 0 < num_skipped < 10
        assert both.engine.loss_scale() == both.reference.scaler.get_scale()


class _Autocast(PlainTorch):
    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return loss_of(self.model(**batch))


@pytest.mark.deep
@pytest.mark.parametrize("clipping", [0.0, 0.05])
@pytest.mark.parametrize("vertically", [False, True])
def test_fp16_by_autocast_over_fp32_weights(
    clipping: float, vertically: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = {**_FP16, "enabled": False}
    monkeypatch.setattr(lockstep, "PlainTorch", _Autocast)
    changes = {
        "torch_autocast": {"enabled": True, "dtype": "fp16"},
        "fp16": scaling,
        "gradient_clipping": clipping,
        "gradient_accumulation_steps": 2,
    }
    with Lockstep.start(tmp_path, changes=changes) as both:
        assert both.engine.loss_scale() == 2.0**22
        assert 0 < _run(both, 14, vertically=vertically) < 12


@pytest.mark.deep
@pytest.mark.parametrize("case", ["plain", "attention", "frozen_middle", "lora"])
def test_fp16_unit_by_unit_over_all_micro_batches(case: str, tmp_path: Path) -> None:
    changes = {**_fp16(), "gradient_accumulation_steps": 3, "infinity": {"schedule": "vertical"}}
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME[case], changes=changes) as both:
        assert _run(both, 10, vertically=True) > 0
        assert both.engine.report.schedule == "vertical", both.engine.report.schedule_reason


@pytest.mark.deep
def test_fp16_with_gradients_on_nvme(tmp_path: Path) -> None:
    changes = with_smallest_budget(tmp_path, {**_fp16(), "gradient_clipping": 0.05})
    with Lockstep.start(tmp_path, changes=changes) as both:
        assert both.engine.plan.placement.spills
        assert _run(both, 10) > 0


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("scale", [1024, 1000])
def test_a_static_scale_stays(scale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lockstep.start(tmp_path, changes=_fp16(loss_scale=scale)) as both:
        if scale == 1000:  # of scaled gradients, and divided then: only powers of two leave the norm's last bits alone
            _leave_out("norm", both, monkeypatch)
        assert _run(both, 4) == 0
        assert both.engine.loss_scale() == scale


def _leave_out(what: str, both: Lockstep, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(name: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
        if what not in name:
            Lockstep.note(both, name, expected, actual)

    monkeypatch.setattr(both, "note", note)


@pytest.mark.deep
def test_skipped_steps_leave_pending_updates_and_schedules_alone(tmp_path: Path) -> None:
    changes = {**_fp16(), **_SCHEDULE, "infinity": {"update": "deferred"}}
    with Lockstep.start(tmp_path, changes=changes) as both, updates_on_demand(both.engine):
        rates = []
        for step in range(12):
            both.reference.param_groups[0]["lr"] = both.optimizer.param_groups[0]["lr"]
            both.engine_step(step)
            assert (num_pending(both.engine) > 0) == both.engine.was_step_applied()
            rates.append(both.engine.get_lr()[0])
        both.require_equal()
        assert 0 < both.engine.skipped_steps < 10
        assert len(set(rates)) == 12 - both.engine.skipped_steps + (not both.engine.skipped_steps)


def _spoil(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone().fill_(float("inf")) if value.is_floating_point() else value for name, value in batch.items()
    }


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:the loss of step:infinity.errors.NonFiniteLossWarning")
@pytest.mark.parametrize(
    ("block", "stage", "clipping"),
    [({"check_grad_overflow": True}, 3, 0.0), ({"check_grad_overflow": True}, 3, 1.0), ({}, 2, 1.0)],
    ids=["asked", "asked_with_clipping", "as_in_deepspeed"],
)
def test_bf16_skips_where_the_config_says_so_or_deepspeed_does(
    block: dict[str, Any], stage: int, clipping: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"bf16": {"enabled": True, **block}, "gradient_clipping": clipping, "zero_optimization": {"stage": stage}}
    plain_batch = Lockstep.batch
    monkeypatch.setattr(
        Lockstep,
        "batch",
        lambda both, step, micro_batch=0: (_spoil if step in (0, 3) else dict)(plain_batch(both, step, micro_batch)),
    )
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["odd_sizes"], changes=changes) as both:
        assert both.engine.plan.update == "deferred"
        both.reference.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        _leave_out("loss", both, monkeypatch)  # NaN is not equal to itself
        assert _run(both, 6) == 2
        assert both.engine.loss_scale() == 1.0


@pytest.mark.parametrize("looks", [False, True])
def test_whoever_does_not_scale_is_told(looks: bool, tmp_path: Path) -> None:
    def arguments(model: nn.Module) -> dict[str, Any]:
        for parameter in model.parameters() if looks else []:
            parameter.register_post_accumulate_grad_hook(lambda each: each.grad)
        return {}

    with (
        Lockstep.start(tmp_path, changes=_fp16(), loop="plain", arguments=arguments) as both,
        pytest.raises(StepError, match=r"Loss scaling is required with fp16.*Call engine\.backward\(loss\)"),
    ):
        both.plain_backward(0)


def test_the_engines_step_is_the_one_that_follows_the_scale(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_fp16()) as both:
        both.optimizer.step()  # of a batch that was skipped: there is nothing to follow
        assert both.engine.global_steps == 0
        both.engine.backward(loss_of(both.engine(**both.batch(0))))
        with pytest.raises(StepError, match=r"optimizer\.step\(\).*loss scale has to follow.*Call engine\.step\(\)"):
            both.optimizer.step()
        both.engine.step()
        assert both.engine.loss_scale() == 2.0**21


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_scale_that_cannot_become_smaller_is_an_error_and_training_can_go_on(
    num_micro_batches: int, tmp_path: Path
) -> None:
    changes = {**_fp16(min_loss_scale=2.0**21), "gradient_accumulation_steps": num_micro_batches}
    with Lockstep.start(tmp_path, changes=changes) as both:
        both.engine_step(0)
        with pytest.raises(StepError, match=r"gradients of step 2 .* it is 2097152\.0\. .*Lower the learning rate"):
            both.engine_step(1)
        assert both.engine.skipped_steps == 2
        before = state_of(both.engine, next(both.model.parameters()))["weight"]
        assert torch.equal(before, next(iter(both.reference.main.values())))
        assert both.engine.micro_steps == 2 * num_micro_batches
