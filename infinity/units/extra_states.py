"""What modules keep beside parameters and buffers: torch's ``get_extra_state`` and ``set_extra_state``.

Knows which modules have some, as ``state_dict`` does; must not know how it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

EXTRA_STATES = "extra_states"
"""What `extra_states` gives is called so in what is saved."""


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Name of a module -> what it keeps; of those whose class says what that is."""
    return {
        fqn: module.get_extra_state()
        for fqn, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def takers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module; of those whose class takes an extra state."""
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Go on from what `extra_states` gave; modules that are not in it stay as they are."""
    for fqn, module in takers(model).items():
        if fqn in states:
            module.set_extra_state(states[fqn])
