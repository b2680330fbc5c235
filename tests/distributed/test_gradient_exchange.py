"""What two ranks send of their gradients: rounded by the config, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import infinity
from tests.distributed.common import weights_of
from tests.internals import world
from tests.ranks import require_ranks

_STEPS = 4


class _Experts(nn.Module):
    """Of which rank 0 uses one, and rank 1 both; a third is used by nobody."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inside = nn.Linear(8, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.outside = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, num_used: int) -> torch.Tensor:
        x = self.inside(x.to(self.inside.weight.dtype)).tanh()
        for expert in self.experts[:num_used]:
            x = x + expert(x)
        return self.outside(x)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return _Experts()


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x[:, :4].sum(1, keepdim=True).sin()


def _config(directory: Path, offload: str = "none", stage: int = 0, **changes: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    memory: dict[str, Any] = {"progress_bars": False}
    if offload == "nvme":
        directory.mkdir(parents=True, exist_ok=True)
        drive = {"device": "nvme", "nvme_path": str(directory / "drive")}
        zero |= {"offload_optimizer": drive} | ({"offload_param": drive} if stage == 3 else {})
        memory |= {"host_memory_budget": "64MiB", "keep_in_memory": False}
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    base = {"optimizer": adam, "zero_optimization": zero, "infinity": memory}
    return base | {"train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0} | changes


def _trained(config: dict[str, Any], rank: int) -> dict[str, Any]:
    with infinity.initialize(model=_model(), config=config)[0] as engine:
        sent = world().sent_bytes["gradients"]
        for step in range(_STEPS):
            for _ in range(engine.gradient_accumulation_steps()):
                x, y = _batch(step, rank)
                engine.backward(mse_loss(engine(x, rank + 1).float(), y))
                engine.step()
        sent = world().sent_bytes["gradients"] - sent
        found: dict[str, Any] = weights_of(engine)
    return found | {"sent": sent}


def _assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert name == "sent" or torch.equal(found[name], value), name


def _plain(mean: Callable[[list[torch.Tensor]], torch.Tensor]) -> dict[str, Any]:
    """Both ranks in one process, in plain torch."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01, fused=True)
    for step in range(_STEPS):
        of_ranks = []
        for rank in range(2):
            x, y = _batch(step, rank)
            found = torch.autograd.grad(mse_loss(model(x, rank + 1), y), [*model.parameters()], allow_unused=True)
            of_ranks.append(found)
        for parameter, *grads in zip(model.parameters(), *of_ranks, strict=True):
            if any(each is not None for each in grads):
                parameter.grad = mean([torch.zeros_like(parameter) if each is None else each for each in grads])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "nvme"), (2, "none"), (3, "nvme")])
def test_communication_data_type_halves_the_bytes(stage: int, offload: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def rounded(grads: list[torch.Tensor]) -> torch.Tensor:
        halves = [(each * 0.5).to(dtype).float() for each in grads]
        return (halves[0] + halves[1]).to(dtype).float()

    expected = _plain(rounded)

    def train(rank: int) -> None:
        config = _config(tmp_path / str(rank), offload, stage)
        exact = _trained(copy.deepcopy(config), rank)
        name = {torch.bfloat16: "BF16", torch.float16: "torch.float16"}[dtype]
        found = _trained(config | {"communication_data_type": name}, rank)
        _assert_equal(found, expected)
        assert any(not torch.equal(exact[name], value) for name, value in expected.items())
        assert found["sent"] * 2 == exact["sent"] > 0

    require_ranks(2, train, tmp_path)


def test_a_communication_hook_is_refused_with_what_there_is_instead(tmp_path: Path) -> None:
    for initialize in (infinity.initialize, infinity.deepspeed.initialize):
        engine = initialize(model=_model(), config=_config(tmp_path))[0]
        with engine, pytest.raises(AttributeError, match='"communication_data_type": "bf16" halves the bytes'):
            engine.register_comm_hook(None, None)
