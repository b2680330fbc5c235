"""Configs as they are found: what training frameworks write, what tutorials and bug reports show.

Every one must load, and mean what its author meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.config import InfinityConfig, load_config
from infinity.errors import ConfigError


def load(text: str, nvme: Path) -> InfinityConfig:
    return load_config(text.replace("/local_nvme", str(nvme)))


def test_transformers_zero3_everything_auto(tmp_path: Path) -> None:
    config = load(
        """{
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW",
                      "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR",
                      "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                 "warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": true},
            "offload_param": {"device": "cpu", "pin_memory": true},
            "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
        }""",
        tmp_path,
    )
    assert config.train_micro_batch_size_per_gpu is None
    assert config.gradient_accumulation_steps == 1
    assert config.gradient_clipping == 1.0
    assert config.compute_dtype is torch.float32
    assert config.optimizer is not None and config.optimizer.params == {}
    assert config.scheduler is not None and config.scheduler.params == {"warmup_max_lr": None}
    assert (config.offload_param.device, config.offload_optimizer.device) == ("cpu", "cpu")
    assert config.steps_per_print == 2000
    decided = {key for key, _, by in config.decisions if by.startswith('"auto"')}
    assert {
        "optimizer.params.lr",
        "gradient_clipping",
        "bf16.enabled",
        "zero_optimization.reduce_bucket_size",
    } <= decided


def test_transformers_nvme_example(tmp_path: Path) -> None:
    config = load(
        """{
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 4,
                                  "fast_init": false},
            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 5,
                              "buffer_size": 1e8, "max_in_cpu": 1e9},
            "aio_placeholder_comment": null
        },
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false,
                "overlap_events": true}
        }""".replace('"aio_placeholder_comment": null', '"_comment": "see the tutorial"'),
        tmp_path,
    )
    assert config.offload_param.nvme_paths == config.offload_optimizer.nvme_paths == (tmp_path,)
    assert (config.io.request_bytes, config.io.num_threads, config.io.max_inflight) == (262144, 4, 128)


def test_lightning_offload_defaults(tmp_path: Path) -> None:
    config = load(
        """{
        "activation_checkpointing": {"partition_activations": false, "cpu_checkpointing": false,
            "contiguous_memory_optimization": false, "synchronize_checkpoint_boundary": false},
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": false,
                "overlap_events": true},
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": 3, "contiguous_gradients": true, "overlap_comm": true,
            "allgather_partitions": true, "reduce_scatter": true, "allgather_bucket_size": 200000000,
            "reduce_bucket_size": 200000000, "sub_group_size": 1000000000000,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4,
                                  "pin_memory": false},
            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5,
                              "buffer_size": 100000000, "max_in_cpu": 1000000000, "pin_memory": false}},
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
        "bf16": {"enabled": true}
        }""",
        tmp_path,
    )
    assert config.gradient_clipping == 0.0
    assert config.compute_dtype is torch.bfloat16
    assert config.train_batch_size == 2


def test_accelerate_plugin() -> None:
    """Not text: the dict that accelerate passes on, with Infinity to silence the progress line."""
    config = load_config(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": 4,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "none", "nvme_path": None},
                "offload_param": {"device": "none", "nvme_path": None},
                "stage3_gather_16bit_weights_on_model_save": False,
            },
            "gradient_clipping": 1.0,
            "steps_per_print": float("inf"),
            "fp16": {"enabled": False},
            "bf16": {"enabled": True},
        }
    )
    assert config.steps_per_print is None
    assert config.gradient_accumulation_steps == 4
    assert (config.offload_param.device, config.offload_optimizer.device) == ("none", "none")


def test_finetuning_recipe_with_fp16_keys_under_bf16() -> None:
    config = load_config(
        """{
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": true,
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
        "bf16": {"enabled": true, "loss_scale": 1.0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
        "zero_optimization": {"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 5e8,
            "overlap_comm": false, "reduce_scatter": true, "reduce_bucket_size": 5e8, "contiguous_gradients": true,
            "round_robin_gradients": true}
        }"""
    )
    assert config.compute_dtype is torch.bfloat16
    assert any("bf16.loss_scale" in notice for notice in config.notices)
    assert any(notice.startswith("zero_optimization.stage") for notice in config.notices)


def test_first_generation_cpu_offload() -> None:
    config = load_config(
        """{
        "train_batch_size": 8, "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7,
                      "max_grad_norm": 0}},
        "zero_optimization": {"stage": 2, "cpu_offload": true, "cpu_offload_use_pin_memory": true,
            "allgather_size": 5e8, "contiguous_gradients": true, "overlap_comm": false}
        }"""
    )
    assert config.offload_optimizer.device == "cpu"
    assert config.offload_param.device == "none"
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 3e-5, "betas": (0.8, 0.999), "eps": 1e-8, "weight_decay": 3e-7}
    assert any("zero_optimization.cpu_offload:" in notice for notice in config.notices)


@pytest.mark.parametrize("block", [None, "auto", {"device": "auto", "pin_memory": True}], ids=str)
def test_an_old_flag_beside_a_block_that_is_left_open(block: object) -> None:
    zero = {"stage": 2, "cpu_offload": True, "offload_optimizer": block}
    assert load_config({"train_batch_size": 8, "zero_optimization": zero}).offload_optimizer.device == "cpu"
    with pytest.raises(ConfigError, match=r"offload_optimizer.*must be an object"):
        load_config({"train_batch_size": 8, "zero_optimization": zero | {"offload_optimizer": [1]}})


def test_second_generation_parameter_offload() -> None:
    config = load_config(
        """{"train_micro_batch_size_per_gpu": 1, "bfloat16": {"enabled": true},
            "zero_optimization": {"stage": 3, "cpu_offload": true, "cpu_offload_params": true,
                "stage3_gather_fp16_weights_on_model_save": true, "stage3_max_live_parameters": 1e9}}"""
    )
    assert config.compute_dtype is torch.bfloat16
    assert (config.offload_param.device, config.offload_optimizer.device) == ("cpu", "cpu")


def test_bug_report_with_keys_in_the_wrong_block(tmp_path: Path) -> None:
    """`buffer_size` under offload_optimizer and pipelining keys under offload_param: rejected by DeepSpeed today."""
    config = load(
        """{
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 12, "buffer_size": 1e9,
                "pipeline": true, "pipeline_read": true, "pipeline_write": true, "pin_memory": true,
                "fast_init": false},
            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pipeline_read": true, "buffer_size": 1e9}}
        }""",
        tmp_path,
    )
    assert config.offload_optimizer.nvme_paths == (tmp_path,)
    overlapping = [notice for notice in config.notices if "offload_optimizer.pipeline_read" in notice]
    assert len(overlapping) == 1 and "always overlap" in overlapping[0]


def test_output_of_deepspeeds_tuning_tool() -> None:
    """Flags as text, and the number of threads under a name that DeepSpeed itself does not read."""
    config = load_config(
        """{"train_micro_batch_size_per_gpu": 1,
            "aio": {"single_submit": "false", "overlap_events": "true", "num_threads": 8, "queue_depth": 32,
                    "block_size": 8388608}}"""
    )
    assert (config.io.num_threads, config.io.max_inflight, config.io.request_bytes) == (8, 256, 8 << 20)


def test_hand_written_with_comments() -> None:
    config = load_config(
        """
        // finetuning, 2 x A100
        {
          "train_batch_size": 32,   # global
          "gradient_accumulation_steps": 4,
          "bf16": {"enabled": true,},
          /* lr from the sweep */
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": true, "adam_w_mode": true,},},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-5,
                                                       "warmup_num_steps": 100,}},
          "zero_optimization": {"stage": 3,},
        }
        """.strip()
        .removeprefix("// finetuning, 2 x A100")
        .strip(),
        world_size=2,
    )
    assert config.train_micro_batch_size_per_gpu == 4
    assert config.optimizer is not None and config.optimizer.params["torch_adam"] is True
    assert config.scheduler is not None and config.scheduler.params["warmup_num_steps"] == 100


def test_numbers_as_text_from_yaml() -> None:
    """YAML reads 1e-5 as text, and so it arrives."""
    config = load_config(
        {
            "train_batch_size": "8",
            "gradient_clipping": "0.5",
            "optimizer": {"type": "AdamW", "params": {"lr": "1e-5", "betas": ["0.9", "0.95"], "foreach": "false"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "1e2", "warmup_type": "linear"}},
            "zero_optimization": {"stage": "3", "reduce_bucket_size": "5e8", "overlap_comm": "true"},
        }
    )
    assert config.gradient_clipping == 0.5
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-5, "betas": (0.9, 0.95), "foreach": False}
    assert config.scheduler is not None
    assert config.scheduler.params == {"warmup_num_steps": 100.0, "warmup_type": "linear"}


def test_megatron_style_kitchen_sink() -> None:
    config = load_config(
        """{
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": 10,
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 50000000},
        "prescale_gradients": true, "gradient_predivide_factor": 8.0, "communication_data_type": "fp32",
        "fp16": {"enabled": false}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"},
        "wall_clock_breakdown": false, "vocabulary_size": 50304,
        "pipeline": {"stages": 1, "pipe_partitioned": true, "grad_partitioned": true},
        "flops_profiler": {"enabled": true, "profile_step": 1, "module_depth": -1, "top_modules": 1,
                           "detailed": true, "output_file": null},
        "tensorboard": {"enabled": true, "output_path": "logs/", "job_name": "train"},
        "checkpoint": {"tag_validation": "Warn", "load_universal": false, "parallel_write": {"pipeline_stage": true}},
        "curriculum_learning": {"enabled": false, "curriculum_type": "seqlen", "min_difficulty": 8}
        }"""
    )
    assert config.train_batch_size == 1
    noted = " ".join(config.notices)
    for key in ("prescale_gradients", "checkpoint", "vocabulary_size"):
        assert key in noted
    assert "curriculum_learning" not in noted and "tensorboard" not in noted
    assert config.monitors.tensorboard == Path.cwd() / "logs/train"


@pytest.mark.parametrize("form", ["path", "str", "text", "dict"])
def test_every_form_of_source(form: str, tmp_path: Path) -> None:
    content: dict[str, Any] = {"train_batch_size": 3}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(content))
    source = {"path": path, "str": str(path), "text": json.dumps(content), "dict": content}[form]
    assert load_config(source).train_batch_size == 3  # type: ignore[arg-type]
