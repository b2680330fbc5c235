"""Smaller optimizer states: the bits of a plain loop that rounds in the same way, wherever states rest and however often."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.deepspeed.ops.lion import FusedLion
from infinity.errors import ConfigError
from tests.exactness.case import loss_of
from tests.exactness.lockstep import BF16, PLAIN, SHAPES_BY_NAME, Lockstep, everything_on_nvme, make_batch

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
    for state_dtype in ("bf16", "int8")
    for make, options in _OPTIMIZERS
    if state_dtype == "bf16" or (make in _ONE_BYTE and "amsgrad" not in options)
]


def _with(make: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Lockstep.start` for an optimizer that the user makes."""
    options = {"lr": 1e-3, **options}
    return {
        "arguments": lambda model: {"optimizer": make(model.parameters(), **options)},
        "reference_optimizer": lambda named: make(named.values(), **options),
    }


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("compute", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("state_dtype", "make", "options"), _PAIRS)
def test_every_optimizer(
    state_dtype: str, make: Any, options: dict[str, Any], compute: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**compute, "optimizer": None, "infinity": {"state_dtype": state_dtype}}
    with Lockstep.start(tmp_path, changes=changes, **_with(make, options)) as both:
        for step in range(4):
            both.engine_step(step)
        both.require_equal()


@pytest.mark.deep(but=1)
@_SMALL
@pytest.mark.parametrize("main_weights", ["remainder", "fp32"])
@pytest.mark.parametrize(
    "own",
    [
        {"page_bytes": 36864},
        {"page_bytes": None},
        {"keep_in_memory": True},
        {"keep_in_memory": True, "host_memory_budget": "600KB"},
        {"update": "deferred", "host_memory_budget": "500KB"},
        {"update": "step"},
        {"units": ["Linear"]},
        {"prefetch": False},
    ],
    ids=str,
)
def test_nothing_but_the_state_dtype_changes_a_bit(
    state_dtype: str, main_weights: str, own: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**BF16, "infinity": {"state_dtype": state_dtype, "main_weights": main_weights, **own}}
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(4):
            both.engine_step(step)
        both.require_equal()


@pytest.mark.deep(but=1)
@_SMALL
def test_a_parameter_that_is_not_updated_keeps_its_state(state_dtype: str, tmp_path: Path) -> None:
    """Blocks of states are a parameter's own: its neighbours' updates leave it alone."""
    changes = {"infinity": {"state_dtype": state_dtype}}
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["skipped_blocks"], changes=changes) as both:
        for step in range(6):
            both.engine_step(step)
        both.require_equal()


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
        changes = {**BF16, "infinity": {"state_dtype": state_dtype, "page_bytes": 1 << 20}}
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 512, bias=False) for _ in range(2)))
        engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path, changes))
        with engine:
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
        infinity.initialize(
            model=model, optimizer=make(model.parameters()), config=everything_on_nvme(tmp_path, changes)
        )
    assert caught.value.key == "infinity.state_dtype"
    assert all(word in str(caught.value) for word in words), caught.value
    infinity.initialize(model=model, config=everything_on_nvme(tmp_path, {"infinity": {"state_dtype": state_dtype}}))[
        0
    ].close()
