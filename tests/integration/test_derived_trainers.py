"""The mixin before other trainers than transformers' own, and adapters: the bits of the same without an engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from infinity.errors import ModelError
from infinity.integrations.transformers import InfinityTrainerMixin
from tests.integration.test_trainer import trained
from tests.stand_in import models
from tests.stand_in.text import log_of, sentences, tokenizer
from tests.twins import on_nvme

_QUIET: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
_QUIET |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "logging_steps": 1}
_QUIET |= {"save_strategy": "no", "learning_rate": 1e-3, "gradient_accumulation_steps": 2}


@pytest.mark.deep(but=1)
@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("what", ["SFT", "DPO"])
def test_trl(what: str, is_adapted: bool, tmp_path: Path) -> None:
    """Micro-batches of a step together, but where the loss calls the model without its adapters as well."""
    import trl

    base, kind_of_arguments = getattr(trl, f"{what}Trainer"), getattr(trl, f"{what}Config")
    found = []
    for is_ours in (False, True):
        settings = on_nvme(tmp_path / "nvme")
        settings["infinity"] |= {"schedule": "vertical", "host_memory_budget": 300_000}
        more: dict[str, Any] = {"infinity_config": settings} if is_ours else {}
        if is_adapted:
            more["peft_config"] = peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
        elif what == "DPO":
            more["ref_model"] = models.llama()
        options = {"max_length": 16, "bf16": False, "gradient_checkpointing": False, **_QUIET}
        trainer = (type("OwnTrainer", (InfinityTrainerMixin, base), {}) if is_ours else base)(
            model=models.llama(),
            args=kind_of_arguments(output_dir=str(tmp_path), **options),
            train_dataset=sentences(18, has_pairs=what == "DPO"),
            processing_class=tokenizer(),
            **more,
        )
        torch.manual_seed(2)
        trainer.train()
        folder = tmp_path / str(is_ours)
        trainer.save_model(str(folder))
        [weights] = folder.glob("*model.safetensors")
        saved = {name: value.tolist() for name, value in load_file(weights).items()}
        found.append((log_of(trainer.state.log_history), {path.name for path in folder.iterdir()}, saved))
    assert found[0] == found[1]
    schedule, reason = trainer.engine.report.schedule, trainer.engine.report.schedule_reason
    if is_adapted and what == "DPO":
        assert schedule == "ordinary" and "calls the model several times" in reason
    else:
        assert schedule == "vertical", reason
    trainer.engine.close()


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_grpo_generates_between_steps(tmp_path: Path) -> None:
    """With paged weights: the completions, and so all that follows from them, are those of TRL alone."""
    import datasets
    import trl

    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    found = []
    for is_ours in (False, True):
        settings = on_nvme(tmp_path / "nvme")
        settings["infinity"]["host_memory_budget"] = 300_000
        more: dict[str, Any] = {"infinity_config": settings} if is_ours else {}
        options = _QUIET | {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
        torch.manual_seed(2)
        trainer = (type("OwnTrainer", (InfinityTrainerMixin, trl.GRPOTrainer), {}) if is_ours else trl.GRPOTrainer)(
            model=models.llama(),
            reward_funcs=length,
            args=trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, gradient_checkpointing=False, **options),
            train_dataset=datasets.Dataset.from_dict({"prompt": ["def self", "print for"] * 9}),
            processing_class=tokenizer(),
            **more,
        )
        trainer.train()
        trainer.save_model(str(tmp_path / str(is_ours)))
        saved = load_file(tmp_path / str(is_ours) / "model.safetensors")
        log = [
            {key: value for key, value in entry.items() if key != "step_time"} for entry in trainer.state.log_history
        ]
        found.append((log_of(log), {name: value.tolist() for name, value in saved.items()}))
    assert trainer.engine.report.read_bytes > 0
    trainer.engine.close()
    assert found[0] == found[1]


class Params4bit(nn.Parameter):
    """As bitsandbytes has them."""

    def __new__(cls, data: torch.Tensor) -> Params4bit:
        return torch.Tensor._make_subclass(cls, data, False)


class AffineQuantizedTensor(torch.Tensor):
    """As torchao has them: a wrapper that looks like the weight, around packed values."""

    packed: torch.Tensor

    @staticmethod
    def __new__(cls, packed: torch.Tensor) -> AffineQuantizedTensor:
        shape = (packed.shape[0], 2 * packed.shape[1])
        made: AffineQuantizedTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        made.packed = packed
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed)
        raise NotImplementedError(func)


_PACKED = torch.zeros((48, 12), dtype=torch.uint8)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize(
    ("weight", "name"),
    [
        (lambda: Params4bit(_PACKED), "Params4bit"),
        (lambda: nn.Parameter(AffineQuantizedTensor(_PACKED), requires_grad=False), "AffineQuantizedTensor"),
    ],
    ids=["bitsandbytes", "torchao"],
)
def test_a_quantized_base_is_refused(weight: Any, name: str, tmp_path: Path) -> None:
    model = models.lora()
    model.base_model.model.model.layers[0].mlp.up_proj.weight = weight()
    with pytest.raises(ModelError, match=rf"up_proj\.weight' is a {name}.*dequantize"):
        trained(tmp_path, on_nvme(tmp_path / "nvme"), model)
