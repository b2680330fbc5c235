"""All that an engine keeps of one parameter."""

from __future__ import annotations

from typing import Any

import torch

from infinity import Engine


def state_of(engine: Engine, parameter: torch.Tensor) -> dict[str, Any]:
    """Copies of the main weight ("weight": fp32, on the CPU) and the optimizer's state, in the parameter's shape."""
    keeper = engine._settled
    return {**keeper.gather_state(parameter), "weight": keeper.gather_main_weight(parameter)}
