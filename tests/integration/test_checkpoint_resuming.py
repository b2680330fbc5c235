"""A training goes on bit for bit in a new process, by our checkpoints and by `torch.distributed.checkpoint`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import infinity
from infinity.deepspeed.utils import RepeatingLoader
from tests.exactness.lockstep import BF16, everything_on_nvme
from tests.ranks import require_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise = 0.1 * random.random() + 0.1 * np.random.rand()
        return (self.layers(x.to(self.layers[0].weight.dtype)).float() - y - noise).square().mean()


class Data(torch.utils.data.Dataset[Any]):
    """It augments with random numbers."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(index)) + 0.01 * torch.randn(4), torch.zeros(4)


def _engine(drive: Path, data: Any = None) -> Any:
    drive.mkdir(exist_ok=True)
    config = everything_on_nvme(
        drive,
        {
            **BF16,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
        },
    )
    config.pop("train_batch_size", None)
    return infinity.initialize(model=Model(), config=config, training_data=data or Data())[0]


def _by_loader(engine: Any) -> Iterator[float]:
    while True:
        for batch in engine.training_dataloader:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            yield float(loss.detach())


def _by_repeating(engine: Any) -> Iterator[float]:
    batches = RepeatingLoader(engine.training_dataloader)
    yield from _over(engine, batches)


def _over(engine: Any, batches: Any) -> Iterator[float]:
    while True:
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()
        yield float(loss.detach())


def _by_plain_loop(engine: Any) -> Iterator[float]:
    while True:
        for x, y in engine.training_dataloader:
            loss = engine.module(x, y)
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            yield float(loss.detach())


def _by_train_batch(engine: Any) -> Iterator[float]:
    while True:
        yield float(engine.train_batch())


_LOOPS = {"loader": _by_loader, "repeating": _by_repeating, "plain": _by_plain_loop, "train_batch": _by_train_batch}


def _weights(engine: Any) -> list[torch.Tensor]:
    return [engine._parts.consistent.gather_main_weight(p) for p in engine.module.parameters()]


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("num_steps", [3, 5, 8])
@pytest.mark.parametrize("loop", _LOOPS)
def test_the_next_batch_and_the_next_number_are_those_that_would_have_come(
    loop: str, num_steps: int, tmp_path: Path
) -> None:
    with _engine(tmp_path / "drive") as engine:
        losses = _LOOPS[loop](engine)
        for _ in range(num_steps):
            next(losses)
        engine.save_checkpoint(tmp_path / "saved")
        expected = [next(losses) for _ in range(6)]
        weights = _weights(engine)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    with _engine(tmp_path / "drive") as engine:
        losses = _LOOPS[loop](engine)
        if num_steps == 5:
            next(losses)  # whatever went before, and an iterator that is there already
        engine.load_checkpoint(tmp_path / "saved")
        assert [next(losses) for _ in range(6)] == expected
        assert all(torch.equal(a, b) for a, b in zip(_weights(engine), weights, strict=True))


def test_they_are_left_alone_where_that_is_wanted(tmp_path: Path) -> None:
    with _engine(tmp_path / "drive") as engine:
        losses = _by_loader(engine)
        for _ in range(3):
            next(losses)
        engine.save_checkpoint(tmp_path / "saved")
    for keywords in (
        {"load_random_states": False, "load_data_position": False},
        {"load_optimizer_states": False},
        {"load_module_only": True},
    ):
        with _engine(tmp_path / "drive") as engine:
            torch.manual_seed(1)
            expected = torch.get_rng_state()
            engine.load_checkpoint(tmp_path / "saved", **keywords)
            assert torch.equal(torch.get_rng_state(), expected)
            assert len(list(engine.training_dataloader)) == 5


_KINDS: dict[str, dict[str, Any]] = {
    "memory": {},
    "drives": {"zero_optimization": {"stage": 3}},
    "bf16": {"bf16": {"enabled": True}},
    "tiles": {"infinity": {"tile_above": 1}},
}


class _App:
    """The tutorial's."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def _made(kind: str, seed: int, volume: Path) -> Any:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}} | _KINDS[kind]
    if kind == "drives":
        nvme = {"device": "nvme", "nvme_path": str(volume)}
        config["zero_optimization"] = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return infinity.initialize(model=model, optimizer=optimizer, config=config)[0]


def _train_dcp(engine: Any, num_steps: int) -> None:
    dtype = next(engine.module.parameters()).dtype
    for i in range(num_steps):
        engine.backward(engine(torch.full((1, 8), i / 4 + 0.1, dtype=dtype)).square().mean())
        engine.step()


def _assert_same(engine: Any, other: Any) -> None:
    weights = other.module.state_dict()
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("kind", "num"),
    [(kind, num) for kind in _KINDS for num in (1, 2) if (kind, num) != ("tiles", 2)],  # tiles are for one process
)
def test_model_and_optimizer_go_on_with_the_same_bits(kind: str, num: int, tmp_path: Path) -> None:
    for rank in range(num):
        (tmp_path / f"volume{rank}").mkdir()

    def script(rank: int) -> None:
        first = _made(kind, 0, tmp_path / f"volume{rank}")
        _train_dcp(first, 3)
        dcp.save({"app": _App(first.module, first.optimizer)}, checkpoint_id=tmp_path / "saved")
        second = _made(kind, 1, tmp_path / f"volume{rank}")
        dcp.load({"app": _App(second.module, second.optimizer)}, checkpoint_id=tmp_path / "saved")
        _assert_same(first, second)
        for engine in (first, second):
            _train_dcp(engine, 2)
        _assert_same(first, second)

    require_ranks(num, script, tmp_path)
