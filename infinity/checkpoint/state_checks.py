"""Checks of an optimizer state that somebody gives, before anything of it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.units.layout import Slot
from infinity.updates.job import ParameterState


def check_state(slot: Slot, names: Sequence[str], state: ParameterState, values: Mapping[str, Any]) -> None:
    """Raise ValueError if ``values`` cannot be the state of the parameter of ``slot``, with per-element states ``names``."""
    fqn = slot.spec.fqn
    known = (*(names if state.names is None else state.names), *(["step"] if "step" in state.scalars else []))
    if not state.is_fresh:
        missing = [name for name in known if name not in values]
        if missing:
            raise ValueError(
                f"the state for '{fqn}' lacks {', '.join(map(repr, missing))}. Give all of {', '.join(map(repr, known))}; "
                "infinity.GatheredParameters changes weights"
            )
    for name, value in values.items():
        is_tensor = isinstance(value, torch.Tensor)
        if name in names:
            shape = tuple(value.shape) if is_tensor else type(value).__name__
            if shape != tuple(slot.spec.shape) or not value.is_floating_point() or value.device.type == "meta":
                raise ValueError(
                    f"the state '{name}' for '{fqn}' is {shape}, {getattr(value, 'dtype', 'no tensor')}, on "
                    f"{getattr(value, 'device', 'no device')}. Give a floating-point tensor of shape {tuple(slot.spec.shape)}"
                )
        elif is_tensor and value.numel() != 1:
            raise ValueError(
                f"the state for '{fqn}' has '{name}' of shape {tuple(value.shape)}, for which there is no place. Give "
                f"{', '.join(map(repr, names)) or 'none'} per element, and scalars"
            )
