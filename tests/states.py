"""All that an engine keeps of one parameter, and of a whole training."""

from __future__ import annotations

import random
from typing import Any

import torch

from infinity import Engine


def state_of(engine: Engine, parameter: torch.Tensor) -> dict[str, Any]:
    """Copies of the main weight ("weight": fp32, on the CPU) and the optimizer's state, in the parameter's shape."""
    keeper = engine._parts.consistent
    return {**keeper.gather_state(parameter), "weight": keeper.gather_main_weight(parameter)}


def weights_and_states(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of the module's state dict and of each trained parameter's state."""
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for fqn, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found |= {f"{fqn} {name}": torch.as_tensor(value) for name, value in state_of(engine, parameter).items()}
    return found


def everything(engine: Engine) -> dict[str, torch.Tensor]:
    """Weights and states, rates, counts and random generators."""
    counts = [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples, engine.loss_scale()]
    return {
        **weights_and_states(engine),
        "lr": torch.tensor(engine.get_lr()),
        "counts": torch.tensor(counts),
        "generators": torch.cat([torch.get_rng_state().long(), torch.tensor(random.getstate()[1])]),
    }


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, under the same names."""
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
