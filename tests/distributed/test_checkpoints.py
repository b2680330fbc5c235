"""Checkpoints of several processes: any number of them loads what any number wrote, bit for bit; errors are everybody's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process
from torch import nn
from torch.nn.functional import mse_loss

import infinity
from infinity.errors import CheckpointError, ModelError, RankError, StorageError
from tests.distributed.common import require_same, states_of, weights_of
from tests.internals import agreement, checkpoint_loading, saved, training_checkpoint, world
from tests.ranks import require_ranks
from tests.waiting import wait_until

_NUMS = (1, 2, 3, 4)
_DATA = [(torch.full((4,), float(i)), torch.zeros(2)) for i in range(24)]


class _Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 2))
        self.register_buffer("offset", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + self.offset)


def _engine(directory: Path, rank: int, *, width: int = 8, batch: int = 1, **changes: Any) -> Any:
    """Each rank begins with a seed of its own."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    nvme = {"device": "nvme", "nvme_path": str(directory / "drive")}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
    }
    return infinity.initialize(model=_Model(width), config=config | changes, training_data=_DATA)[0]


def _steps(engine: Any, batches: Any, num: int) -> list[float]:
    losses = []
    for _ in range(num):
        x, y = next(batches)
        loss = mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _contents(engine: Any) -> dict[str, Any]:
    """All that is the same on all ranks."""
    found = weights_of(engine) | states_of(engine)
    found |= {
        f"{i} main": engine._parts.consistent.gather_main_weight(p) for i, p in enumerate(engine.module.parameters())
    }
    return found | {"lr": torch.tensor(engine.get_lr()), "steps": torch.tensor(engine.global_steps)}


def _run(num: int, function: Callable[[int], Any], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if num == 1:
        function(0)
    else:
        require_ranks(num, function, directory)


@pytest.mark.deep
def test_what_any_number_wrote_any_number_loads(tmp_path: Path) -> None:
    for num in _NUMS:

        def write(rank: int, num: int = num) -> None:
            with _engine(tmp_path, rank) as engine:
                _steps(engine, iter(engine.training_dataloader), 3)
                assert engine.save_checkpoint(tmp_path / "saved", tag=f"of {num}", client_state={"from": rank}) is True
                torch.save(_contents(engine), tmp_path / f"contents {num} {rank}")

        _run(num, write, tmp_path / f"write {num}")
        assert (tmp_path / "saved" / "latest").read_text() == f"of {num}"
        first = torch.load(tmp_path / f"contents {num} 0")
        for rank in range(1, num):
            require_same(torch.load(tmp_path / f"contents {num} {rank}"), first)
    for num in _NUMS:

        def read(rank: int) -> None:
            with _engine(tmp_path, rank + 7) as engine:
                for other in _NUMS:
                    folder, client_state = engine.load_checkpoint(tmp_path / "saved", tag=f"of {other}")
                    assert (folder, client_state) == (str(tmp_path / "saved" / f"of {other}"), {"from": 0})
                    require_same(_contents(engine), torch.load(tmp_path / f"contents {other} 0"))
                assert engine.load_checkpoint(tmp_path / "saved", tag="none", missing_ok=True) == (None, None)
                with pytest.raises(CheckpointError, match="there is no checkpoint 'none' in it"):
                    engine.load_checkpoint(tmp_path / "saved", tag="none")

        _run(num, read, tmp_path / f"read {num}")


@pytest.mark.deep
@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_goes_on_with_its_own_numbers_and_samples(stage: int, tmp_path: Path) -> None:
    def write(rank: int) -> None:
        with _engine(tmp_path, rank, zero_optimization={"stage": stage}) as engine:
            batches = iter(engine.training_dataloader)
            _steps(engine, batches, 3)
            random.random()
            engine.save_checkpoint(tmp_path / "saved", blocking=False)
            expected = [*_steps(engine, batches, 4), random.random(), np.random.rand(), float(torch.rand(()))]
            engine.wait_for_checkpoint()
            torch.save(expected, tmp_path / f"expected {rank}")

    def read(rank: int) -> None:
        with _engine(tmp_path, rank + 7) as engine:
            engine.load_checkpoint(tmp_path / "saved")
            found = [*_steps(engine, iter(engine.training_dataloader), 4), random.random(), np.random.rand()]
            assert [*found, float(torch.rand(()))] == torch.load(tmp_path / f"expected {rank}", weights_only=False)

    _run(2, write, tmp_path / "write")
    _run(2, read, tmp_path / "read")
    expected = [torch.load(tmp_path / f"expected {rank}", weights_only=False)[4:] for rank in range(2)]
    assert expected[0] != expected[1]


@pytest.mark.deep
def test_ranks_that_were_not_there_go_on_as_they_were_seeded(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        with _engine(tmp_path, rank) as engine:
            engine.save_checkpoint(tmp_path / "saved")

    def read(rank: int) -> None:
        with _engine(tmp_path, rank + 7) as engine:
            before = torch.get_rng_state()
            engine.load_checkpoint(tmp_path / "saved")
            assert torch.equal(torch.get_rng_state(), before) == (rank >= 2)

    _run(2, write, tmp_path / "write")
    _run(4, read, tmp_path / "read")


@pytest.mark.deep
def test_another_number_of_ranks_goes_on_with_the_next_samples(tmp_path: Path) -> None:
    """Of one epoch, each sample comes once, whoever takes it; with a batch size of 3 in place of 1, too."""

    def take(rank: int, num_batches: int | None, name: str, *, loads: bool, batch: int = 1) -> None:
        with _engine(tmp_path, rank, batch=batch) as engine:
            if loads:
                engine.load_checkpoint(tmp_path / "saved")
            taken: list[float] = []
            for x, _ in engine.training_dataloader:
                taken += x[:, 0].tolist()
                if len(taken) == num_batches:
                    break
            (tmp_path / f"taken {name} {rank}").write_text(json.dumps(taken))
            if num_batches is not None:
                engine.save_checkpoint(tmp_path / "saved")

    _run(2, lambda rank: take(rank, 3, "a", loads=False), tmp_path / "a")  # 6 of 24
    _run(3, lambda rank: take(rank, 2, "b", loads=True), tmp_path / "b")  # 12 of 24
    _run(
        4, lambda rank: take(rank, None, "c", loads=True, batch=2), tmp_path / "c"
    )  # 3 each: a smaller batch in the end
    taken = [number for path in tmp_path.glob("taken *") for number in json.loads(path.read_text())]
    assert sorted(taken) == [float(i) for i in range(24)]


def test_a_number_of_samples_that_cannot_be_divided_comes_twice_in_part(tmp_path: Path) -> None:
    def take(rank: int, num_batches: int, name: str) -> None:
        with _engine(tmp_path, rank) as engine:
            engine.load_checkpoint(tmp_path / "saved", missing_ok=True)
            taken = [float(x[0, 0]) for _, (x, _) in zip(range(num_batches), engine.training_dataloader, strict=False)]
            (tmp_path / f"taken {name} {rank}").write_text(json.dumps(taken))
            engine.save_checkpoint(tmp_path / "saved")

    _run(1, lambda rank: take(rank, 4, "a"), tmp_path / "a")
    _run(3, lambda rank: take(rank, 100, "b"), tmp_path / "b")  # each has 8, and leaves out 4 // 3
    taken = [number for path in tmp_path.glob("taken *") for number in json.loads(path.read_text())]
    assert len(taken) == 4 + 3 * 7
    assert set(taken) == {float(i) for i in range(24)}


def test_what_rank_0_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def train(rank: int) -> None:
        with _engine(tmp_path, rank) as engine:
            for blocking in (True, False):
                with pytest.raises(StorageError, match="Not a directory") as error:
                    engine.save_checkpoint(tmp_path / "file" / "saved", blocking=blocking)
                assert bool(getattr(error.value, "__notes__", [])) == (rank == 1)
            with pytest.raises(CheckpointError, match="client_state"):
                engine.save_checkpoint(tmp_path / "saved", client_state={"lock": lambda: None})
            _steps(engine, iter(engine.training_dataloader), 1)  # nothing was lost
            engine.save_checkpoint(tmp_path / "saved")

    _run(2, train, tmp_path / "ranks")
    assert [path.name for path in sorted((tmp_path / "saved").iterdir())] == ["global_step1", "latest"]


def test_a_save_in_the_background_that_fails_is_an_error_on_all_that_wait(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        with _engine(tmp_path, rank, zero_optimization={"stage": 0}) as engine:  # others save at once
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(saved, "exchange", _full)
                engine.save_checkpoint(tmp_path / "saved", blocking=False)
                _steps(engine, iter(engine.training_dataloader), 2)
                for again in (False, True):
                    with pytest.raises(StorageError, match="No space left"):
                        engine.save_checkpoint(tmp_path / "saved", blocking=False) if again else None
                        engine.wait_for_checkpoint()
            engine.save_checkpoint(tmp_path / "saved")

    _run(2, train, tmp_path / "ranks")


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.deep
def test_what_one_rank_cannot_read_changes_nothing_or_is_noted_on_all(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        with _engine(tmp_path, rank) as engine:
            batches = iter(engine.training_dataloader)
            engine.save_checkpoint(tmp_path / "saved", tag="whole")
            _steps(engine, batches, 1)
            before = _contents(engine)
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    patch.setattr(checkpoint_loading.Loading, "check_model", _raise)
                with pytest.raises(ModelError, match="of another model"):
                    engine.load_checkpoint(tmp_path / "saved")
            require_same(_contents(engine), before)
            for name in ("optimizer", "parameters"):
                with pytest.MonkeyPatch.context() as patch:
                    if rank == 1:
                        patch.setattr(checkpoint_loading.Loading, name, _raise)
                    with pytest.raises(ModelError, match="of another model"):
                        engine.load_checkpoint(tmp_path / "saved")
                with pytest.raises(CheckpointError, match="weights are a mixture of two trainings"):
                    _steps(engine, batches, 1)
            engine.load_checkpoint(tmp_path / "saved")
            _steps(engine, batches, 1)
            with pytest.raises(CheckpointError, match="do not find the same checkpoint"):
                engine.load_checkpoint(tmp_path / ("saved" if rank else "elsewhere"))

    _run(2, train, tmp_path / "ranks")


def _raise(*_: Any, **__: Any) -> None:
    raise ModelError("it is of another model", cure="Take another one")


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("does", ["ends", "steps", "saves another"])
def test_a_rank_that_does_not_save_is_missed(does: str, tmp_path: Path) -> None:
    def train(rank: int) -> None:
        engine = _engine(tmp_path, rank)
        batches = iter(engine.training_dataloader)
        _steps(engine, batches, 1)
        if rank == 1 and does == "ends":
            return
        with pytest.raises(RankError, match="another rank has ended" if does == "ends" else r"rank \d came with '"):
            if rank == 1 and does == "steps":
                _steps(engine, batches, 1)
            else:
                engine.save_checkpoint(tmp_path / "saved", tag=f"by {rank if does == 'saves another' else 0}")

    _run(2, train, tmp_path / "ranks")
    assert not (tmp_path / "saved").exists()


@pytest.mark.deep
def test_the_others_wait_for_as_long_as_rank_0_writes_what_it_has_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where states are divided, they wait for its turns meanwhile: frozen weights may take longer than a group's timeout."""
    monkeypatch.setattr(agreement, "PULSE_SECONDS", 0.001)
    write = training_checkpoint._write_whole

    def train(rank: int) -> None:
        with _engine(tmp_path, rank) as engine:
            _steps(engine, iter(engine.training_dataloader), 1)
            expected = _contents(engine)
            ranks, meetings = world(), []
            all_gather_ints = ranks.all_gather_ints

            def slow(*args: Any) -> int:
                before = len(meetings)
                wait_until(lambda: len(meetings) > before + 20)
                return write(*args)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    ranks, "all_gather_ints", lambda *args: (all_gather_ints(*args), meetings.append(args))[0]
                )
                patch.setattr(training_checkpoint, "_write_whole", slow)
                engine.save_checkpoint(tmp_path / "saved")
            _steps(engine, iter(engine.training_dataloader), 1)
            engine.load_checkpoint(tmp_path / "saved")
            require_same(_contents(engine), expected)

    _run(3, train, tmp_path / "ranks")


@pytest.mark.parametrize("mode", ["WARN", "ignore", "fail"])
def test_tags_that_differ_are_what_deepspeeds_key_says(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(rank: int) -> None:
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "checkpoint": {"tag_validation": mode}}
        with infinity.deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0] as engine:
            if mode == "fail":
                with pytest.raises(RankError, match=f"tag 'of{rank}'"):
                    engine.save_checkpoint(tmp_path, tag=f"of{rank}")
                return
            with caplog.at_level("WARNING"):
                assert engine.save_checkpoint(tmp_path, tag=f"of{rank}")
            assert ("the ranks have the tags ['of0', 'of1']" in caplog.text) is (mode == "WARN")
            assert Path(engine.load_checkpoint(tmp_path)[0]).name == "of0"

    _run(2, write, tmp_path / "write")
