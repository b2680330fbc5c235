"""Unknown keys, at any level, name what may have been meant."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from infinity.config import load_config
from infinity.errors import ConfigError

BASE = {"train_batch_size": 1}


@pytest.mark.parametrize(
    ("config", "path", "nearest"),
    [
        ({"gradient_acumulation_steps": 4}, "gradient_acumulation_steps", "gradient_accumulation_steps"),
        ({"Optimizer": {}}, "Optimizer", "optimizer"),
        (
            {"zero_optimization": {"offload_param": {"nvm_path": "."}}},
            "zero_optimization.offload_param.nvm_path",
            "zero_optimization.offload_param.nvme_path",
        ),
        ({"zero_optimization": {"aio": {}}}, "zero_optimization.aio", "aio' at the top level?)"),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer", "zero_optimization.offload_optimizer"),
        ({"host_memory_budget": "2GB"}, "host_memory_budget", "infinity.host_memory_budget"),
        ({"aio": {"queue_dept": 8}}, "aio.queue_dept", "aio.queue_depth"),
        ({"fp16": {"enable": True}}, "fp16.enable", "fp16.enabled"),
        (
            {"activation_checkpointing": {"profiles": True}},
            "activation_checkpointing.profiles",
            "activation_checkpointing.profile",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}},
            "scheduler.params.warmup_steps",
            "scheduler.params.warmup_num_steps",
        ),
        ({"qqqqqq": 1}, "qqqqqq", None),
        ({"moe": {}}, "moe", None),
    ],
)
def test_nearest_is_named(config: dict[str, Any], path: str, nearest: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE | config)
    assert caught.value.key == path
    hint = f" (did you mean '{nearest}" if nearest is not None else ". "
    assert str(caught.value).startswith(f"unknown config key '{path}'{hint}")


def test_all_of_them_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"'one', 'aio\.two', 'zero_optimization\.offload_param\.three'\. Correct"):
        load_config(BASE | {"one": 1, "aio": {"two": 2}, "zero_optimization": {"offload_param": {"three": 3}}})


def test_auto_does_not_hide_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match="'gradient_clip'"):
        load_config(BASE | {"gradient_clip": "auto"})


@pytest.mark.parametrize("strict", [False, "false", "warn"])
def test_not_strict(strict: object, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "wurmup": 1}}
    config = BASE | {"scheduler": scheduler, "aio": {"queue_dept": 64}, "infinity": {"strict": strict}}
    with caplog.at_level(logging.WARNING):
        loaded = load_config(config)
    assert "'aio.queue_dept' (did you mean 'aio.queue_depth'?)" in caplog.text
    assert "scheduler.params.wurmup" in caplog.text
    assert loaded.io == load_config(BASE).io
    assert loaded.scheduler is not None and loaded.scheduler.params == {"warmup_num_steps": 5}
    assert not loaded.infinity.strict


def test_comment_keys_are_skipped() -> None:
    comments = {"$schema": "x", "_comment": "x", "//": "x", "__comment2": 3, "comment": "x", "#note": "x"}
    config = BASE | comments | {"zero_optimization": {"stage": 3, **comments}, "fp16": comments}
    assert load_config(config) == load_config(BASE | {"zero_optimization": {"stage": 3}})


def test_the_callers_dict_is_left_alone() -> None:
    config = BASE | {"bfloat16": {"enabled": "auto"}, "zero_optimization": {"cpu_offload": True}, "_comment": 1}
    before = repr(config)
    load_config(config, overrides={"bf16.enabled": True, "zero_optimization.stage": 2})
    assert repr(config) == before
