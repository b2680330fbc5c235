"""What the config says about drives arrives at the swapper, and what cannot work is an error with its cure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import swapper.swapper as swapper_module
from infinity.errors import StorageError
from swapper import BackendUnavailableError, SwapperConfig, Volume
from swapper.backend import IOBackend
from swapper.measure.choice import open_backend


def _raw(path: object, aio: dict[str, Any] | None = None, **ours: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "offload_param": {"device": "nvme", "nvme_path": path},
            "offload_optimizer": {"device": "nvme", "nvme_path": path},
        },
        "aio": aio or {},
        "infinity": {"host_memory_budget": "256MiB", **ours},
    }


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Volume, SwapperConfig]]:
    """What backends were made from."""
    found: list[tuple[Volume, SwapperConfig]] = []

    def open_and_remember(volume: Volume, config: SwapperConfig) -> IOBackend:
        found.append((volume, config))
        return open_backend(volume, config)

    monkeypatch.setattr(swapper_module, "open_backend", open_and_remember)
    return found


def test_settings_arrive_at_the_swapper(tmp_path: Path, opened: list[tuple[Volume, SwapperConfig]]) -> None:
    raw = _raw(
        [{"path": str(tmp_path), "capacity": "64MiB"}],
        {"block_size": "2MiB", "queue_depth": 3, "intra_op_parallelism": 5},
        io_backend="threads",
        io_deadline_seconds=9,
    )
    engine, *_ = infinity.initialize(model=_model(), config=raw, device="cpu")
    try:
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
        ((volume, config),) = opened
        assert config == engine.config.io
        assert (config.request_bytes, config.num_threads, config.max_inflight) == (2 << 20, 5, 15)
        assert (config.backend, config.deadline_seconds) == ("threads", 9.0)
        assert volume.capacity_bytes <= 64 << 20
    finally:
        engine.close()


def test_one_swapper_for_blocks_with_the_same_directories(
    tmp_path: Path, opened: list[tuple[Volume, SwapperConfig]]
) -> None:
    raw = _raw(str(tmp_path))
    raw["zero_optimization"]["offload_param"]["nvme_path"] = [{"path": str(tmp_path)}]
    infinity.initialize(model=_model(), config=raw, device="cpu")[0].close()
    assert len(opened) == 1


def test_in_memory_too_the_switch_interval_is_short_until_the_engine_is_closed(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        raw = _raw(str(tmp_path))
        del raw["zero_optimization"]
        engine, *_ = infinity.initialize(model=_model(), config=raw, device="cpu")
        assert sys.getswitchinterval() < 0.001
        engine.close()
        assert sys.getswitchinterval() == 0.005
    finally:
        sys.setswitchinterval(before)


def test_a_backend_that_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(volume: Volume, config: SwapperConfig) -> IOBackend:
        raise BackendUnavailableError(config.backend, "the kernel forbids it", "set kernel.io_uring_disabled to 0")

    monkeypatch.setattr(swapper_module, "open_backend", refuse)
    with pytest.raises(StorageError) as caught:
        infinity.initialize(model=_model(), config=_raw(str(tmp_path), io_backend="uring"), device="cpu")
    message = str(caught.value)
    for words in (
        str(tmp_path),
        "'infinity.io_backend'",
        "cannot be used with the backend 'uring': the kernel forbids it",
        "To use it, set kernel.io_uring_disabled to 0",
        'set infinity.io_backend to "auto"',
    ):
        assert words in message
    assert caught.value.key == "infinity.io_backend"
    assert isinstance(caught.value.__cause__, BackendUnavailableError)
    assert os.listdir(tmp_path) == []
