"""Tells the base weights of a model from the adapters that PEFT added to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT wraps the model, or transformers has added adapters to it (``model.add_adapter``)."""
    # Looked up, not imported: a model can only be wrapped by PEFT if the script has imported PEFT.
    peft: Any = sys.modules.get("peft")
    is_wrapped = peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))
    return is_wrapped or bool(getattr(model, "_hf_peft_config_loaded", False))


def is_base(model: nn.Module) -> Callable[[nn.Parameter], bool]:
    """Return a predicate that is True for a frozen base weight of a model with adapters."""
    # `AdamW(model.parameters())` puts base weights into a parameter group as well. Membership in a group therefore does
    # not show that a weight will be trained, and the planner uses this predicate to reserve no optimizer state for it.
    if not is_adapted(model):
        return lambda parameter: False
    of_adapters = {id(parameter) for parameter in _of_adapters(model)}
    return lambda parameter: not parameter.requires_grad and id(parameter) not in of_adapters


def _of_adapters(model: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of all adapters, active or not."""
    # PEFT stores an adapter in each layer it adapts as `layer.lora_A["default"]`: a ModuleDict for modules such as
    # lora_A and lora_B, a ParameterDict for bare tensors such as the embedding's or IA3's. The key is the adapter's
    # name.
    for module in model.modules():
        for name in model.peft_config:
            if isinstance(module, nn.ModuleDict) and name in module:
                yield from module[name].parameters()
            elif isinstance(module, nn.ParameterDict) and isinstance(module.get(name), nn.Parameter):
                yield module[name]
