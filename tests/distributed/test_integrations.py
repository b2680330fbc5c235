"""Trainer and accelerate on two ranks: the bits of the plain engine there, and what cannot be right is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn.functional import mse_loss
from transformers import TrainingArguments

import infinity
from infinity.errors import ConfigError
from infinity.integrations.accelerate import InfinityAccelerator
from infinity.integrations.transformers import InfinityTrainer
from tests.ranks import require_ranks


class _Model(nn.Module):
    """It remembers what it got."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.got: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.got.append((x, labels))
        return {"loss": mse_loss(self.layers(x), labels)}


def _data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, generator=generator), "labels": torch.randn(1, generator=generator)} for _ in range(24)
    ]


def _config(directory: Path, stage: int = 3, **changes: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(directory / "drive")}
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"offload_param": nvme, "offload_optimizer": nvme}
    return {"zero_optimization": zero, "gradient_clipping": 0.5, "infinity": {"progress_bars": False}} | changes


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)


def _require_equal_to_the_engine(
    directory: Path, got: list[tuple[torch.Tensor, torch.Tensor]], weights: dict[str, torch.Tensor], norm: float | None
) -> None:
    """The plain engine gets what the library's model got, two micro-batches a step; and the other rank got other data."""
    model = _Model()
    config = _config(directory, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    with infinity.initialize(model=model, optimizer=_optimizer(model), config=config)[0] as engine:
        for x, labels in got:
            engine.backward(engine(x, labels)["loss"])
            engine.step()
        assert norm == engine.get_global_grad_norm()
        found = engine.module.state_dict()
        assert found.keys() == weights.keys()
        for name, value in found.items():
            assert torch.equal(weights[name], value), name
    own = torch.cat([x for x, _ in got])
    of_ranks = [torch.empty_like(own) for _ in range(2)]
    infinity.deepspeed.comm.all_gather(of_ranks, own)
    rows = {tuple(row.tolist()) for of_rank in of_ranks for row in of_rank}
    assert len(rows) == 2 * len(own)


def _run(function: Callable[[int], Any], directory: Path) -> None:
    def alone(rank: int) -> None:
        os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        function(rank)

    require_ranks(2, alone, directory)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("stage", [0, 3])
def test_accelerate(stage: int, tmp_path: Path) -> None:
    def train(rank: int) -> None:
        accelerator = InfinityAccelerator(
            cpu=True, gradient_accumulation_steps=2, infinity_config=_config(tmp_path, stage)
        )
        own = _Model()
        loader = torch.utils.data.DataLoader(_data(), batch_size=2)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(own, _optimizer(own), loader)
        losses: list[torch.Tensor] = []

        def epoch() -> None:
            losses.clear()
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    losses.append(loss.detach())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()

        epoch()
        assert (accelerator.num_processes, len(losses)) == (2, 6)
        engine = accelerator.engine
        assert engine is not None
        _require_equal_to_the_engine(
            tmp_path, own.got[:6], dict(engine.module.state_dict()), engine.get_global_grad_norm()
        )
        accelerator.save_state(str(tmp_path / "state"))
        epoch()
        expected = list(losses)
        accelerator.load_state(str(tmp_path / "state"))
        epoch()
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        engine.close()

    _run(train, tmp_path)


def _arguments(directory: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(directory / "out"),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        save_steps=2,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
        learning_rate=0.01,
        weight_decay=0.0,
        optim="adamw_torch_fused",
        disable_tqdm=True,
        report_to=[],
    )


@pytest.mark.deep
def test_the_trainer(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        arguments = _arguments(tmp_path)
        weights: list[dict[str, torch.Tensor]] = []
        for resumes in (False, True):
            model = _Model()
            trainer = InfinityTrainer(
                model=model, args=arguments, train_dataset=_data(), infinity_config=_config(tmp_path)
            )
            trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2") if resumes else None)
            assert trainer.engine is not None
            assert len(model.got) == (2 if resumes else 6)
            weights.append({name: value.clone() for name, value in trainer.engine.module.state_dict().items()})
            norm = trainer.engine.get_global_grad_norm()
            trainer.engine.close()
            if not resumes:
                _require_equal_to_the_engine(tmp_path, model.got, weights[0], norm)
            infinity.deepspeed.comm.barrier()
        for name, value in weights[0].items():
            assert torch.equal(weights[1][name], value), name

    _run(train, tmp_path)


def test_processes_that_accelerate_does_not_see_are_refused(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        with pytest.raises(ConfigError, match="accelerate counts 1 process"):
            InfinityAccelerator(infinity_config=_config(tmp_path))

    if torch.cuda.is_available():
        pytest.skip("accelerate sees several processes where there are GPUs")
    _run(train, tmp_path)
