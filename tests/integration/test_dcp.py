"""``torch.distributed.checkpoint`` as torch's tutorial has it: states are read into fresh state dicts, in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)

import infinity
from tests.ranks import require_ranks

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
            self._model,
            self._optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
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


def _train(engine: Any, num_steps: int) -> None:
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
        _train(first, 3)
        dcp.save({"app": _App(first.module, first.optimizer)}, checkpoint_id=tmp_path / "saved")
        second = _made(kind, 1, tmp_path / f"volume{rank}")
        dcp.load({"app": _App(second.module, second.optimizer)}, checkpoint_id=tmp_path / "saved")
        _assert_same(first, second)
        for engine in (first, second):
            _train(engine, 2)
        _assert_same(first, second)

    require_ranks(num, script, tmp_path)
