"""The random generators of the process: python's, NumPy's, torch's, and those of the GPUs in use."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Copies of their states."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Let them go on from these; of the GPUs, as many as there are."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        for index, state in enumerate(states.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)


__all__ = ["random_states", "set_random_states"]
