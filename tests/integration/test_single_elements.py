"""One element that is a part of more: torch calls it contiguous with any stride, and cannot show such a one as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity


class Scaled(nn.Module):
    """A layer of one output, and what it is multiplied by: a weight, a frozen weight and a buffer of one element each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)
        self.factor = nn.Parameter(torch.ones(()).expand(1))
        self.frozen = nn.Parameter(torch.full((5,), 0.5)[::5], requires_grad=False)
        self.register_buffer("offset", torch.full((5,), 2.0)[::5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * self.factor * self.frozen + self.offset
        return found


def _train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for number, batch in enumerate(torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))):
        loss = model(batch).square().mean()
        loss.backward(create_graph=number == 0)
        if number:
            parameter: Any = model.factor
            parameter.grad = torch.ones(5)[::5] if number == 1 else torch.full((), 0.25).expand(1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_single_elements_of_any_stride(tmp_path: Path) -> None:
    """As weights, gradients, buffers, and in every kind of file."""
    plain, model = Scaled(), Scaled()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = _train(plain, torch.optim.SGD([plain.layer.weight, plain.layer.bias, plain.factor], lr=1e-2))
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
    }
    given = torch.optim.SGD(trainable, lr=1e-2)
    with infinity.initialize(model=model, optimizer=given, config=config)[0] as engine:
        assert _train(model, engine.optimizer) == expected
        kept = {"text": torch.full((), 3.0).expand(1)}
        engine.save_checkpoint(str(tmp_path / "whole"), client_state=kept)
        assert engine.load_checkpoint(str(tmp_path / "whole"))[1]["text"].tolist() == [3.0]
        engine.save_checkpoint(str(tmp_path / "part"), exclude_frozen_parameters=True)
        engine.load_checkpoint(str(tmp_path / "part"))
        engine.save_16bit_model(str(tmp_path / "files"))
        wanted = plain.state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
