"""transformers' Trainer on the engine: two changed lines, the same losses.

python tools/examples/hf_trainer.py
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is made from a config: nothing is downloaded
import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from infinity.integrations.transformers import InfinityTrainer

DRIVE = {"device": "nvme", "nvme_path": "."}  # any directory; what is written there has no name and vanishes at the end
CONFIG = {  # batch sizes, learning rate, schedule and clipping come from TrainingArguments
    "zero_optimization": {"stage": 3, "offload_param": DRIVE, "offload_optimizer": DRIVE},
    "infinity": {"host_memory_budget": "8MB"},
}
SHAPE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=4))


def samples(num: int, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Bytes of a file of the standard library."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()[: num * length]))
    return [{"input_ids": row, "labels": row} for row in text.view(num, length)]


def arguments(name: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=name,
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
    )


def losses_of(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    data = samples(32)
    plain = losses_of(Trainer(make_model(), arguments("plain"), train_dataset=data))
    trainer = InfinityTrainer(make_model(), arguments("paged"), train_dataset=data, infinity_config=CONFIG)
    paged = losses_of(trainer)
    trainer.save_model("model")  # what Trainer writes, streamed
    trainer.engine.close()
    for step, (ours, theirs) in enumerate(zip(paged, plain, strict=True), start=1):
        print(f"step {step}: loss {ours} with the engine, {theirs} without")
    print("losses equal:", paged == plain)
