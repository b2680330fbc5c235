"""Small models of many of transformers' architectures, and what it means that two are equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
_GATED = {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2}
_EXPERTS = {**_GATED, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}


def make(name: str, **options: Any) -> Any:
    config = getattr(transformers, f"{name.split('For')[0].removesuffix('Model').removesuffix('LMHead')}Config")(
        **options
    )
    return getattr(transformers, name)(config)


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: make("GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, vocab_size=300),
    "llama": lambda: make("LlamaForCausalLM", **_GATED),
    "llama-tied": lambda: make("LlamaForCausalLM", **_GATED, tie_word_embeddings=True),
    "mixtral": lambda: make("MixtralForCausalLM", **_GATED, num_local_experts=4),
    "qwen2-moe": lambda: make("Qwen2MoeForCausalLM", **_EXPERTS, shared_expert_intermediate_size=48),
    "qwen3-moe": lambda: make("Qwen3MoeForCausalLM", **_EXPERTS, head_dim=16),
    "t5": lambda: make("T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=96, num_layers=2, vocab_size=300),
    "bert": lambda: make("BertForMaskedLM", **SMALL, intermediate_size=96),
    "vit": lambda: make("ViTForImageClassification", hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    "neox": lambda: make("GPTNeoXForCausalLM", **SMALL, intermediate_size=96),
    "phi3": lambda: make("Phi3ForCausalLM", **_GATED, pad_token_id=0),
    "gemma2": lambda: make("Gemma2ForCausalLM", **_GATED, head_dim=16),
    "mamba": lambda: make("MambaForCausalLM", hidden_size=64, num_hidden_layers=2, vocab_size=300),
}


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all of their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(named)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = everything(one), everything(other)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].requires_grad == value.requires_grad, name
        assert type(ours[name]) is type(value), name
        assert torch.equal(ours[name], value), name
    ties = [{name: id(value) for name, value in each.items()} for each in (ours, theirs)]
    groups = [{frozenset(n for n in tie if tie[n] == tie[name]) for name in tie} for tie in ties]
    assert groups[0] == groups[1]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """As transformers looks for them: a single file, then an index, then pickles."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return torch.load(folder / "pytorch_model.bin")
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {
        name: value for file in sorted(set(weight_map.values())) for name, value in load_file(folder / file).items()
    }
    assert found.keys() == weight_map.keys()
    return found


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Names, dtypes and values."""
    return one.keys() == other.keys() and all(
        one[name].dtype == value.dtype and torch.equal(one[name], value) for name, value in other.items()
    )
