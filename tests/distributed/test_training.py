"""Several processes train together, and get what DDP, or one process with all micro-batches, would get."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers and DDP import at their first use: once here, not in each process
from torch import nn
from torch.nn.functional import mse_loss

import infinity
from infinity.deepspeed import comm
from tests.distributed.common import require_same, states_of, weights_of
from tests.ranks import on_ranks, require_ranks

_LITTLE = "410KiB"
"""Hardly more than is accepted: gradients are spilled as well."""
_PLACES: dict[str, dict[str, Any]] = {
    "nvme": {"infinity": {"host_memory_budget": _LITTLE}, "gradient_clipping": 0.05},
    "memory": {"zero_optimization": {"stage": 2}, "infinity": {"update": "step"}},
}


class _Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 4)
        self.rarely = nn.Linear(64, 4, bias=False)
        self.register_buffer("offset", torch.randn(64))

    def forward(self, x: torch.Tensor, *, is_rare: bool = False) -> torch.Tensor:
        x = x + self.offset.to(x.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.rarely(x) if is_rare else self.head(x)


def _config(directory: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "steps_per_print": 1,
    } | (changes or {})


def _batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(4, 64, generator=generator), torch.randn(4, 4, generator=generator)


def _engine(rank: int, config: dict[str, Any], **kwargs: Any) -> Any:
    return infinity.initialize(model=_Model(rank), config=config, **kwargs)[0]  # of other weights on each rank


def _ddp(**kwargs: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = nn.parallel.DistributedDataParallel(_Model(0), **kwargs)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("place", _PLACES)
@on_ranks(2)
def test_equal_to_ddp(rank: int, place: str, tmp_path: Path) -> None:
    with _engine(rank, _config(tmp_path, _PLACES[place])) as engine:
        reference, optimizer = _ddp(find_unused_parameters=True)
        for step in range(3):
            for part in range(2):
                x, y = _batch(rank, 2 * step + part)
                is_rare = part == 1 and step == rank  # on one rank only
                loss = mse_loss(engine(x, is_rare=is_rare), y)
                engine.backward(loss)
                with reference.no_sync() if part == 0 else contextlib.nullcontext():
                    expected = mse_loss(reference(x, is_rare=is_rare), y)
                    (expected / 2).backward()
                assert torch.equal(loss, expected)
                engine.step()
            norm = nn.utils.clip_grad_norm_(reference.parameters(), engine.config.gradient_clipping or 1e9)
            assert engine.get_global_grad_norm() == float(norm)
            optimizer.step()
            optimizer.zero_grad()
        require_same(weights_of(engine), reference.module.state_dict())


@pytest.mark.deep
@on_ranks(2)
def test_the_plain_loop_is_equal_to_ddp(rank: int, tmp_path: Path) -> None:
    config = _config(tmp_path, {"gradient_accumulation_steps": 1})
    with _engine(rank, config) as engine:
        reference, expected = _ddp(find_unused_parameters=True)
        for step in range(3):
            for part in range(3):  # the first one is this rank's own until the next
                x, y = _batch(rank, 3 * step + part)
                with engine.no_sync() if part == 0 else contextlib.nullcontext():
                    mse_loss(engine(x), y).backward()
                with reference.no_sync() if part == 0 else contextlib.nullcontext():
                    mse_loss(reference(x), y).backward()
                if rank == 0:  # whoever looks, looks alone
                    for mine, others in zip(engine.module.parameters(), reference.parameters(), strict=True):
                        assert (mine.grad is None) == (others.grad is None)
                        assert mine.grad is None or torch.equal(mine.grad, others.grad)
            assert torch.equal(
                nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1),
                nn.utils.clip_grad_norm_(reference.parameters(), 0.1),
            )
            for optimizer in (engine.optimizer, expected):
                optimizer.step()
                optimizer.zero_grad()
        require_same(weights_of(engine), reference.module.state_dict())


@pytest.mark.deep
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_four_ranks_are_equal_to_four_micro_batches_of_one(precision: str, tmp_path: Path) -> None:
    changes = {} if precision == "fp32" else {precision: {"enabled": True}}
    config = _config(tmp_path, {"gradient_clipping": 0.5, **changes})
    alone = _engine(0, config | {"gradient_accumulation_steps": 4})
    for step in range(3):
        for rank in range(4):
            x, y = _batch(rank, step)
            alone.backward(mse_loss(alone(x.to(alone.config.compute_dtype)).float(), y))
            alone.step()
    expected, weights, norm = states_of(alone), alone.module.state_dict(), alone.get_global_grad_norm()
    alone.close()

    def train(rank: int) -> None:
        with _engine(rank, config | {"gradient_accumulation_steps": 1}) as engine:
            for step in range(3):
                x, y = _batch(rank, step)
                engine.backward(mse_loss(engine(x.to(engine.config.compute_dtype)).float(), y))
                engine.step()
            assert engine.get_global_grad_norm() == norm
            found = states_of(engine)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), name
            for name, value in engine.module.state_dict().items():
                assert torch.equal(value, weights[name]), name

    require_ranks(4, train, tmp_path)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_all_skip_a_step_that_overflows_on_one(rank: int, stage: int, tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    with _engine(
        rank,
        _config(tmp_path, {"gradient_accumulation_steps": 1, "fp16": fp16, "zero_optimization": {"stage": stage}}),
    ) as engine:
        before = engine.module.state_dict()
        x, y = _batch(rank, 0)
        engine.backward(mse_loss(engine(x.half()).float(), y) * (1e30 if rank == 1 else 1))
        if rank == 0 and stage == 0:  # a look takes the loss scale out
            assert engine.module.head.weight.grad is not None
        engine.step()
        assert not engine.was_step_applied()
        assert engine.loss_scale() == 8
        for name, value in engine.module.state_dict().items():
            assert torch.equal(value, before[name])
        engine.backward(mse_loss(engine(x.half()).float(), y))
        if rank == 0 and stage == 0:
            assert engine.module.head.weight.grad is not None
        engine.step()
        assert engine.was_step_applied()


@on_ranks(2)
def test_sizes_samples_and_names(rank: int, tmp_path: Path) -> None:
    data = [(x, y) for number in range(3) for x, y in zip(*_batch(0, number), strict=True)]
    engine, _, loader, _ = infinity.deepspeed.initialize(model=_Model(0), config=_config(tmp_path), training_data=data)
    assert (engine.global_rank, engine.local_rank, engine.world_size) == (rank, rank, 2)
    assert (engine.train_batch_size(), comm.get_rank(), comm.get_world_size()) == (16, rank, 2)
    own = torch.cat([x for x, _ in loader])
    seen = [torch.empty_like(own) for _ in range(2)]
    comm.all_gather(seen, own)
    assert {tuple(x.tolist()) for x in torch.cat(seen)} == {tuple(x.tolist()) for x, _ in data}
    engine.set_train_batch_size(8)
    assert engine.gradient_accumulation_steps() == 1
    engine.close()
