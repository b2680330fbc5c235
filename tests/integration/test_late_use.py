"""A recomputation that reads a unit's weights without a gradient, after all of the unit's gradients have come."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import LateUseError, PartialUpdateError


class Gated(nn.Module):
    """The checkpointed part is gated by the last block, which backward has finished with by then."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.looks_again = False
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def part(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = torch.tanh(self.blocks[0](x))
        return torch.tanh(self.blocks[1](x)) * gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.part, self.blocks[2](x), use_reentrant=self.use_reentrant)
        return self.blocks[0](x).pow(2).mean()


def _config(directory: Path, **own: Any) -> dict[str, Any]:
    tier = {"device": "nvme", "nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": tier, "offload_optimizer": tier},
        "infinity": {"host_memory_budget": "64MB", **own},
    }


def _batch(step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_late_use_is_learned_and_computes_with_the_weights_of_forward(use_reentrant: bool, tmp_path: Path) -> None:
    model = Gated(use_reentrant=use_reentrant)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.01, fused=True)
    engine, *_ = infinity.initialize(model=model, config=_config(tmp_path))
    with engine:
        for step in range(4):
            expected = reference(_batch(step))
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = engine(_batch(step))
            assert torch.equal(loss, expected), f"step {step}"
            engine.backward(loss)
            engine.step()


class Unsteady(Gated):
    """Uses the last block in the checkpointed part only when told to, which may be between forward and backward."""

    def part(self, x: torch.Tensor) -> torch.Tensor:
        if self.looks_again:
            with torch.no_grad():
                self.blocks[0](x)
        return torch.tanh(self.blocks[1](x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_unexpected_late_use_is_an_error_and_expected_from_then_on(use_reentrant: bool, tmp_path: Path) -> None:
    model = Unsteady(use_reentrant=use_reentrant)
    engine, *_ = infinity.initialize(model=model, config=_config(tmp_path))

    def backward(step: int) -> None:
        model.looks_again = False
        loss = engine(_batch(step))
        model.looks_again = step >= 2
        engine.backward(loss)

    with engine:
        for step in range(2):
            backward(step)
            engine.step()
        with pytest.raises(LateUseError, match=r"'blocks\.0'"):
            backward(2)
        with pytest.raises(PartialUpdateError, match="of 3 units"):
            engine.step()
        engine.reset()
        for step in range(3, 5):
            backward(step)
            engine.step()
        engine.flush()
