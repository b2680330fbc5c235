"""The config's ``flops_profiler`` in a training whose weights are paged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity.deepspeed

_WIDTH, _BATCH, _NUM_BLOCKS = 64, 4, 3
_FLOPS = 2 * _BATCH * _WIDTH * _WIDTH * _NUM_BLOCKS


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(_NUM_BLOCKS)])


def _config(nvme_dir: Path, **more: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(nvme_dir)}
    return {
        "train_micro_batch_size_per_gpu": _BATCH,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"host_memory_budget": "4MB", "keep_in_memory": False, "schedule": "vertical"},
    } | more


def _batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(_BATCH, _WIDTH, generator=generator)


def _losses(config: dict[str, Any], num_steps: int = 3) -> list[torch.Tensor]:
    with infinity.deepspeed.initialize(model=_model(), config=config)[0] as engine:
        found = []
        for _, x in zip(range(num_steps), _batches(), strict=False):
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.detach().clone())
        return found


def test_the_step_is_printed_and_changes_no_bit(nvme_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = _losses(_config(nvme_dir))
    assert "Profiler" not in capsys.readouterr().out
    block = {"enabled": True, "profile_step": 2, "module_depth": 1}
    assert all(map(torch.equal, plain, _losses(_config(nvme_dir, flops_profiler=block, wall_clock_breakdown=True))))
    out = capsys.readouterr().out
    assert out.count("Profile Summary at step 2:") == 1
    number = infinity.deepspeed.profiling.flops_profiler.number_to_string(_FLOPS)
    assert f"{'fwd flops per GPU:':<70}  {number}\n" in out
    assert f"{'batch size per GPU:':<70}  {_BATCH}\n" in out
    assert "bwd FLOPS per GPU = 2 * " in out
    assert "depth 1:" in out and "depth 2:" not in out
    assert f"in_features={_WIDTH}" in out


def test_train_batch_goes_in_order_for_it(nvme_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "profiles" / "step.txt"
    block = {"enabled": True, "profile_step": 1, "detailed": False, "output_file": str(file)}
    config = _config(nvme_dir, flops_profiler=block, gradient_accumulation_steps=2)
    with infinity.deepspeed.initialize(model=_model(), config=config)[0] as engine:
        assert engine.flops_profiler_enabled()
        schedules, batches = [], ((x,) for x in _batches())
        for _ in range(3):
            engine.train_batch(batches, loss_fn=lambda output, _: output.square().mean())
            schedules.append(engine.report.schedule)
            reason = engine.report.schedule_reason
            assert ("flops_profiler" in reason) == (len(schedules) == 2), reason
            assert file.exists() == (len(schedules) > 1)
    assert schedules == ["vertical", "ordinary", "vertical"]
    assert "(0): Linear" not in file.read_text()
    assert "Linear" in file.read_text()


def test_a_file_that_cannot_be_written_ends_no_training(
    nvme_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    block = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "file" / "step.txt")}
    assert len(_losses(_config(nvme_dir, flops_profiler=block))) == 3
    assert "flops_profiler.output_file" in caplog.text


def test_evaluation_is_not_profiled(nvme_dir: Path) -> None:
    config = _config(nvme_dir, flops_profiler={"enabled": True, "profile_step": 0})
    with infinity.deepspeed.initialize(model=_model(), config=config)[0] as engine:
        engine.eval()
        engine(next(_batches()))
        assert engine.flops_profiler.get_total_flops() == 0
        engine.train()
        with torch.no_grad():
            engine(next(_batches()))
        assert engine.flops_profiler.get_total_flops() == 0
        engine(next(_batches()))
        assert engine.flops_profiler.get_total_flops() == _FLOPS


def test_the_native_engine_says_who_counts(nvme_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = _config(nvme_dir, flops_profiler={"enabled": True, "profile_step": 0})
    with infinity.initialize(model=_model(), config=config)[0] as engine:
        assert not hasattr(engine, "flops_profiler")
    assert '"flops_profiler" counts nothing here: call infinity.deepspeed.initialize' in caplog.text
