"""Of a mixture of experts, what one token is computed with.

Knows models' shapes and the names that Hugging Face's configs have for this.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")
_CHOSEN_BY_KIND = {"switch_transformers": 1, "nllb-moe": 2}
"""Their configs do not say it."""


def active_share(model: nn.Module) -> float:
    """Of a model's parameters, those that one token is computed with: of experts, the chosen ones."""
    num_chosen = _num_chosen(getattr(model, "config", None))
    total = sum(parameter.numel() for parameter in model.parameters())
    if num_chosen is None or not total:
        return 1.0
    idle = 0.0
    for name, module in model.named_modules():
        for numel, num_experts in _experts(name, module):
            idle += numel and numel * max(0.0, 1 - num_chosen / num_experts)
    return 1 - idle / total


def _num_chosen(config: Any) -> int | None:
    """Experts per token; None if that is not said."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for section in (text, getattr(text, "ffn_config", None)):
        for name in _CHOSEN:
            found = section.get(name) if isinstance(section, dict) else getattr(section, name, None)
            if isinstance(found, list | tuple) and found:  # of each layer
                found = max(found)
            if isinstance(found, int) and found > 0:
                return found
    return _CHOSEN_BY_KIND.get(getattr(text, "model_type", ""))


def _experts(name: str, module: nn.Module) -> list[tuple[int, int]]:
    """Elements of experts that this module holds itself, and how many experts share them."""
    last = name.rpartition(".")[2]
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and "expert" in last and "shared" not in last:
        numels = [sum(parameter.numel() for parameter in each.parameters()) for each in module.children()]
        return [(sum(numels), sum(numel > 0 for numel in numels))]  # an activation may lie beside them
    own = list(module.parameters(recurse=False))
    if isinstance(count := getattr(module, "num_experts", None), int):
        return [(each.numel(), count) for each in own if each.dim() == 3 and len(each) == count]
    if isinstance(count := getattr(module, "moe_num_experts", None), int):  # DBRX: one below the other, in one matrix
        return [(each.numel(), count) for each in own if len(each) > count and len(each) % count == 0]
    return []
