"""State of modules beside parameters and buffers: torch's ``get_extra_state`` and ``set_extra_state``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

EXTRA_STATES = "extra_states"
"""The key in saved files."""


def extra_states(model: nn.Module) -> dict[str, Any]:
    """FQN of each module that overrides ``get_extra_state`` -> what that returns."""
    # As in Module.state_dict: the base class's method raises, so only overriding classes may be asked.
    return {
        fqn: module.get_extra_state()
        for fqn, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def takers(model: nn.Module) -> dict[str, nn.Module]:
    """FQN -> module, for each module that overrides ``set_extra_state``, and so takes an extra state."""
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Restore what `extra_states` returned; modules that it does not name are unchanged."""
    for fqn, module in takers(model).items():
        if fqn in states:
            module.set_extra_state(states[fqn])
