"""fp32 main weights beside bf16 model weights: the same to everybody who looks, however they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.exactness.lockstep import PLAIN, Lockstep, everything_on_nvme
from tests.states import state_of

_NAME = "blocks.1.up.weight"
_TIERS = [("nvme", "nvme"), ("none", "nvme"), ("cpu", "cpu"), ("none", "none"), ("nvme", "none")]
_EACH = pytest.mark.parametrize("main_weights", ["remainder", "fp32"])


def _changes(directory: Path, param_tier: str, optimizer_tier: str, main_weights: str, **more: Any) -> dict[str, Any]:
    return {
        "bf16": {"enabled": True},
        "zero_optimization": {
            key: {"device": tier, "nvme_path": str(directory) if tier == "nvme" else None}
            for key, tier in (("offload_param", param_tier), ("offload_optimizer", optimizer_tier))
        },
        "infinity": {"main_weights": main_weights, **more},
    }


@pytest.mark.deep(but=1)
@_EACH
@pytest.mark.parametrize(("param_tier", "optimizer_tier"), _TIERS)
def test_what_was_not_modified_keeps_its_low_bits(
    param_tier: str, optimizer_tier: str, main_weights: str, tmp_path: Path
) -> None:
    changes = _changes(tmp_path, param_tier, optimizer_tier, main_weights)
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(3):
            both.engine_step(step)
            weight = both.model.get_parameter(_NAME)
            with infinity.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                weight[0] = 0.25
                weight[:, 3].mul_(-0.5)
                weight[1] = weight[1]  # nothing
            with torch.no_grad():
                mine, main = both.reference.model.get_parameter(_NAME), both.reference.main[_NAME]
                before = mine.clone()
                mine[0] = 0.25
                mine[:, 3].mul_(-0.5)
                main.copy_(torch.where(mine == before, main, mine.float()))
            assert bool((mine.float() != main).any()), "low bits were kept"
        both.engine_step(3)
        both.require_equal()


@pytest.mark.deep(but=2)
@_EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_main_weights_are_the_parameters_as_they_came(main_weights: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(37, 53), nn.Linear(53, 11, bias=False)).to(dtype)
    with torch.no_grad():
        model[0].bias[:4] = torch.tensor([1.0 + 2**-8, -1.0 - 2**-8, -0.0, 1.0 + 3 * 2**-8])  # ties between neighbours
        model[0].bias[4] = torch.inf
    model[1].weight.requires_grad_(False)
    before = {fqn: param.detach().clone() for fqn, param in model.named_parameters()}
    changes = _changes(tmp_path, "nvme", "nvme", main_weights)
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path, changes))
    with engine:
        for fqn, value in before.items():
            found = state_of(engine, model.get_parameter(fqn))["weight"]
            assert torch.equal(found, value.bfloat16().float() if fqn == "1.weight" else value.float()), fqn
        frozen, bias = (model.get_parameter(fqn).clone() for fqn in ("1.weight", "0.bias"))
        assert torch.equal(frozen, before["1.weight"].bfloat16()), "what is not trained is cast as torch casts"
        if dtype != torch.bfloat16:
            even = [1.0, -1.0, -0.0, 1.015625]
            assert bias[:4].tolist() == (
                [1.0078125, -1.0078125, -0.0, 1.015625] if main_weights == "remainder" else even
            )
        engine.close(restore_weights=True)
    assert model[0].weight.dtype == torch.bfloat16


def test_half_of_the_main_weight_is_not_stored_twice(tmp_path: Path) -> None:
    sizes = {}
    for main_weights in ("remainder", "fp32"):
        changes = _changes(tmp_path, "nvme", "nvme", main_weights)
        engine, *_ = infinity.initialize(model=PLAIN.make("none"), config=everything_on_nvme(tmp_path, changes))
        with engine:
            plan = engine.plan
            sizes[main_weights] = plan.states_bytes["nvme"]
    saved = sizes["fp32"] - sizes["remainder"]
    assert 2 * plan.num_trainable <= saved <= 3 * plan.num_trainable


@pytest.mark.deep
@pytest.mark.parametrize("step", [None, torch.tensor(float("nan")), "x"], ids=["none", "nan", "text"])
def test_a_state_dict_that_does_not_fit_changes_nothing(step: Any, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_changes(tmp_path, "nvme", "nvme", "remainder")) as both:
        both.engine_step(0)
        saved = both.optimizer.state_dict()
        states = {index: dict(entry) for index, entry in saved["state"].items()}
        for entry in states.values():
            entry["exp_avg"] = entry["exp_avg"] + 1
        last = states[max(states)]
        if step is None:
            del last["step"]
        else:
            last["step"] = step
        with pytest.raises(ValueError, match="no usable scalars"):
            both.optimizer.load_state_dict({**saved, "state": states})
        both.engine_step(1)
        both.require_equal()
