"""1-bit Adam on two ranks: the published exchange, bit for bit, the bytes it sends, and what it comes to."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import infinity
from infinity.errors import AccessError, ConfigError
from tests.distributed.common import require_same, weights_of
from tests.internals import world
from tests.ranks import on_ranks, require_ranks

pytestmark = pytest.mark.deep

_FREEZE, _STEPS, _LR, _BETAS, _DECAY = 3, 8, 0.01, (0.9, 0.99), 0.1


def _model(width: int = 24) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3), nn.Linear(3, 1))


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 8, generator=generator)
    return x, (x[:, :4].sum(1, keepdim=True)).sin()


def _config(stage: int, directory: Path | None = None, **changes: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    memory: dict[str, Any] = {"progress_bars": False}
    if directory is not None:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(directory / "drive")}
        memory |= {"host_memory_budget": "64MiB", "staging_buffer_bytes": 49152, "keep_in_memory": False}
    params = {"lr": _LR, "betas": _BETAS, "weight_decay": _DECAY, "freeze_step": _FREEZE, "cuda_aware": False}
    optimizer = {"type": "OneBitAdam", "params": params | {"comm_backend_name": "gloo"}}
    base = {"optimizer": optimizer, "zero_optimization": zero, "gradient_clipping": 0.0, "infinity": memory}
    return base | {"train_micro_batch_size_per_gpu": 16} | changes


def _train(engine: Any, first: int, last: int, rank: int) -> list[float]:
    losses = []
    for step in range(first, last):
        x, y = _batch(step, rank)
        loss = mse_loss(engine(x), y)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


class _Published:
    """Algorithm 1 and section 4.2 of the paper for two workers, in plain torch. Per parameter; both workers in one process."""

    def __init__(self, clip: float) -> None:
        self.model = _model()
        self.parameters = list(self.model.parameters())
        self.adam = torch.optim.AdamW(self.parameters, lr=_LR, betas=_BETAS, weight_decay=_DECAY, fused=True)
        self.worker = [[torch.zeros(p.numel()) for p in self.parameters] for _ in range(2)]
        self.server = [[torch.zeros(size) for size in self._sizes(p)] for p in self.parameters]
        self.clip = clip

    def _sizes(self, parameter: torch.Tensor) -> list[int]:
        width = math.ceil(parameter.numel() / 16) * 8  # whole bytes
        return [min(width, parameter.numel()), max(parameter.numel() - width, 0)]

    @staticmethod
    def _compress(values: torch.Tensor) -> torch.Tensor:
        scale = torch.linalg.vector_norm(values) / math.sqrt(max(values.numel(), 1))
        return torch.where(values >= 0, scale, -scale)

    def step(self, step: int) -> None:
        gradients = []
        for rank in range(2):
            x, y = _batch(step, rank)
            of_rank = torch.autograd.grad(mse_loss(self.model(x), y), self.parameters)
            if self.clip and step >= _FREEZE:
                norm = torch.nn.utils.get_total_norm(of_rank)
                of_rank = tuple(each * torch.clamp(self.clip / (norm + 1e-6), max=1.0) for each in of_rank)
            gradients.append([each.flatten() for each in of_rank])
        if step < _FREEZE:
            for index, parameter in enumerate(self.parameters):
                parameter.grad = (gradients[0][index] / 2 + gradients[1][index] / 2).view_as(parameter)
            if self.clip:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
            self.adam.step()
            return
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                state = self.adam.state[parameter]
                sent = []
                for rank in range(2):
                    local = torch.lerp(state["exp_avg"].flatten(), gradients[rank][index], 1 - _BETAS[0])
                    corrected = self.worker[rank][index] + local
                    sent.append(self._compress(corrected))
                    self.worker[rank][index] = corrected - sent[-1]
                means = []
                for part, error in zip(
                    zip(*(s.split(self._sizes(parameter)) for s in sent), strict=True), [0, 1], strict=True
                ):
                    corrected = self.server[index][error] + (part[0] + part[1]) * 0.5
                    means.append(self._compress(corrected))
                    self.server[index][error] = corrected - means[-1]
                state["exp_avg"].copy_(torch.cat(means).view_as(parameter))
                state["step"] += 1
                variance = state["exp_avg_sq"] / (1 - _BETAS[1] ** _FREEZE)
                update = state["exp_avg"] / (variance.sqrt() + 1e-8)
                update = torch.where(state["exp_avg_sq"] == 0, 0.0, update)
                correction = 1 - _BETAS[0] ** float(state["step"])
                parameter.mul_(1 - _LR * _DECAY).add_(update, alpha=-_LR / correction)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_exchange_is_the_published_one(clip: float, tmp_path: Path) -> None:
    """With states in memory and on a drive, whole and clipped; each rank clips its own gradients."""
    expected = _Published(clip)
    for step in range(_STEPS):
        expected.step(step)
    weights = expected.model.state_dict()

    def train(rank: int) -> None:
        for directory in (None, tmp_path):
            with infinity.initialize(model=_model(), config=_config(0, directory, gradient_clipping=clip))[0] as engine:
                _train(engine, 0, _STEPS, rank)
                require_same(weights_of(engine), weights)

    require_ranks(2, train, tmp_path)


@on_ranks(2)
def test_bytes_fall_to_a_thirtieth(rank: int, tmp_path: Path) -> None:
    """From four bytes per element and direction to one bit, and a scale for each parameter."""
    with infinity.initialize(model=_model(1000), config=_config(0))[0] as engine:
        sent = world().sent_bytes
        numel = sum(p.numel() for p in engine.module.parameters())
        _train(engine, 0, _FREEZE, rank)
        before = sent["gradients"]
        assert 1 <= before / (_FREEZE * 4 * numel) < 1.02  # twice the half of them, and padding
        _train(engine, _FREEZE, _STEPS, rank)
        assert sent["gradients"] == before
        ratio = (before / _FREEZE) / (sent["momenta"] / (_STEPS - _FREEZE))
        assert 29 < ratio < 32, ratio


def test_stage_2_averages_whole_gradients_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the bits of one process that has the data of both."""
    caplog.set_level(logging.WARNING)
    config = _config(0, gradient_accumulation_steps=2)
    with infinity.initialize(model=_model(), config=config)[0] as alone:
        for step in range(_STEPS):
            for rank in range(2):
                x, y = _batch(step, rank)
                alone.backward(mse_loss(alone(x), y))
                alone.step()
        weights = weights_of(alone)
    assert not caplog.records

    def train(rank: int) -> None:
        offloaded = _config(2)
        offloaded["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        with infinity.initialize(model=_model(), config=offloaded)[0] as engine:
            _train(engine, 0, _STEPS, rank)
            require_same(weights_of(engine), weights)
        said = [record.getMessage() for record in caplog.records if "OneBitAdam" in record.getMessage()]
        assert len(said) == 1 and "momenta are not compressed" in said[0]
        assert not world().sent_bytes["momenta"]

    require_ranks(2, train, tmp_path)


@on_ranks(2)
def test_gradients_overflow_and_checkpoints(rank: int, tmp_path: Path) -> None:
    """Nobody sees a mean that is not there; a step that overflows on one rank is skipped by both; a load forgets errors."""
    config = _config(0, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "auto_cast": True})

    def overflowing(step: int) -> torch.Tensor:
        x, y = _batch(step, rank)
        loss = mse_loss(engine(x), y.half())
        return loss * (1e4 if rank else 1.0)

    with infinity.initialize(model=_model(), config=config)[0] as engine:
        _train(engine, 0, _FREEZE + 2, rank)
        before = weights_of(engine)
        engine.backward(overflowing(90))
        with pytest.raises(AccessError, match="warm-up is over"):
            _ = engine.module[0].weight.grad
        engine.step()
        assert not engine.was_step_applied()
        require_same(weights_of(engine), before)
        engine.save_checkpoint(tmp_path / "saved")
        _train(engine, _FREEZE + 2, _STEPS, rank)
        engine.load_checkpoint(tmp_path / "saved")
        expected = _train(engine, _FREEZE + 2, _STEPS, rank)
    with infinity.initialize(model=_model(), config=config)[0] as other:
        other.load_checkpoint(tmp_path / "saved")
        assert _train(other, _FREEZE + 2, _STEPS, rank) == expected


@on_ranks(2)
def test_a_durable_run_is_refused(rank: int, tmp_path: Path) -> None:
    config = _config(0, tmp_path)
    config["infinity"] |= {"durable": True}
    config["zero_optimization"]["offload_param"] = config["zero_optimization"]["offload_optimizer"]
    with pytest.raises(ConfigError, match="OneBitAdam's signs leave out"):
        infinity.initialize(model=_model(), config=config)
