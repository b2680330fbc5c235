"""Small Hugging Face models with drawn weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def llama(**changes: Any) -> Any:
    """No dropout, two blocks, 24 wide."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 24, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


def gpt2(**changes: Any) -> Any:
    """With dropout and tied embeddings."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=24, n_layer=2, n_head=2, **changes))
