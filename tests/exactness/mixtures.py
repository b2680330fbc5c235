"""Mixtures of experts of transformers whose experts are one tensor, small, with more experts than a batch goes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.exactness.case import Batch, Case, Draw
from tests.exactness.families import VOCABULARY

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDTHS: dict[str, Any] = {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_GROUPED: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**_WIDTHS, "num_experts": 8, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3Moe", {**_WIDTHS, "num_experts": 8, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3", {**_WIDTHS, **_GROUPED, **_LATENT, "n_group": 2}),
    "gpt_oss": ("GptOss", {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}),
    "glm4_moe": ("Glm4Moe", {**_WIDTHS, **_GROUPED, "n_group": 1, "head_dim": 8}),
}
FAMILIES = tuple(_FAMILIES)


def make(family: str, implementation: str = "grouped_mm", **changes: Any) -> Any:
    """The model, with one of transformers' implementations of experts, and changes of its config."""
    import transformers

    name, options = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SHAPE, **options, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_experts_implementation(implementation)
    return model


def with_adapters(model: Any) -> Any:
    """LoRA on what attends."""
    import peft

    names = ["q_proj", "v_proj", "kv_b_proj", "o_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False))


def with_adapters_on_experts(model: Any) -> Any:
    """LoRA on the tensors of experts, too: PEFT adds to the whole tensor in each forward."""
    import peft

    weights = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=weights, init_lora_weights=False)
    return peft.get_peft_model(model, settings)


def frozen(model: Any) -> Any:
    """Everything but the experts trains."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    return model


def case(
    family: str, implementation: str = "grouped_mm", wrap: Callable[[Any], nn.Module] = lambda model: model
) -> Case:
    """A model that begins with the same weights each time, and few tokens for it."""

    def build(checkpointing: str) -> nn.Module:
        torch.manual_seed(7)
        return wrap(make(family, implementation))

    return Case(family, build, _batch)


def _batch(draw: Draw) -> Batch:
    tokens = draw.integers(VOCABULARY, 1, 5)
    return {"input_ids": tokens, "labels": tokens}


def watch_routing(model: nn.Module) -> set[str]:
    """A set that gets the names of the units of experts that tokens go to."""
    routed: set[str] = set()

    def watch(name: str, module: nn.Module) -> None:
        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            for expert in set(args[1].flatten().tolist()):
                routed.update(f"{name}.{each}_by_expert.{expert}.weight" for each in ("gate_up_proj", "down_proj"))

        module.register_forward_pre_hook(note)

    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            watch(name, module)
    return routed
