"""Small Hugging Face models with drawn weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def llama_config(**changes: Any) -> Any:
    """No dropout, two blocks, 24 wide."""
    sizes = {"vocab_size": 256, "hidden_size": 24, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaConfig(**{**sizes, **heads, **changes})


def llama(**changes: Any) -> Any:
    """Of `llama_config`."""
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(**changes))


def lora() -> Any:
    """Adapters for that, with dropout."""
    import peft

    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, lora_dropout=0.1))


def gpt2(**changes: Any) -> Any:
    """With dropout and tied embeddings."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=24, n_layer=2, n_head=2, **changes))


def t5() -> Any:
    """An encoder and a decoder, with dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "d_model": 24, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes))
