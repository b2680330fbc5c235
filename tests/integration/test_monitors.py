"""Curves of a run in TensorBoard, Weights & Biases and CSV, and operations counted, by DeepSpeed's keys."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import infinity
from infinity.deepspeed.monitor.monitor import MonitorMaster
from infinity.errors import ConfigError
from tests.exactness.lockstep import BF16, engine_on_nvme
from tests.ranks import run_ranks


def _train(directory: Path, changes: dict[str, Any], num_steps: int = 3) -> list[tuple[infinity.StepReport, float]]:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
    torch.manual_seed(0)
    engine = engine_on_nvme(
        directory,
        nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4)),
        {"train_micro_batch_size_per_gpu": 2, "scheduler": scheduler, **BF16, **changes},
    )
    found = []
    with engine:
        for _ in range(num_steps):
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(torch.ones(2, 8, dtype=engine.config.compute_dtype)).float().square().mean())
                engine.step()
            found.append((engine.report, engine.get_lr()[0]))
        assert engine.monitor.enabled or engine.global_rank
        engine.monitor.write_events([("Own/accuracy", 0.5, engine.global_samples)])
    return found


def _curves(steps: list[tuple[infinity.StepReport, float]], samples: int) -> dict[str, list[tuple[int, float]]]:
    """What DeepSpeed writes: a loss when its step does not count yet, the next step's rate when it does."""
    return {
        "Train/Samples/train_loss": [(samples * i, float(report.loss or 0)) for i, (report, _) in enumerate(steps)],
        "Train/Samples/lr": [(samples * (i + 1), lr) for i, (_, lr) in enumerate(steps)],
        "Own/accuracy": [(samples * len(steps), 0.5)],
    }


def _read_csv(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for path in directory.iterdir():
        with path.open(newline="") as file:
            head, *rows = csv.reader(file)
        name = path.stem.replace("Train_Samples_", "Train/Samples/").replace("Own_", "Own/")
        assert head == ["step", name.rpartition("/")[2]]
        found[name] = [(int(step), float(value)) for step, value in rows]
    return found


def test_csv(tmp_path: Path) -> None:
    block = {"enabled": True, "output_path": str(tmp_path / "curves"), "job_name": "job"}
    steps = _train(tmp_path, {"csv_monitor": block, "gradient_accumulation_steps": 2})
    assert _read_csv(tmp_path / "curves" / "job") == _curves(steps, samples=4)
    _train(tmp_path, {"csv_monitor": block}, num_steps=1)  # goes on in the same files, whose head stands there once
    assert len(_read_csv(tmp_path / "curves" / "job")["Train/Samples/lr"]) == 4


def test_csv_with_a_loss_scale_seconds_and_batches_of_unknown_size(tmp_path: Path) -> None:
    changes = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": False},
        "fp16": {"enabled": True, "loss_scale": 64},
        "wall_clock_breakdown": True,
    }
    steps = _train(tmp_path, changes)
    found = _read_csv(tmp_path / "job")
    assert found["Train/Samples/loss_scale"] == [(2, 64.0), (4, 64.0), (6, 64.0)], "samples are those that came"
    expected = [(2 * (i + 1), 1e3 * report.backward_seconds) for i, (report, _) in enumerate(steps)]
    assert found["Train/Samples/elapsed_time_ms_backward"] == expected
    assert {name.rpartition("_")[2] for name in found if "elapsed" in name} == {"forward", "backward", "step"}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = _train(tmp_path, {"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    events = EventAccumulator(str(tmp_path / "job")).Reload()
    expected = _curves(steps, samples=2)
    assert set(events.Tags()["scalars"]) == set(expected)
    for name, points in expected.items():
        found = events.Scalars(name)
        assert [event.step for event in found] == [step for step, _ in points]
        assert [event.value for event in found] == pytest.approx([value for _, value in points])


@pytest.mark.deep
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    steps = _train(tmp_path, {"wandb": {"enabled": True, "project": "p", "group": "g"}})
    assert wandb.run is None, "the run is over with the engine"
    (recorded,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = recorded.read_bytes()
    for name in _curves(steps, samples=2):
        assert name.encode() in content


def test_the_first_rank_writes(tmp_path: Path) -> None:
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    assert run_ranks(2, lambda index: _train(tmp_path, {"csv_monitor": block}) and None, tmp_path) == ["", ""]
    assert [samples for samples, _ in _read_csv(tmp_path / "job")["Train/Samples/lr"]] == [4, 8, 12]


@pytest.mark.parametrize("key", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_named(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(name: str, *args: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", no_package)
    with pytest.raises(ConfigError, match=rf"'{key}\.enabled'.*pip install {key}"):
        _train(tmp_path, {key: {"enabled": True}})


def test_a_directory_that_cannot_be_made_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"'csv_monitor\.enabled'.*cannot be written"):
        _train(tmp_path, {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "file")}})


def test_what_cannot_be_written_ends_no_training_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    block = {"enabled": True, "output_path": str(tmp_path)}
    monitors = MonitorMaster(infinity.load_config({"train_batch_size": 1, "csv_monitor": block}).monitors)
    (tmp_path / "DeepSpeedJobName").rmdir()
    for step in range(3):
        monitors.write_events([("a", 1.0, step)])
    assert caplog.text.count("csv_monitor gets no more values") == 1 and not monitors.enabled


def test_comet_gets_nothing_and_that_is_told() -> None:
    batch = {"train_micro_batch_size_per_gpu": 1}
    (notice,) = infinity.load_config(batch | {"comet": {"enabled": True, "project": "x"}}).notices
    assert notice.startswith("comet: no effect: nothing is sent to Comet; use tensorboard, wandb")
    assert not infinity.load_config(batch | {"comet": {"enabled": False, "project": "x"}}).notices


def test_operations_are_counted_by_torch_as_the_notice_says(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    with engine_on_nvme(
        tmp_path,
        model,
        {"train_micro_batch_size_per_gpu": 4, "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": True}},
    ) as engine:
        assert any("FlopCounterMode around engine(...)" in notice for notice in engine.config.notices)
        with FlopCounterMode(display=False) as counted:
            engine(torch.ones(4, 64, dtype=engine.config.compute_dtype))
    assert counted.get_total_flops() == 3 * 2 * 4 * 64 * 64
