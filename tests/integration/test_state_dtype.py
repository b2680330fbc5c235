"""Smaller optimizer states, and fp32 main weights beside bf16: the bits of a plain loop that rounds in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.deepspeed.ops.lion import FusedLion
from infinity.errors import ConfigError
from tests.exactness.case import loss_of
from tests.exactness.lockstep import (
    BF16,
    PLAIN,
    SHAPES_BY_NAME,
    Lockstep,
    engine_on_nvme,
    everything_on_nvme,
    make_batch,
)
from tests.states import state_of

_SMALL = pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
_OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.NAdam, {}),
    (FusedLion, {}),
]
_ONE_BYTE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, FusedLion)
_PAIRS = [
    pytest.param(state_dtype, make, options, id=f"{state_dtype}-{make.__name__}-{'-'.join(options) or 'plain'}")
    for state_dtype in ("bf16", "int8", "int8_dynamic")
    for make, options in _OPTIMIZERS
    if state_dtype == "bf16" or (make in _ONE_BYTE and "amsgrad" not in options)
]


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("compute", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("state_dtype", "make", "options"), _PAIRS)
def test_every_optimizer(
    state_dtype: str, make: Any, options: dict[str, Any], compute: dict[str, Any], tmp_path: Path
) -> None:
    def optimizer(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return make(named.values(), **{"lr": 1e-3, **options})

    changes = {**compute, "infinity": {"state_dtype": state_dtype}}
    with Lockstep.start(tmp_path, changes=changes, optimizer=optimizer) as both:
        both.engine_steps(range(4))


@pytest.mark.deep(but=1)
@_SMALL
@pytest.mark.parametrize("main_weights", ["remainder", "fp32"])
@pytest.mark.parametrize(
    "own",
    [
        {"staging_buffer_bytes": None},
        {"keep_in_memory": True, "host_memory_budget": "600KB"},
        {"update": "deferred", "host_memory_budget": "500KB"},
        {"units": ["Linear"], "prefetch": False},
    ],
    ids=str,
)
def test_nothing_but_the_state_dtype_changes_a_bit(
    state_dtype: str, main_weights: str, own: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**BF16, "infinity": {"state_dtype": state_dtype, "main_weights": main_weights, **own}}
    with Lockstep.start(tmp_path, changes=changes) as both:
        both.engine_steps(range(4))


@pytest.mark.deep(but=1)
@_SMALL
def test_a_parameter_that_is_not_updated_keeps_its_state(state_dtype: str, tmp_path: Path) -> None:
    """Blocks of states are a parameter's own: its neighbours' updates leave it alone."""
    changes = {"infinity": {"state_dtype": state_dtype}}
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["skipped_blocks"], changes=changes) as both:
        both.engine_steps(range(6))


@pytest.mark.deep(but=1)
@_SMALL
def test_the_users_random_numbers_are_left_alone(state_dtype: str, tmp_path: Path) -> None:
    changes = {"infinity": {"state_dtype": state_dtype}}
    engine, optimizer, *_ = infinity.initialize(model=PLAIN.make("none"), config=everything_on_nvme(tmp_path, changes))
    with engine:
        engine.backward(loss_of(engine(**make_batch(0))))
        before = torch.get_rng_state()
        engine.step()
        engine.flush()
        optimizer.load_state_dict(optimizer.state_dict())
        assert torch.equal(torch.get_rng_state(), before)


def test_the_plan_counts_the_bytes_that_are_stored(tmp_path: Path) -> None:
    states, moved = {}, {}
    for state_dtype in ("fp32", "bf16", "int8"):
        changes = {**BF16, "infinity": {"state_dtype": state_dtype, "staging_buffer_bytes": 1 << 20}}
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 512, bias=False) for _ in range(2)))
        with engine_on_nvme(tmp_path, model, changes) as engine:
            states[state_dtype] = engine.plan.resting_bytes["nvme"]["states"] / engine.plan.num_trainable
            moved[state_dtype] = engine.plan.predicted_write_bytes_per_step / engine.plan.num_trainable
    filling = 0.05
    assert states == {"fp32": 8, "bf16": 4, "int8": pytest.approx(2 + 8 / 256, abs=filling)}
    assert moved == {"fp32": 12, "bf16": 8, "int8": pytest.approx(6 + 8 / 256, abs=filling)}


class _OtherAdam(torch.optim.AdamW):
    """Might do anything with its states."""


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("state_dtype", "make", "words"),
    [
        ("int8", lambda params: torch.optim.Adagrad(params), ("Adagrad", "'sum'", '"bf16" or "fp32"')),
        ("int8", lambda params: torch.optim.AdamW(params, amsgrad=True), ("'max_exp_avg_sq'", "amsgrad to false")),
        ("int8", lambda params: _OtherAdam(params), ("_OtherAdam", "'exp_avg'", '"bf16" or "fp32"')),
        ("bf16", lambda params: torch.optim.RMSprop(params, centered=True), ("centered", "negative", '"fp32"')),
    ],
)
def test_what_rounding_would_break_is_refused(
    state_dtype: str, make: Callable[[Any], Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    model = PLAIN.make("none")
    changes = {"optimizer": None, "infinity": {"state_dtype": state_dtype}}
    with pytest.raises(ConfigError) as caught:
        engine_on_nvme(tmp_path, model, changes, optimizer=make(model.parameters()))
    assert caught.value.key == "infinity.state_dtype"
    assert all(word in str(caught.value) for word in words), caught.value
    engine_on_nvme(tmp_path, model, {"infinity": {"state_dtype": state_dtype}}).close()


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
    with engine_on_nvme(tmp_path, model, changes) as engine:
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
