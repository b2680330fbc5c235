"""Overrides by dotted key, as a training script's command line gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infinity.config import load_config
from infinity.errors import ConfigError

BASE: dict[str, Any] = {
    "train_batch_size": 4,
    "bfloat16": {"enabled": True},
    "aio": {"thread_count": 6},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}},
    "gradient_clipping": "auto",
}


def test_values_are_replaced() -> None:
    overrides = {
        "train_batch_size": 8,
        "optimizer.params.lr": 5e-4,
        "infinity.host_memory_budget": "1GB",
        "gradient_clipping": 0.5,
    }
    config = load_config(BASE, overrides=overrides)
    assert config.train_batch_size == 8
    assert config.optimizer is not None and config.optimizer.params == {"lr": 5e-4, "eps": 1e-6}
    assert config.infinity.host_memory_budget == 10**9
    assert config.gradient_clipping == 0.5
    assert ("gradient_clipping", 0.5, "config") in config.decisions


def test_none_removes_and_auto_leaves_open() -> None:
    config = load_config(BASE, overrides={"optimizer": None, "train_batch_size": "auto"})
    assert config.optimizer is None
    assert config.train_batch_size is None
    assert load_config(BASE, overrides={"scheduler.params": None}).scheduler is None


_NVME = {"device": "nvme", "nvme_path": "/tmp"}
_ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("given", "overrides", "meant"),
    [
        (
            {_ZERO: {"stage": 3, "offload_optimizer": _NVME}},
            {_ZERO: {"stage": 2}},
            {_ZERO: {"stage": 2, "offload_optimizer": _NVME}},
        ),
        (
            {"optimizer": {"type": "Adam"}, "optimizer.params.lr": "auto"},
            {"optimizer.params.lr": 5e-5},
            {"optimizer": {"type": "Adam", "params": {"lr": 5e-5}}},
        ),
        (
            {"zero_optimization.offload_optimizer": _NVME},
            {"zero_optimization.offload_optimizer.nvme_path": {"path": "/tmp", "capacity": "1GB"}},
            {_ZERO: {"offload_optimizer": {"device": "nvme", "nvme_path": {"path": "/tmp", "capacity": "1GB"}}}},
        ),
        ({"bfloat16": {"enabled": True}}, {"bf16.enabled": False}, {"bfloat16": {"enabled": False}}),
        ({"bfloat16": True}, {"bf16.enabled": False}, {"bfloat16": {"enabled": False}}),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, {"bf16": False}, {"bf16": {"enabled": False}}),
        ({_ZERO: {"cpu_offload": True}}, {"zero_optimization.offload_optimizer": _NVME}, {_ZERO: {"offload_optimizer": _NVME}}),
        (
            {_ZERO: {"offload_param": _NVME}},
            {"zero_optimization.cpu_offload_param": True},
            {_ZERO: {"offload_param": {"device": "cpu"}}},
        ),
        ({_ZERO: {"cpu_offload": True}}, {"zero_optimization.cpu_offload": False}, {_ZERO: {}}),
        ({_ZERO: True}, {"zero_optimization.stage": 3}, {_ZERO: {"stage": 3}}),
        ({"aio": {"thread_count": 6}}, {"aio.num_threads": 9}, {"aio": {"intra_op_parallelism": 9}}),
    ],
)  # fmt: skip
def test_what_they_make_is_the_same_when_it_is_read_again(
    given: dict[str, Any], overrides: dict[str, Any], meant: dict[str, Any]
) -> None:
    def read(source: Any, **more: Any) -> Any:
        return replace(load_config(source, check_storage=False, **more), notices=())

    config = read({"train_batch_size": 4, **given}, overrides=overrides)
    assert config == read({"train_batch_size": 4, **meant})
    assert config == read(dict(config))


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"gradient_clipping": "auto"}, "gradient_clipping"),
        ({"aio": {"thread_count": 9}}, "aio.thread_count"),
        ({"bf16": True}, "bf16.enabled"),
        ({"bf16": True}, "bfloat16"),
        ({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.cpu_offload"),
        ({"zero_optimization.cpu_offload": True}, "zero_optimization.offload_optimizer"),
    ],
)
def test_none_removes_a_key_whatever_it_holds_and_is_called(given: dict[str, Any], key: str) -> None:
    without = load_config({"train_batch_size": 4, **({_ZERO: {}} if _ZERO in str(given) else {})})
    assert load_config({"train_batch_size": 4, **given}, overrides={key: None}) == without


def test_none_below_a_value_that_is_no_block_does_not_remove_the_value() -> None:
    durable = {"infinity": {"durable": True}}
    with pytest.raises(ConfigError, match="a durable run"):
        load_config({"train_batch_size": 4, **durable}, overrides={"infinity.durable.keep_last": None})


def test_they_are_checked_like_the_file() -> None:
    with pytest.raises(ConfigError, match=r"'aio.blocksize' \(did you mean 'aio.block_size'\?\)"):
        load_config(BASE, overrides={"aio.blocksize": 3})
    with pytest.raises(ConfigError, match=r"'amp'"):
        load_config(BASE, overrides={"amp.enabled": True})
    with pytest.raises(ConfigError, match=r"override 'zero_optimization.stage': .* not an object"):
        load_config(BASE | {"zero_optimization": 3}, overrides={"zero_optimization.stage": 3})


def test_finished_config_comes_back_as_it_is() -> None:
    config = load_config(BASE)
    assert load_config(config) is config
    with pytest.raises(ConfigError, match="finished config"):
        load_config(config, overrides={"train_batch_size": 8})
