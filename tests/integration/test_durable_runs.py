"""Durable runs in one process: what a commit holds, what is refused, and that a run can be gone back in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError, ModelError, StepError, StorageError
from tests.exactness.lockstep import BF16, engine_on_nvme
from tests.states import everything, require_equal

_MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "remainder": BF16,
    "fp32 beside bf16": {**BF16, "infinity": {"main_weights": "fp32"}},
    "in the step": {**BF16, "infinity": {"update": "step"}},
    "dynamic fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}},
    "int8 states": {**BF16, "infinity": {"state_dtype": "int8"}},
    "bf16 states": {**BF16, "infinity": {"state_dtype": "bf16"}},
    "clipped": {**BF16, "gradient_clipping": 0.1},
    "accumulated": {**BF16, "gradient_accumulation_steps": 3},
    "vertical": {**BF16, "gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical"}},
}


class Model(nn.Module):
    """With statistics, something frozen, tied weights, dropout, and a layer that is used late."""

    def __init__(self, seed: int = 0, width: int = 96) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.late = nn.Linear(8, width)
        self.frozen = nn.Linear(width, 8).requires_grad_(False)
        self.last = nn.Linear(8, width)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = x.to(self.first.weight.dtype)
        hidden = self.dropout(self.norm(self.first(x))) + (self.late(x) if int(self.seen) > 3 else 0)
        return self.last(self.frozen(hidden).relu()).float().square().mean()


_SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}


@contextmanager
def training(drive: Path, changes: dict[str, Any], model: nn.Module, lr_scheduler: Any = None) -> Iterator[Any]:
    drive.mkdir(exist_ok=True)
    own = {"durable": True, **changes.get("infinity", {})}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    common = {"optimizer": optimizer, "scheduler": _SCHEDULER, "train_micro_batch_size_per_gpu": 2}
    data = list(torch.randn(14, 8, generator=torch.Generator().manual_seed(7)))
    with engine_on_nvme(
        drive, model, {**common, **changes, "infinity": own}, training_data=data, lr_scheduler=lr_scheduler
    ) as engine:
        yield engine


def train(engine: Any, until: int) -> list[float]:
    """Batches that begin anew when the loader ends, and dropout: both go on where the commit was made."""
    if engine.config.infinity.schedule == "vertical":
        return [float(engine.train_batch()) for _ in range(engine.global_steps, until)]
    losses: list[float] = []
    batches: Iterator[Any] = iter(())
    while engine.global_steps < until:
        batch = next(batches, None)
        while batch is None:  # twice where a run goes on at the very end of an epoch, of which nothing is left
            batches = iter(engine.training_dataloader)
            batch = next(batches, None)
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _seed() -> None:
    torch.manual_seed(3)
    random.seed(3)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", _MODES)
def test_a_run_goes_on_bit_for_bit(mode: str, tmp_path: Path) -> None:
    """Over the end of an epoch, which has seven batches."""
    losses, last = {}, {}
    for name, ends in (("whole", (9,)), ("parts", (2, 5, 9))):
        _seed()
        losses[name] = []
        for seed, until in enumerate(ends):
            with training(tmp_path / name, _MODES[mode], Model(seed)) as engine:
                if not seed:
                    _seed()
                assert engine.global_steps == (0, *ends)[seed]
                losses[name] += train(engine, until)
                last[name] = everything(engine)
    assert losses["parts"] == losses["whole"]
    require_equal(last["parts"], last["whole"])
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["durable"]


@pytest.mark.deep
def test_going_back(tmp_path: Path) -> None:
    changes = {**BF16, "infinity": {"keep_last": 3}}
    _seed()
    with training(tmp_path / "other", BF16, Model()) as engine:
        train(engine, 2)
        before = everything(engine)
    _seed()
    with training(tmp_path / "drive", changes, Model()) as engine:
        losses = train(engine, 4)
        after = everything(engine)
        with pytest.raises(
            StepError,
            match=r"3 commits are kept.*: 0 \(to step 4\), 1 .*, 2 \(to step 2\)\. .*keep_last' is 3: set it to 4",
        ):
            engine.rollback(3)
        engine.rollback(2)
        require_equal(everything(engine), before)
        engine.rollback(0)
        assert train(engine, 4) == losses[-2:]
        require_equal(everything(engine), after)
        engine.rollback(1)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        weight = engine.module.first.weight.clone()
        train(engine, 4)
        assert torch.equal(engine.module.first.weight, weight)


def _steps(engine: Any, *steps: int) -> None:
    """Each on batches of its own, whatever the loader gives."""
    for step in steps:
        for index in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + index))))
            engine.step()


_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}  # which no step overflows with


@pytest.mark.deep
@pytest.mark.parametrize(
    "changes",
    [_MODES["clipped"], _MODES["in the step"], _MODES["accumulated"], _FP16, {"managed_gradient_accumulation": False}],
    ids=["clipped", "in the step", "accumulated", "fp16", "micro-batches not counted"],
)
def test_going_back_forgets_the_gradients_of_a_step_that_has_not_ended(changes: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for goes_back in (False, True):
        _seed()
        with training(tmp_path / str(goes_back), changes, Model()) as engine:
            _seed()
            _steps(engine, 0, 1)
            if goes_back:
                engine.backward(engine(torch.ones(2, 8)))
                engine.rollback(0)
            _steps(engine, 2, 3)
            results.append(everything(engine))
    require_equal(*results)


@pytest.mark.deep
def test_nobody_goes_back_behind_a_checkpoint_that_was_loaded(tmp_path: Path) -> None:
    """Steps have the same numbers before and after it, and other weights."""
    changes = {**BF16, "infinity": {"keep_last": 6}}
    refused = r"\d commits are kept.*: 0 \(to step \d\)\. .*keep_last' is 6: .*has made no more steps"
    with training(tmp_path / "drive", changes, Model()) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        train(engine, 5)
        engine.load_checkpoint(tmp_path / "saved")
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = 0.5
        found = {}
        for step in (3, 4, 5):
            train(engine, step)
            found[step] = everything(engine)
        engine.rollback(1)
        require_equal(everything(engine), found[4])
        train(engine, 5)
        last = everything(engine)
    with training(tmp_path / "drive", changes, Model(1)) as engine:
        require_equal(everything(engine), last)
        engine.rollback(2)
        require_equal(everything(engine), found[3])
        for loads in (False, True):
            if loads:
                engine.load_checkpoint(tmp_path / "saved")
            with pytest.raises(StepError, match=refused):
                engine.rollback(1)
        engine.rollback(0)
        require_equal(everything(engine), found[3])


@pytest.mark.deep
def test_long_ways_back(tmp_path: Path) -> None:
    """Of steps 2 and 4 as well as of the last two, 7 and 6, a commit is kept, also after a restart."""
    changes = {**BF16, "infinity": {"keep_last": 2, "keep_every": 2}}
    expected = {}
    with training(tmp_path / "drive", changes, Model()) as engine:
        for step in range(1, 8):
            train(engine, step)
            if step in (2, 4):
                expected[step] = everything(engine)
    with training(tmp_path / "drive", changes, Model(1)) as engine:
        with pytest.raises(StepError, match=r"4 commits are kept.*: 0 .*, 1 .*, 3 .*, 5 \(to step 2\)"):
            engine.rollback(2)
        engine.rollback(3)
        require_equal(everything(engine), expected[4])
        train(engine, 5)
        with pytest.raises(StepError, match=r": 0 .*, 1 .*, 3 \(to step 2\)"):
            engine.rollback(2)
        engine.rollback(3)
        require_equal(everything(engine), expected[2])


def test_the_last_step_is_committed_when_the_next_one_updates(tmp_path: Path) -> None:
    """Not before `step` returns, but before anything of the next step is written."""
    with training(tmp_path / "drive", BF16, Model()) as engine:
        commits = engine._parts.durable.directory.commits
        for step in range(1, 4):
            loss = engine(next(iter(engine.training_dataloader)))
            engine.backward(loss)
            assert max(commits(), default=0) == step - 1
            engine.step()
        engine.flush()
        assert max(commits()) == 3


_OTHER_TRAININGS: dict[str, tuple[dict[str, Any], int, str]] = {
    "wider": ({}, 64, r"'first.weight' has shape \[96, 8\], not \[64, 8\]"),
    "optimizer": ({"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}}, 96, "has states .*exp_avg.*not.*sum"),
    "page": ({"infinity": {"staging_buffer_bytes": 65536}}, 96, "infinity.staging_buffer_bytes to 32768"),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("what", _OTHER_TRAININGS)
def test_another_training_is_refused(what: str, tmp_path: Path) -> None:
    changes, width, message = _OTHER_TRAININGS[what]
    with training(tmp_path / "drive", BF16, Model()) as engine:
        train(engine, 1)
        expected = everything(engine)
    model = Model(width=width)
    with pytest.raises(ModelError, match=message), training(tmp_path / "drive", {**BF16, **changes}, model):
        pass
    assert isinstance(model.first.weight, nn.Parameter) and model.first.weight.isfinite().all()
    with training(tmp_path / "drive", BF16, Model(1)) as engine:  # nothing was changed
        require_equal(everything(engine), expected)


def test_a_damaged_commit_gives_way_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = {**BF16, "infinity": {"keep_last": 2}}
    with training(tmp_path / "drive", changes, Model()) as engine:
        train(engine, 2)
    path = max((tmp_path / "drive" / "durable").glob("commit-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with training(tmp_path / "drive", changes, Model(1)) as engine:
        assert engine.global_steps == 1 and "damaged" in caplog.text


def test_what_is_refused(tmp_path: Path) -> None:
    for change, match in [
        ({"zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": None}}}, "offload_param.device"),
        ({"infinity": {"keep_in_memory": True}}, "keep_in_memory"),
    ]:
        with pytest.raises(ConfigError, match=match), training(tmp_path / "drive", change, Model()):
            pass
    with training(tmp_path / "drive", {}, Model()) as engine:
        engine.optimizer.step()  # of a batch that was skipped
        assert engine.global_steps == 0
        loss = engine(torch.randn(2, 8))
        loss.backward()
        with pytest.raises(StepError, match=r"engine.step\(\)"):
            engine.optimizer.step()
    refused = pytest.raises(StepError, match=r"not durable")
    with training(tmp_path / "drive", {"infinity": {"durable": False}}, Model()) as engine, refused:
        engine.rollback(1)


class Adapted(nn.Module):
    """A large frozen layer and a small one that is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(8, 40_000).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 4, bias=False), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.down.weight.dtype)
        return self.frozen(x + self.up(self.down(x))).float().square().mean()


@pytest.mark.deep
def test_what_is_frozen_is_stored_once(tmp_path: Path) -> None:
    small = {
        **BF16,
        "aio": {"block_size": 16384, "thread_count": 1, "queue_depth": 1},
    }  # writes under way need room as well
    frozen_bytes = 9 * 40_000 * 2
    with training(tmp_path / "drive", small, Adapted()) as engine:
        train(engine, 2)
        expected = everything(engine)
        assert frozen_bytes < engine.plan.durable_bytes
        assert f"{engine.plan.durable_bytes / 1e6:,.1f} MB on the drives" in str(engine.plan)
    states = tmp_path / "drive" / "durable" / "states-1-of-1"
    assert states.stat().st_size < 1.7 * frozen_bytes
    for until in (3, 4):
        with training(tmp_path / "drive", small, Adapted(until)) as engine:  # other weights: those of the commit count
            assert engine.report is None and engine.global_steps == until - 1
            if until == 3:
                require_equal(everything(engine), expected)
            train(engine, until)


_OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "budget": {"infinity": {"host_memory_budget": "200MiB"}},
    "more commits": {"infinity": {"keep_last": 4, "keep_every": 3}},
    "fewer commits": {"infinity": {"keep_last": 1}},
    "other requests": {"aio": {"block_size": 262144, "thread_count": 2}, "infinity": {"io_backend": "threads"}},
    "later updates": {"infinity": {"update": "deferred"}},
    "ordinary order, no prefetch": {"infinity": {"schedule": "ordinary", "prefetch": False}},
}


@pytest.mark.deep
@pytest.mark.parametrize("num_drives", [1, 2])
def test_other_settings(num_drives: int, tmp_path: Path) -> None:
    """Each of them goes on where the one before has ended, with the same bits as one that never changed anything."""

    def changes(changed: dict[str, Any], place: str) -> dict[str, Any]:
        paths = [str(tmp_path / place / str(index)) for index in range(num_drives)]
        return {**BF16, **changed, "infinity": {"keep_last": 2, **changed.get("infinity", {}), "durable_path": paths}}

    _seed()
    with training(tmp_path / "whole", changes({}, "whole"), Model()) as engine:
        _seed()
        losses = train(engine, 1 + len(_OTHER_SETTINGS))
        expected = everything(engine)
    found = []
    for index, changed in enumerate([{}, *_OTHER_SETTINGS.values()]):
        with training(tmp_path / "parts", changes(changed, "parts"), Model(index)) as engine:
            if not index:
                _seed()
            assert engine.global_steps == index
            found += train(engine, index + 1)
            last = everything(engine)
    assert found == losses
    require_equal(last, expected)


@pytest.mark.deep
def test_drives_that_are_missing_or_exchanged(tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in "abc")
    changes = [{**BF16, "infinity": {"durable_path": paths}} for paths in ([first, second], [second, first], [first])]
    changes += [{**BF16, "infinity": {"durable_path": paths}} for paths in ([second], [first, third], [third, second])]
    with training(tmp_path / "scratch", changes[0], Model()) as engine:
        train(engine, 1)
        expected = everything(engine)
    for changed in changes[1:]:
        refused = pytest.raises(StorageError, match="name the same directories in the same order")
        with refused, training(tmp_path / "scratch", changed, Model()):
            pass
    with training(tmp_path / "scratch", changes[0], Model(1)) as engine:
        require_equal(everything(engine), expected)


@pytest.mark.deep
def test_what_is_lost_at_each_start_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that is loaded again, and a scheduler that no commit has."""
    drive, saved = tmp_path / "drive", tmp_path / "saved"
    with training(drive, {"scheduler": None}, Model()) as engine:
        train(engine, 1)
        engine.save_checkpoint(saved)
        engine.load_checkpoint(saved)
        assert not caplog.records
        torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        train(engine, 3)
        (told,) = caplog.records
        assert "as lr_scheduler= to infinity.initialize" in told.message
    for only_module in (False, True):
        with training(drive, {"scheduler": None}, Model()) as engine:
            train(engine, 4 + only_module)
            caplog.clear()
            engine.load_checkpoint(saved, load_module_only=True)
            assert not caplog.records  # steps were made since
            engine.rollback(0)
        with training(drive, {"scheduler": None}, Model()) as engine:
            step = engine.global_steps
            engine.load_checkpoint(saved, load_module_only=only_module)
            (told,) = caplog.records
            assert f"resumed at step {step}" in told.message and "if not engine.global_steps" in told.message


@pytest.mark.deep
def test_hyperparameters_that_the_run_does_not_take_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def changes(lr: float, decay: float) -> dict[str, Any]:
        return {"scheduler": None, "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": decay}}}

    drive = tmp_path / "drive"
    with training(drive, changes(1e-2, 0.0), Model()) as engine:
        train(engine, 1)
        engine.optimizer.param_groups[0]["lr"] = 5e-3
        train(engine, 2)
    with training(drive, changes(1e-2, 0.0), Model()) as engine:
        assert engine.get_lr() == [5e-3] and not caplog.records
    with training(drive, changes(1e-3, 0.1), Model()) as engine:
        assert engine.get_lr() == [5e-3]
        (told,) = caplog.records
        assert "lr goes on with 0.005, not 0.001" in told.message
        assert "weight_decay goes on with 0.0, not 0.1" in told.message
