"""Configs as they are found: what training frameworks write, what tutorials and bug reports show.

Every one of the folder `wild` must load, and mean what its author meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.config import InfinityConfig, load_config
from infinity.errors import ConfigError

_WILD = Path(__file__).with_name("wild")


def load(name: str, nvme: Path, **options: Any) -> InfinityConfig:
    path = nvme / "ds_config.json"
    path.write_text((_WILD / f"{name}.json").read_text().replace("/local_nvme", str(nvme)))
    return load_config(path, **options)


def test_transformers_zero3_everything_auto(tmp_path: Path) -> None:
    config = load("transformers_zero3", tmp_path)
    assert config.train_micro_batch_size_per_gpu is None
    assert (config.gradient_accumulation_steps, config.gradient_clipping, config.steps_per_print) == (1, 1.0, 2000)
    assert config.compute_dtype is torch.float32
    assert config.optimizer is not None and config.optimizer.params == {}
    assert config.scheduler is not None and config.scheduler.params == {"warmup_max_lr": None}
    assert (config.offload_param.device, config.offload_optimizer.device) == ("cpu", "cpu")
    decided = {key for key, _, by in config.decisions if by.startswith('"auto"')}
    shown = {key: value for key, value, _ in config.decisions}
    assert "otherwise an error" in str(shown["optimizer.params.lr"]) and "default" in str(shown["optimizer.params.eps"])
    zero = "zero_optimization.reduce_bucket_size"
    assert {"optimizer.params.lr", "gradient_clipping", "bf16.enabled", zero} <= decided


def test_transformers_nvme_example(tmp_path: Path) -> None:
    config = load("transformers_nvme", tmp_path)
    assert config.offload_param.nvme_paths == config.offload_optimizer.nvme_paths == (tmp_path,)
    assert (config.io.request_bytes, config.io.num_threads, config.io.max_inflight) == (262144, 4, 128)


def test_lightning_offload_defaults(tmp_path: Path) -> None:
    config = load("lightning_offload", tmp_path)
    assert (config.gradient_clipping, config.compute_dtype, config.train_batch_size) == (0.0, torch.bfloat16, 2)


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


def test_finetuning_recipe_with_fp16_keys_under_bf16(tmp_path: Path) -> None:
    config = load("recipe_fp16_keys_under_bf16", tmp_path)
    assert config.compute_dtype is torch.bfloat16
    assert any("bf16.loss_scale" in notice for notice in config.notices)
    assert any(notice.startswith("zero_optimization.stage") for notice in config.notices)


def test_first_generation_cpu_offload(tmp_path: Path) -> None:
    config = load("first_generation", tmp_path)
    assert (config.offload_optimizer.device, config.offload_param.device) == ("cpu", "none")
    assert config.optimizer.params == {"lr": 3e-5, "betas": (0.8, 0.999), "eps": 1e-8, "weight_decay": 3e-7}
    assert any("zero_optimization.cpu_offload:" in notice for notice in config.notices)


@pytest.mark.parametrize("block", [None, "auto", {"device": "auto", "pin_memory": True}], ids=str)
def test_an_old_flag_beside_a_block_that_is_left_open(block: object) -> None:
    zero = {"stage": 2, "cpu_offload": True, "offload_optimizer": block}
    assert load_config({"train_batch_size": 8, "zero_optimization": zero}).offload_optimizer.device == "cpu"
    with pytest.raises(ConfigError, match=r"offload_optimizer.*must be an object"):
        load_config({"train_batch_size": 8, "zero_optimization": zero | {"offload_optimizer": [1]}})


def test_second_generation_parameter_offload(tmp_path: Path) -> None:
    config = load("second_generation", tmp_path)
    assert config.compute_dtype is torch.bfloat16
    assert (config.offload_param.device, config.offload_optimizer.device) == ("cpu", "cpu")


def test_bug_report_with_keys_in_the_wrong_block(tmp_path: Path) -> None:
    """`buffer_size` under offload_optimizer and pipelining keys under offload_param: rejected by DeepSpeed today."""
    config = load("keys_in_the_wrong_block", tmp_path)
    assert config.offload_optimizer.nvme_paths == (tmp_path,)
    overlapping = [notice for notice in config.notices if "offload_optimizer.pipeline_read" in notice]
    assert len(overlapping) == 1 and "always overlap" in overlapping[0]


def test_output_of_deepspeeds_tuning_tool(tmp_path: Path) -> None:
    """Flags as text, and the number of threads under a name that DeepSpeed itself does not read."""
    io = load("tuning_tool", tmp_path).io
    assert (io.num_threads, io.max_inflight, io.request_bytes) == (8, 256, 8 << 20)


def test_hand_written_with_comments(tmp_path: Path) -> None:
    config = load("comments", tmp_path, world_size=2)
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
    assert config.optimizer.params == {"lr": 1e-5, "betas": (0.9, 0.95), "foreach": False}
    assert config.scheduler.params == {"warmup_num_steps": 100.0, "warmup_type": "linear"}


def test_megatron_style_kitchen_sink(tmp_path: Path) -> None:
    config = load("megatron", tmp_path)
    assert config.train_batch_size == 1
    noted = " ".join(config.notices)
    assert all(key in noted for key in ("prescale_gradients", "checkpoint", "vocabulary_size"))
    assert "curriculum_learning" not in noted and "tensorboard" not in noted
    assert config.monitors["tensorboard"] == Path.cwd() / "logs/train"


@pytest.mark.parametrize("form", ["path", "str", "text", "dict"])
def test_every_form_of_source(form: str, tmp_path: Path) -> None:
    content: dict[str, Any] = {"train_batch_size": 3}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(content))
    source = {"path": path, "str": str(path), "text": json.dumps(content), "dict": content}[form]
    assert load_config(source).train_batch_size == 3  # type: ignore[arg-type]
