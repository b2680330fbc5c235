"""The compute dtype and the loss scaling that a config asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.config import load_config
from infinity.config.resolved import LossScaling
from infinity.errors import ConfigError

_BASE: dict[str, Any] = {"train_batch_size": 1, "gradient_clipping": 0}


def _load(block: dict[str, Any], **others: Any) -> Any:
    return load_config({**_BASE, "fp16": block, **others})


@pytest.mark.parametrize(
    "block", [{"enabled": True}, True, {"enabled": True, "loss_scale": "auto", "loss_scale_window": "auto"}]
)
def test_fp16_has_deepspeeds_defaults(block: Any) -> None:
    config = _load(block)
    assert config.compute_dtype is torch.float16
    assert config.loss_scaling == LossScaling(65536.0, True, 1000, 2, False, 1.0)
    assert config.checks_overflow
    assert (config.infinity.update, config.infinity.main_weights) == ("deferred", "fp32")
    assert "the overflow check of fp16 needs all gradients" in config.describe()
    assert config.notices == ()


def test_every_key_counts() -> None:
    block = {
        "enabled": "true",
        "loss_scale": 0,
        "initial_scale_power": 10,
        "loss_scale_window": "50",
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 4,
    }
    assert _load(block).loss_scaling == LossScaling(1024.0, True, 50, 3, True, 4.0)
    assert _load({**block, "loss_scale": 128}).loss_scaling == LossScaling(128.0, False, 50, 3, True, 4.0)


@pytest.mark.parametrize("block", [False, {}, None, {"enabled": "auto"}, {"loss_scale": 0}, {"enabled": False}])
def test_off(block: Any) -> None:
    config = _load(block)
    assert config.compute_dtype is torch.float32
    assert config.loss_scaling is None
    assert not config.checks_overflow


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss_scale", -1),
        ("loss_scale", float("inf")),
        ("loss_scale_window", 0),
        ("initial_scale_power", 1000),
        ("initial_scale_power", "sixteen"),
    ],
)
def test_what_makes_no_sense_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        _load({"enabled": True, key: value})
    assert caught.value.key == f"fp16.{key}"


def test_what_contradicts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp16.enabled.*bf16 is enabled too.*one of them to false"):
        _load({"enabled": True}, bf16={"enabled": True})
    with pytest.raises(ConfigError, match=r"infinity.main_weights.*fp16 has a shorter exponent"):
        _load({"enabled": True}, infinity={"main_weights": "remainder"})
    with pytest.raises(ConfigError, match=r"infinity.gradient_dtype.*more bits than bf16"):
        _load({"enabled": True}, infinity={"gradient_dtype": "bf16"})
    with pytest.raises(ConfigError, match=r"infinity.update.*overflow check of fp16.*take bf16"):
        _load({"enabled": True}, infinity={"update": "in_backward"})
    with pytest.raises(ConfigError, match=r"initial_scale_power.*below fp16.min_loss_scale = 100000"):
        _load({"enabled": True, "min_loss_scale": 100000})


@pytest.mark.parametrize(
    ("zero", "clipping", "given", "expected"),
    [
        ({"stage": 1}, 1.0, None, True),
        ({"stage": 2}, 0.5, "auto", True),
        ({"stage": 2}, 1.0, False, False),
        ({"stage": 2}, 0, None, False),  # no update waits for all gradients
        ({"stage": 0}, 1.0, None, False),
        ({"stage": 3}, 1.0, None, False),
        (None, 1.0, None, False),
        ({"stage": 3}, 1.0, True, True),
    ],
)
def test_bf16_checks_for_overflow_where_deepspeed_does(
    zero: dict[str, Any] | None, clipping: float, given: object, expected: bool
) -> None:
    block = {"enabled": True, "check_grad_overflow": given}
    config = load_config({**_BASE, "gradient_clipping": clipping, "zero_optimization": zero, "bf16": block})
    assert config.checks_overflow is expected
    assert config.infinity.update == ("deferred" if clipping else "in_backward")
    decided = {each.key: each.value for each in config.decisions}
    assert (decided.get("bf16.check_grad_overflow") is True) == (expected and given is not True)


def test_bf16_off_checks_nothing() -> None:
    assert not load_config({**_BASE, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}).checks_overflow


def test_bf16_checks_without_clipping_only_if_asked() -> None:
    plain = load_config({**_BASE, "bf16": {"enabled": True}})
    assert (plain.checks_overflow, plain.infinity.update) == (False, "in_backward")
    asked = load_config({**_BASE, "bf16": {"enabled": True, "check_grad_overflow": True}})
    assert (asked.checks_overflow, asked.infinity.update) == (True, "deferred")
    with pytest.raises(ConfigError, match=r"infinity.update.*bf16.check_grad_overflow.*that to false"):
        load_config(
            {**_BASE, "bf16": {"enabled": True, "check_grad_overflow": True}, "infinity": {"update": "in_backward"}}
        )
