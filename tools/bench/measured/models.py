"""The benchmark's models and batches, and what a program does with them. Every one imports it: it needs torch, transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a Llama-style model."""

    hidden: int
    num_layers: int
    intermediate: int
    num_heads: int
    vocabulary: int


MODEL_SIZES: dict[str, ModelSize] = {
    "tiny": ModelSize(hidden=128, num_layers=4, intermediate=352, num_heads=4, vocabulary=1000),
    "100m": ModelSize(hidden=640, num_layers=14, intermediate=1728, num_heads=10, vocabulary=16000),
    "374m": ModelSize(hidden=1024, num_layers=24, intermediate=2816, num_heads=16, vocabulary=32000),
    "1b": ModelSize(hidden=2048, num_layers=18, intermediate=5632, num_heads=32, vocabulary=32000),
    "3b": ModelSize(hidden=3072, num_layers=26, intermediate=8192, num_heads=24, vocabulary=32000),
}


@dataclass(frozen=True)
class Workload:
    """One training job: the model, what one step feeds it, and how it is stepped. Travels to the children as JSON."""

    model: str = "374m"
    num_layers: int | None = None
    dtype: str = "bfloat16"
    batch_size: int = 1
    seq_len: int = 256
    num_micro_batches: int = 1
    clip: float = 0.0
    checkpointing: str = "none"
    learning_rate: float = 1e-4

    @property
    def size(self) -> ModelSize:
        """Dimensions of the model that is trained."""
        size = MODEL_SIZES[self.model]
        return size if self.num_layers is None else replace(size, num_layers=self.num_layers)

    @property
    def label(self) -> str:
        """Short description for tables."""
        clip = f"clip {self.clip:g}" if self.clip else "no clipping"
        layers = "" if self.num_layers is None else f" x {self.num_layers} layers"
        checkpointing = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        tokens = f"{self.num_micro_batches} x ({self.batch_size} x {self.seq_len})"
        return f"{self.model}{layers}, {tokens}, {clip}{checkpointing}"

    def optimizer_params(self) -> dict[str, Any]:
        """AdamW's arguments, the same for every participant."""
        return {"lr": self.learning_rate, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}

    def config(self) -> dict[str, Any]:
        """Return the part of a DeepSpeed config that every participant shares."""
        return {
            "train_micro_batch_size_per_gpu": self.batch_size,
            "gradient_accumulation_steps": self.num_micro_batches,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.dtype == "bfloat16"},
            "optimizer": {"type": "AdamW", "params": self.optimizer_params()},
        }


class Program:
    """What a measured program can do."""

    def step(self) -> float:
        """Run one optimizer step, and return the mean loss of its micro-batches."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What the report prints besides times."""
        raise NotImplementedError

    def flush(self) -> None:
        """Wait for what a step has left pending: nothing here."""

    def moved_bytes(self) -> tuple[int, int] | None:
        """Return bytes read and written through files so far, if the program counts them: the kernel misses a tmpfs."""
        return None

    def take_reports(self) -> list[dict[str, Any]]:
        """Return the engine's reports since the last call; only our engine has any."""
        return []

    def close(self) -> None:
        """Release what outlives the process: nothing here."""


def build_model(workload: Workload, device: str = "cpu") -> torch.nn.Module:
    """The model with random weights, built directly in its training dtype: no fp32 copy ever exists."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = workload.size
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.num_layers,
        intermediate_size=size.intermediate,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=max(2048, workload.seq_len),
        tie_word_embeddings=False,
        use_cache=False,
    )
    # transformers builds in the default dtype, which is global: restored whatever happens.
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, workload.dtype))
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default_dtype)
    model.train()
    if workload.checkpointing != "none":
        # transformers 5.23 renamed it
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": workload.checkpointing == "reentrant"})
    return model


def micro_batches(workload: Workload, device: torch.device | str = "cpu") -> Iterator[dict[str, torch.Tensor]]:
    """Endless micro-batches of random tokens, the same sequence for every participant."""
    import torch

    # Not the global one, which the model's dropout or a peer may have used.
    generator = torch.Generator().manual_seed(1)
    shape = (workload.batch_size, workload.seq_len)
    while True:
        tokens = torch.randint(
            0, workload.size.vocabulary, shape, generator=generator, dtype=torch.int64, device="cpu"
        ).to(device)
        yield {"input_ids": tokens, "labels": tokens}
