"""Of a mixture of experts, the parameters that one token is computed with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DbrxConfig, MixtralConfig, NllbMoeConfig, SwitchTransformersConfig

from infinity.plan.model_shapes import active_share

_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
_LAYERS = {"encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_CASES: dict[str, tuple[Any, int, int]] = {
    "Mixtral": (
        MixtralConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=99, **_HEADS),
        8,
        2,
    ),
    "Dbrx": (
        DbrxConfig(
            d_model=32,
            n_heads=2,
            n_layers=2,
            vocab_size=99,
            attn_config={"kv_n_heads": 2, "rope_theta": 10000.0},
            ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 16, "moe_top_k": 4},
        ),
        16,
        4,
    ),
    "SwitchTransformers": (SwitchTransformersConfig(d_model=32, d_kv=8, d_ff=64, num_layers=2, vocab_size=99), 8, 1),
    "NllbMoe": (NllbMoeConfig(d_model=32, vocab_size=99, num_experts=8, **_LAYERS), 8, 2),
}


@pytest.mark.parametrize(("config", "num_experts", "num_chosen"), _CASES.values(), ids=_CASES)
def test_the_chosen_experts_of_a_model_count(config: Any, num_experts: int, num_chosen: int) -> None:
    kind = type(config).__name__.removesuffix("Config")
    ending = "ForCausalLM" if kind in ("Mixtral", "Dbrx") else "ForConditionalGeneration"
    with torch.device("meta"):
        model = getattr(transformers, kind + ending)._from_config(config)
    total = sum(each.numel() for each in model.parameters())
    of_experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    assert of_experts
    idle = of_experts * (1 - num_chosen / num_experts)
    assert active_share(model) == pytest.approx(1 - idle / total)


@pytest.mark.parametrize("name", ["num_experts_per_tok", "moe_top_k", "moe_topk"])
def test_experts_in_a_list(name: str) -> None:
    model = nn.Module()
    model.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
    model.shared_experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    model.config = type("Config", (), {name: 1})()  # type: ignore[assignment]
    assert active_share(model) == pytest.approx((1 + 2) / 6)


def test_what_names_no_experts_is_active() -> None:
    assert active_share(nn.Linear(3, 3)) == 1
