"""Adapters of PEFT in a model: what is the base under them.

Knows modules and PEFT's names; must not know what is trained or saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT wraps the model, or transformers has added adapters to it (``model.add_adapter``)."""
    peft: Any = sys.modules.get("peft")  # who has such a model has imported it
    is_wrapped = peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))
    return is_wrapped or bool(getattr(model, "_hf_peft_config_loaded", False))


def is_base(model: nn.Module) -> Callable[[nn.Parameter], bool]:
    """What tells whether a parameter is of the model under the adapters: frozen, adapted, and of no adapter, active or not.

    With ``AdamW(model.parameters())`` these all are in a group, and nobody thaws them.
    """
    if not is_adapted(model):
        return lambda parameter: False
    of_adapters = {id(parameter) for parameter in _of_adapters(model)}
    return lambda parameter: not parameter.requires_grad and id(parameter) not in of_adapters


def _of_adapters(model: Any) -> Iterator[nn.Parameter]:
    """PEFT keeps what an adapter has in each layer in containers, under the adapter's name."""
    for module in model.modules():
        for name in model.peft_config:
            if isinstance(module, nn.ModuleDict) and name in module:
                yield from module[name].parameters()
            elif isinstance(module, nn.ParameterDict) and isinstance(module.get(name), nn.Parameter):
                yield module[name]
