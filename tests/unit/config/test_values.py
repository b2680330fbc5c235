"""Values: what they become, and what a wrong one is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from infinity.config import InfinityConfig, load_config
from infinity.config.resolved import InfinitySection, IOSection, OffloadSection
from infinity.errors import ConfigError

BASE: dict[str, Any] = {"train_batch_size": 1}


def test_defaults() -> None:
    config = load_config(BASE)
    assert config.gradient_clipping == 1.0
    assert config.compute_dtype is torch.float32
    assert config.optimizer is None and config.scheduler is None
    assert config.offload_param == config.offload_optimizer == OffloadSection("none", ())
    assert config.io == IOSection(1 << 20, 4, 32, 120.0, True, backend="auto", is_from_config=False)
    assert dataclasses.astuple(config.infinity) == (
        *(None, None, None, True, True, None, (), True),
        *("deferred", "fp32", "fp32", False, "auto", "fp32", None, None, False),
        *("memory", None, None, "auto", None, True, True, None),
    )
    assert config.steps_per_print is None
    assert not config.wall_clock_breakdown and not config.dataloader_drop_last
    assert config.notices == ()


def test_default_clipping_is_announced() -> None:
    assert ("gradient_clipping", 1.0, "default, as in DeepSpeed since 0.19") in load_config(BASE).decisions


_BF16 = {"bf16": {"enabled": True}}
_NVME = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "."}}}


@pytest.mark.parametrize(
    ("changes", "update", "main_weights", "gradients", "reason"),
    [
        ({}, "deferred", "fp32", ("fp32", False), "more bits than bf16 has"),
        ({"gradient_clipping": 0}, "in_backward", "fp32", ("fp32", False), "more bits than bf16 has"),
        (_BF16, "deferred", "remainder", ("fp32", False), "there is no NVMe tier"),
        (_BF16 | _NVME, "deferred", "remainder", ("bf16", False), "loses nothing with one micro-batch"),
        (_BF16 | _NVME | {"gradient_accumulation_steps": 2}, "deferred", "remainder", ("fp32", False), "several"),
        (_BF16 | {"infinity": {"gradient_dtype": "bf16"}}, "deferred", "remainder", ("bf16", True), "config"),
        (_BF16 | _NVME | {"infinity": {"gradient_dtype": "fp32"}}, "deferred", "remainder", ("fp32", False), "config"),
        (_BF16 | {"infinity": {"main_weights": "fp32", "update": "step"}}, "step", "fp32", ("fp32", False), "no NVMe"),
        ({"infinity": {"main_weights": "remainder"}}, "deferred", "fp32", ("fp32", False), "more bits than bf16 has"),
        (_BF16 | {"infinity": {"main_weights": "auto"}}, "deferred", "remainder", ("fp32", False), "no NVMe"),
    ],
)
def test_what_follows_from_the_dtype_and_the_tiers(
    changes: dict[str, Any], update: str, main_weights: str, gradients: tuple[str, bool], reason: str
) -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1} | changes)
    chosen = config.infinity
    assert (chosen.update, chosen.main_weights) == (update, main_weights)
    assert (chosen.gradient_dtype, chosen.rounds_gradients) == gradients
    decisions = {key: (value, by) for key, value, by in config.decisions}
    assert decisions["infinity.update"][0] == update
    assert decisions["infinity.main_weights"][0] == main_weights
    assert decisions["infinity.gradient_dtype"][0] == gradients[0]
    assert reason in decisions["infinity.gradient_dtype"][1]
    assert len(decisions) == len(config.decisions), "each key is decided once"


def test_gradients_of_fp32_weights_are_not_rounded() -> None:
    with pytest.raises(ConfigError, match=r"infinity\.gradient_dtype") as caught:
        load_config(BASE | {"infinity": {"gradient_dtype": "bf16"}})
    assert "bf16" in str(caught.value)


def test_our_block() -> None:
    ours: dict[str, Any] = {"host_memory_budget": "2GiB", "device_memory_budget": 10**9, "staging_buffer_bytes": "8MiB"}
    ours |= {"drive_tbw": "600", "prefetch": False, "keep_in_memory": False, "schedule": "vertical"}
    ours |= {"units": ["LlamaDecoderLayer", "model.layers.*"], "update": "in_backward"}
    ours |= {"io_deadline_seconds": 5, "direct_io": "false"}
    config = load_config(BASE | {"gradient_clipping": 0, "infinity": ours})
    first = (2 << 30, 10**9, 8 << 20, False, False, 600.0, ("LlamaDecoderLayer", "model.layers.*"), True)
    assert config.infinity == InfinitySection(*first, "in_backward", "fp32", "fp32", False, "vertical")
    assert (config.io.deadline_seconds, config.io.direct) == (5.0, False)


@pytest.mark.parametrize("value", ["auto", None])
def test_open_budgets(value: object) -> None:
    section = load_config(BASE | {"infinity": {"host_memory_budget": value, "units": value, "update": value}}).infinity
    assert section == load_config(BASE).infinity


def test_one_unit_name() -> None:
    assert load_config(BASE | {"infinity": {"units": "GPT2Block"}}).infinity.units == ("GPT2Block",)


@pytest.mark.parametrize(
    ("aio", "expected"),
    [
        ({"intra_op_parallelism": 1}, (1 << 20, 4, 32)),  # repeats DeepSpeed's default, too few for us
        ({"intra_op_parallelism": 16}, (1 << 20, 16, 128)),
        ({"queue_depth": 1}, (1 << 20, 4, 4)),
        ({"block_size": 5000}, (8192, 4, 32)),
        ({"block_size": "4MiB", "thread_count": 8, "num_threads": 8}, (4 << 20, 8, 64)),
        (None, (1 << 20, 4, 32)),
    ],
)
def test_io(aio: dict[str, Any] | None, expected: tuple[int, int, int]) -> None:
    io = load_config(BASE | {"aio": aio}).io
    assert (io.request_bytes, io.num_threads, io.max_inflight) == expected


@pytest.mark.parametrize(("value", "steps"), [(None, None), (float("inf"), None), (0, None), (7, 7), (7.0, 7)])
def test_steps_per_print(value: object, steps: int | None) -> None:
    assert load_config(BASE | {"steps_per_print": value}).steps_per_print == steps


@pytest.mark.parametrize("value", [True, {"enabled": "True"}, {"enabled": 1}])
def test_bf16(value: object) -> None:
    assert load_config(BASE | {"bf16": value}).compute_dtype is torch.bfloat16


def test_old_form_of_zero() -> None:
    assert (
        load_config(BASE | {"zero_optimization": True}).notices
        == load_config(BASE | {"zero_optimization": {"stage": 1}}).notices
    )
    load_config(BASE | {"zero_optimization": False})


@pytest.mark.parametrize(
    ("config", "key", "words"),
    [
        ({"gradient_clipping": -1}, "gradient_clipping", "at least 0"),
        ({"gradient_clipping": None}, "gradient_clipping", "Write 0 to switch clipping off"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping", "finite"),
        ({"bf16": {"enabled": "maybe"}}, "bf16.enabled", "true or false"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type", "is missing"),
        ({"optimizer": {"type": 3}}, "optimizer.type", "must be a text"),
        (
            {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.3}}},
            "optimizer.params.max_grad_norm",
            r'set "gradient_clipping": 0\.3',
        ),
        ({"scheduler": {"type": "WarmupDecay"}}, "scheduler.type", "Did you mean 'WarmupDecayLR'"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps", "is missing"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "at most 3"),
        ({"zero_optimization": {"stage": "three"}}, "zero_optimization.stage", "must be a number"),
        (
            {"zero_optimization": {"offload_param": {"device": "nmve"}}},
            "zero_optimization.offload_param.device",
            'expected one of "none", "cpu", "nvme". Did you mean "nvme"?',
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "gpu?"}}},
            "zero_optimization.offload_optimizer.device",
            'expected one of "none", "cpu", "nvme". Use one of them',
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.cpu_offload",
            "contradicts zero_optimization.offload_optimizer.device = 'nvme'",
        ),
        ({"aio": {"block_size": 0}}, "aio.block_size", "more than 0"),
        ({"aio": {"queue_depth": -1}}, "aio.queue_depth", "more than 0"),
        ({"gradient_accumulation_steps": 10**30}, "gradient_accumulation_steps", "less than 2\\^63"),
        ({"aio": {"thread_count": 1.5}}, "aio.intra_op_parallelism", "whole number"),
        ({"aio": {"thread_count": 4, "num_threads": 8}}, "aio.num_threads", "contradicts aio.thread_count = 4"),
        ({"infinity": {"host_memory_budget": "2 apples"}}, "infinity.host_memory_budget", '"2GB"'),
        ({"infinity": {"staging_buffer_bytes": 5000}}, "infinity.staging_buffer_bytes", "multiple of 4096.*Take 8192"),
        ({"infinity": {"units": 3}}, "infinity.units", "a text or a list of texts"),
        ({"infinity": {"timeline": ""}}, "infinity.timeline", "must be the path of a file"),
        ({"infinity": {"run_log": "\ud800"}}, "infinity.run_log", "a character that paths cannot have"),
        ({"infinity": {"update": "in_backwards"}}, "infinity.update", 'Did you mean "in_backward"'),
        ({"infinity": {"update": "in_backward"}}, "infinity.update", "gradient_clipping = 1.0 needs all gradients"),
        ({"infinity": {"io_deadline_seconds": 0}}, "infinity.io_deadline_seconds", "at least 0.01"),
        ({"checkpoint": {"tag_validation": "foo"}}, "checkpoint.tag_validation", '"ignore", "warn", "fail"'),
    ],
)
def test_wrong_values(config: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(BASE | config)
    assert caught.value.key == key
    assert f"'{key}'" in str(caught.value)


def test_all_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'aio.queue_depth' = 0.*also wrong: 'infinity.staging_buffer_bytes'"):
        load_config(BASE | {"aio": {"queue_depth": 0}, "infinity": {"staging_buffer_bytes": "?"}})


@pytest.mark.parametrize("source", [3, None, ["a"]])
def test_not_a_config(source: Any) -> None:
    with pytest.raises(ConfigError, match="Give the path of a JSON file, a dict, or JSON text"):
        load_config(source)


def test_keys_must_be_texts() -> None:
    with pytest.raises(ConfigError, match="not a text"):
        load_config({"train_batch_size": 1, 3: 4})  # type: ignore[dict-item]


def test_config_is_frozen_and_described() -> None:
    config = load_config(BASE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.gradient_clipping = 2.0  # type: ignore[misc]
    assert isinstance(config, InfinityConfig)
    assert "gradient_clipping" in config.describe()
    assert len(config.describe().splitlines()) == len(config.decisions)


def test_required_schedule_values_left_to_auto_wait_until_it_is_built() -> None:
    """The caller may bring a schedule along, and then nobody needs them."""
    section = load_config(
        BASE | {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    ).scheduler
    assert section is not None and section.params == {}
