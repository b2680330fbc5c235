"""What would change the numbers is refused when it is switched on; what only costs time or memory is noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.config import load_config
from infinity.config.schema.block import Keys, NoEffect, Refused
from infinity.config.schema.vocabulary import blocks
from infinity.errors import ConfigError

BASE: dict[str, Any] = {"train_batch_size": 1}
_FIELDS = [(path + name, field) for path, block in blocks() for name, field in block.model_fields.items()]

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("amp", {"amp": {"enabled": True, "opt_level": "O1"}}),
    ("data_types.param_dtype", {"data_types": {"param_dtype": "bf16"}}),
    ("data_types.param_dtype", {"data_types": {"param_dtype": "fp32"}, "bf16": {"enabled": True}}),
    ("data_types.keep_in_fp32_modules", {"data_types": {"keep_in_fp32_modules": ["norm"]}}),
    ("sequence_parallel_size", {"sequence_parallel_size": 2}),
    ("tensor_parallel.autotp_size", {"tensor_parallel": {"autotp_size": 4}}),
    ("tensor_parallel.tp.tp_size", {"tensor_parallel": {"tp": {"tp_size": 2}}}),
    ("pipeline.stages", {"pipeline": {"stages": 2}}),
    ("pipeline.seed_layers", {"pipeline": {"seed_layers": True}}),
    ("expert_parallel", {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
    (
        "compression_training",
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
    ),
    ("compression_training", {"compression_training": {"weight_quantization": {"shared_parameters": {"enabeld": 1}}}}),
    ("weight_quantization", {"weight_quantization": {"quantized_initialization": {"num_bits": 4}}}),
    ("quantize_training", {"quantize_training": {"quantize_bits": {"start_bits": 12}}}),
    ("progressive_layer_drop", {"progressive_layer_drop": {"enabled": True, "theta": 0.5}}),
    ("curriculum_learning", {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}}),
    ("data_efficiency", {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}}),
    ("data_efficiency", {"data_efficiency": {"enabled": True, "data_sampling": {"num_epochs": 2}}}),
    ("eigenvalue", {"eigenvalue": {"enabled": True}}),
    ("elasticity", {"elasticity": {"enabled": True, "max_train_batch_size": 2000}}),
    (
        "zero_optimization.zero_quantized_nontrainable_weights",
        {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
    ),
    ("zero_optimization.zenflow", {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}),
]


NOTED: list[tuple[str, dict[str, Any]]] = [
    ("fp16.fp16_master_weights_and_grads", {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}),
    ("bf16.bf16_master_weights_and_grads", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
    ("bf16.bf16_optimizer_states", {"bf16": {"enabled": True, "bf16_optimizer_states": True}}),
    ("data_types.grad_accum_dtype", {"data_types": {"grad_accum_dtype": "bf16"}}),
    ("sparse_gradients", {"sparse_gradients": True}),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "sum"}),
    ("sparse_attention", {"sparse_attention": {"mode": "fixed", "block": 16}}),
    ("hybrid_engine", {"hybrid_engine": {"enabled": True}}),
    ("cuda_visible_devices", {"cuda_visible_devices": "0,1"}),
    ("zero_optimization.zero_quantized_weights", {"zero_optimization": {"zero_quantized_weights": True}}),
    ("zero_optimization.zero_quantized_gradients", {"zero_optimization": {"zero_quantized_gradients": True}}),
    ("zero_optimization.zeropp_loco_param", {"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}}),
]


@pytest.mark.parametrize(("key", "config"), NOTED)
def test_noted_when_switched_on(key: str, config: dict[str, Any]) -> None:
    """What one process does anyway, or what is done with more digits than was asked for."""
    (notice,) = [notice for notice in load_config(BASE | config).notices if key in notice]
    assert "no effect" in notice


@pytest.mark.parametrize(("key", "config"), REFUSED)
def test_refused_when_switched_on(key: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE | config)
    assert caught.value.key == key
    assert f"'{key}'" in str(caught.value)
    assert "would change what is computed" in str(caught.value)


def test_every_refusal_is_tested() -> None:
    refusals = {path for path, field in _FIELDS if any(isinstance(rule, Refused) for rule in field.metadata)}
    # These two are one annotation, and the check against the compute dtype is made elsewhere.
    tested = {key for key, _ in REFUSED} - {"data_types.param_dtype"}
    assert refusals - tested == {"tensor_parallel.tp_size"}
    assert tested <= refusals


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16}},
        {"fp16": None},
        {"amp": {"enabled": "auto", "opt_level": "auto"}},
        {"torch_autocast": {"enabled": False}},
        {"bf16": {"enabled": False, "bf16_master_weights_and_grads": True}},
        {"data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": "auto"}},
        {"sparse_gradients": False},
        {"managed_gradient_accumulation": True},
        {"gradient_allreduce_op": "mean"},
        {"sequence_parallel_size": 1},
        {"tensor_parallel": {"tp_size": 1, "tp": {"tp_size": 1}}},
        {"pipeline": {"stages": 1, "seed_layers": False}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": False}, "data_routing": {"enabled": False}}},
        {"elasticity": {"enabled": "false", "max_train_batch_size": 2000}},
        {"zero_optimization": {"zero_quantized_weights": False, "zero_hpz_partition_size": 1, "zenflow": None}},
        {"wandb": {"enabled": False, "project": "x"}, "tensorboard": {}, "csv_monitor": False, "comet": None},
        {"flops_profiler": {"enabled": False, "profile_step": 5}, "comms_logger": {"enabled": False}},
        {"prescale_gradients": False, "memory_breakdown": False, "dump_state": False, "graph_harvesting": False},
        {"zero_optimization": {"offload_param": {"device": "none", "pin_memory": True, "buffer_count": 5}}},
    ],
)
def test_silent_when_switched_off(config: dict[str, Any]) -> None:
    assert load_config(BASE | config).notices == ()


def test_param_dtype_may_repeat_the_compute_dtype() -> None:
    types = {"param_dtype": "bfloat16", "buffer_dtype": "bf16"}
    assert load_config(BASE | {"bf16": {"enabled": True}, "data_types": types}).notices == ()


def test_notices_are_grouped_by_reason() -> None:
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "sub_group_size": 1e9}
    notices = load_config(BASE | {"zero_optimization": zero}).notices
    assert notices == (
        "zero_optimization.reduce_bucket_size, zero_optimization.overlap_comm: "
        "no effect: it tunes how DeepSpeed's processes communicate, which works differently here",
        "zero_optimization.sub_group_size: "
        "no effect: the size and number of buffers follow from the model and infinity.host_memory_budget, and they never "
        "run out",
        "zero_optimization.stage: stage 2 runs as stage 3, with the same numbers",
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lower_stages_are_noted(stage: int) -> None:
    (notice,) = load_config(BASE | {"zero_optimization": {"stage": stage}}).notices
    assert notice.startswith(f"zero_optimization.stage: stage {stage} runs as stage 3")
    assert load_config(BASE | {"zero_optimization": {"stage": 3}}).notices == ()


@pytest.mark.parametrize(
    ("zero", "stage"),
    [
        (None, 0),
        ({}, 0),
        ({"stage": "auto", "overlap_comm": True}, 0),
        ({"offload_optimizer": {"device": "none"}}, 0),
        ({"offload_optimizer": {"device": "cpu"}}, 3),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, 1),
    ],
)
def test_a_stage_that_is_not_written_follows_from_the_offload(zero: dict[str, Any] | None, stage: int) -> None:
    config = load_config(BASE | {"zero_optimization": zero})
    assert config.zero_stage == stage
    reasons = [reason for key, _, reason in config.decisions if key == "zero_optimization.stage"]
    assert [reason.endswith(("is offloaded", "as in DeepSpeed")) for reason in reasons] == (
        [] if zero is None or zero.get("stage") == 1 else [True]
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "gradient_checkpointing_enable"),
        ({"memory_breakdown": True}, "torch.profiler"),
        ({"compile": {"deepcompile": True}}, "uncompiled"),
        ({"bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}}, "bf16.loss_scale, bf16.hysteresis"),
        ({"zero_allow_untested_optimizer": True}, "zero_allow_untested_optimizer"),
        ({"log_level": "info"}, "logging"),
        ({"aio": {"thread_count": 8}}, "aio.thread_count: another name of aio.intra_op_parallelism"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}, "offload_optimizer.ratio"),
    ],
)
def test_noted(config: dict[str, Any], words: str) -> None:
    (notice,) = load_config(BASE | config).notices
    assert words in notice


_KEYS = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text())
"""What DeepSpeed 0.19.8 reads at the top level and in `zero_optimization`, from its documentation and defaults."""


@pytest.mark.parametrize("key", _KEYS["top"])
def test_deepspeeds_keys_are_known(key: str) -> None:
    load_config({"train_micro_batch_size_per_gpu": 1, **({} if key == "train_batch_size" else {key: "auto"})})


@pytest.mark.parametrize("key", _KEYS["zero_optimization"])
def test_deepspeeds_zero_keys_are_known(key: str) -> None:
    load_config(BASE | {"zero_optimization": {key: "auto"}})


def test_no_key_is_both_refused_and_noted() -> None:
    for path, field in _FIELDS:
        assert sum(isinstance(rule, NoEffect | Refused) for rule in field.metadata) <= 1, path
        assert sum(isinstance(rule, Keys) for rule in field.metadata) <= 1, path
