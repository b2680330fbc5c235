"""Real Hugging Face models from small configs with random weights, and batches that make sense to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.exactness.case import Batch, Case, Draw

VOCABULARY = 96
_LENGTH = 6
_CAUSAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _checkpointed(make: Callable[[], nn.Module]) -> Callable[[str], nn.Module]:
    """The model as ``make`` gives it, with the library's own activation checkpointing switched on where asked for."""

    def build(checkpointing: str) -> nn.Module:
        model: Any = make()
        if checkpointing != "none":
            use_reentrant = checkpointing == "reentrant"
            # Transformers 5.23 renamed it; the first positional argument is the same.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": use_reentrant})
            if use_reentrant:
                # Otherwise blocks whose input is the batch get no gradients, as the library's documentation says.
                model.enable_input_require_grads()
        return model

    return build


def _made(name: str, **options: Any) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**options))


def llama() -> nn.Module:
    return _made("LlamaForCausalLM", **_CAUSAL, tie_word_embeddings=False)


def qwen2() -> nn.Module:
    return _made("Qwen2ForCausalLM", **_CAUSAL, tie_word_embeddings=True, attn_implementation="eager")


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return _made("MixtralForCausalLM", **_CAUSAL, **experts)


def mixtral_one_by_one() -> nn.Module:
    """Mixtral whose experts are modules in a ModuleList; an expert that no token goes to is not called."""
    model: Any = _made("MixtralForCausalLM", **_CAUSAL, num_local_experts=8, num_experts_per_tok=1)
    for layer in model.model.layers:
        layer.mlp.experts = _ExpertList(layer.mlp.experts)
    return model


class _ExpertList(nn.Module):
    """Takes the place of transformers' experts in one tensor."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.experts = nn.ModuleList()
        for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True):
            expert = nn.ModuleDict({"gate_up": nn.Linear(32, 112, bias=False), "down": nn.Linear(56, 32, bias=False)})
            with torch.no_grad():
                expert["gate_up"].weight.copy_(torch.nn.init.normal_(torch.empty_like(gate_up), std=0.1))
                expert["down"].weight.copy_(torch.nn.init.normal_(torch.empty_like(down), std=0.1))
            self.experts.append(expert)

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            rows, place = (top_k_index == index).nonzero(as_tuple=True)
            if len(rows) == 0:
                continue
            gate, up = expert["gate_up"](hidden[rows]).chunk(2, dim=-1)
            update = expert["down"](nn.functional.silu(gate) * up) * top_k_weights[rows, place, None]
            out = out.index_add(0, rows, update.to(out.dtype))
        return out


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56, **_NO_DROPOUT}


def gpt2() -> nn.Module:
    """Dropout stays on: it draws from the global generator, in a recompute too."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return _made("GPT2LMHeadModel", **sizes, use_cache=False, bos_token_id=1, eos_token_id=2)


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 56, "num_layers": 2, "num_heads": 4}
    rest = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
    return _made("T5ForConditionalGeneration", **sizes, **rest)


def bert() -> nn.Module:
    return _made("BertForMaskedLM", vocab_size=VOCABULARY, **_SMALL, max_position_embeddings=32)


def vit() -> nn.Module:
    return _made("ViTForImageClassification", **_SMALL, image_size=8, patch_size=4, num_labels=5)


def _causal_batch(draw: Draw) -> Batch:
    tokens = draw.integers(VOCABULARY - 3, 2, _LENGTH) + 3
    mask = torch.ones_like(tokens)
    # One sequence is shorter: masks are a second input that all blocks share.
    mask[1, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _encoder_decoder_batch(draw: Draw) -> Batch:
    return {"input_ids": draw.integers(VOCABULARY, 2, _LENGTH), "labels": draw.integers(VOCABULARY, 2, 4)}


def _masked_batch(draw: Draw) -> Batch:
    tokens = draw.integers(VOCABULARY, 2, _LENGTH)
    return {"input_ids": tokens, "labels": tokens.masked_fill(draw.integers(2, 2, _LENGTH) == 0, -100)}


def _image_batch(draw: Draw) -> Batch:
    return {"pixel_values": draw.floats(2, 3, 8, 8), "labels": draw.integers(5, 2)}


FAMILIES: tuple[Case, ...] = (
    Case("llama", _checkpointed(llama), _causal_batch),
    Case("gpt2", _checkpointed(gpt2), _causal_batch),
    Case("t5", _checkpointed(t5), _encoder_decoder_batch),
    Case("bert", _checkpointed(bert), _masked_batch),
    Case("vit", _checkpointed(vit), _image_batch),
    Case("mixtral", _checkpointed(mixtral), _causal_batch),
    Case("mixtral_one_by_one", _checkpointed(mixtral_one_by_one), _causal_batch),
    Case("qwen2", _checkpointed(qwen2), _causal_batch),
)
