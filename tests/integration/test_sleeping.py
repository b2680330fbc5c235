"""`Engine.sleep`, `Engine.wake` and `Engine.iter_weights`: another engine generates between two steps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import EngineClosedError, StepError
from swapper import AlignedRegion
from tests.exactness.lockstep import BF16, IN_MEMORY, Lockstep, engine_on_nvme, make_batch, with_smallest_budget
from tests.internals import user_copies
from tests.states import state_of

_OF_IO_THREADS = 1 << 20
"""What they keep for requests that are not aligned: bytes, at most."""
_ROOMY: dict[str, Any] = {"infinity": {"host_memory_budget": "64MiB", "keep_in_memory": True}}


@pytest.fixture
def puts_all_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the smallest tensors as well go to files."""
    monkeypatch.setattr(user_copies, "_LEAST_BYTES", 1)


class Tied(nn.Module):
    """Two names of one weight, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)).float().square().mean()


def _asleep_bytes(engine: Any) -> int:
    engine.sleep()
    return AlignedRegion.mapped_bytes()


@pytest.mark.usefixtures("puts_all_aside")
@pytest.mark.deep(but=2)
@pytest.mark.parametrize("memory", ["tight", "roomy", "no_drive"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_goes_on_with_the_same_bits(memory: str, dtype: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    changes |= BF16 if dtype == "bf16" else {}
    if memory == "tight":
        changes = with_smallest_budget(tmp_path, changes)
    else:
        changes |= _ROOMY if memory == "roomy" else IN_MEMORY
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(4):
            both.engine_step(step)
            expected = {name: value.clone() for name, value in both.model.state_dict().items()}
            both.engine.sleep()
            assert both.engine.is_asleep
            found = dict(both.engine.iter_weights())
            both.engine.wake()
            assert not both.engine.is_asleep
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
            if step:
                both.engine.eval()  # which finishes pending updates
                both.engine.train()
        both.require_equal()


@pytest.mark.parametrize("loop", ["engine", "plain"])
def test_weights_are_streamed_awake_as_well(loop: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, loop=loop) as both:
        for step in range(3):
            both.engine_step(step) if loop == "engine" else both.plain_step(step)
            found = dict(both.engine.iter_weights())
            assert all(torch.equal(found[name], value) for name, value in both.model.state_dict().items())
        both.require_equal()


@pytest.mark.usefixtures("puts_all_aside")
@pytest.mark.parametrize("is_roomy", [False, True])
def test_what_is_released(is_roomy: bool, tmp_path: Path) -> None:
    """Where offload blocks name a drive, no host buffer stays; a unit at a time comes for `iter_weights`."""
    before = AlignedRegion.mapped_bytes()
    with Lockstep.start(tmp_path, changes={**BF16, **(_ROOMY if is_roomy else {})}) as both:
        engine = both.engine
        both.engine_step(0)
        awake = AlignedRegion.mapped_bytes() - before
        asleep = _asleep_bytes(engine) - before
        assert asleep < min(_OF_IO_THREADS, awake)
        AlignedRegion.pop_peak_bytes()
        names = [name for name, _ in engine.iter_weights()]
        assert names == [name for name, _ in both.reference.model.named_parameters()]
        largest = max(unit.num_bytes for unit in engine._parts.parameter_map.units)
        assert AlignedRegion.pop_peak_bytes() - before < _OF_IO_THREADS + largest
        assert AlignedRegion.mapped_bytes() - before < _OF_IO_THREADS
        engine.wake()
        both.engine_step(1)
        assert AlignedRegion.mapped_bytes() - before <= engine.plan.host_budget_bytes
        both.require_equal()


def test_what_rests_in_host_memory_stays_there(tmp_path: Path) -> None:
    """No drive is named, so there is no other place: staging buffers and memory for gradients are released."""
    with Lockstep.start(tmp_path, changes=IN_MEMORY) as both:
        both.engine_step(0)
        awake = AlignedRegion.mapped_bytes()
        assert 0 < _asleep_bytes(both.engine) < awake
        both.engine.wake()
        awake_at = time.perf_counter()
        both.engine_step(1)
        assert both.engine.report is not None
        assert both.engine.report.seconds <= time.perf_counter() - awake_at, "the sleep is no part of a step"
        both.require_equal()


def test_a_weight_that_user_code_holds_stays(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        name, parameter = next(iter(both.model.named_parameters()))
        view = parameter.data
        expected = parameter.clone()
        both.engine.sleep()
        both.engine.wake()
        assert torch.equal(view, expected), name
        both.engine_step(1)
        both.require_equal()


def test_names_are_those_of_the_state_dict_and_tied_weights_come_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    changes = {**BF16, "infinity": {"tile_above": 400}}
    with engine_on_nvme(tmp_path, model, changes) as engine:
        engine.backward(engine(torch.arange(8)))
        engine.step()
        expected = {name: value.clone() for name, value in engine.state_dict().items()}
        for wakes in (True, False):
            found = list(engine.iter_weights())
            assert len({name for name, _ in found}) == len(found)
            assert expected.keys() - {name for name, _ in found} == {"head.weight"}
            assert all(torch.equal(value, expected[name]) for name, value in found)
            if wakes:
                engine.sleep()
        cast = dict(engine.iter_weights(torch.float32))
        assert cast["embedding.weight"].dtype == torch.float32
        assert torch.equal(cast["embedding.weight"], expected["embedding.weight"].float())
        assert cast["norm.num_batches_tracked"].dtype == torch.int64
        other = Tied()
        missing = other.load_state_dict(cast, strict=False)
        assert missing.missing_keys == ["head.weight"] and not missing.unexpected_keys


def test_a_step_ends_an_iteration(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        weights = both.engine.iter_weights()
        name, value = next(weights)
        both.engine(**make_batch(1))  # a forward changes nothing
        next(weights)
        both.engine_step(1)
        with pytest.raises(StepError, match=r"a step was made since the first tensor.*again"):
            next(weights)
        assert not torch.equal(value, dict(both.engine.iter_weights())[name])


def test_calls_while_asleep_name_the_cure(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        engine = both.engine
        both.engine_step(0)
        loss = engine(**make_batch(1))
        engine.sleep()
        engine.sleep()
        for call in (
            lambda: engine(**make_batch(0)),
            engine.step,
            lambda: engine.train_batch(iter([make_batch(0)])),
            lambda: engine.eval_batch(iter([make_batch(0)])),
            lambda: engine.backward(torch.ones((), requires_grad=True)),
            lambda: loss.float().sum().backward(),
            engine.flush,
            both.optimizer.step,
            lambda: state_of(engine, next(both.model.parameters())),
            both.model.state_dict,
            lambda: next(both.model.parameters()) + 1,
            lambda: infinity.GatheredParameters(both.model.parameters()).__enter__(),
            lambda: engine.save_checkpoint(tmp_path / "out"),
            lambda: engine.load_checkpoint(tmp_path / "out"),
            lambda: engine.save_16bit_model(tmp_path / "out"),
            lambda: engine.save_pretrained(tmp_path / "out"),
        ):
            with pytest.raises(StepError, match=r"the engine is asleep.*Call engine\.wake\(\)"):
                call()
        assert not (tmp_path / "out").exists()
        engine.eval()
        engine.train()
        engine.zero_grad()
        engine.wake()
        engine.wake()
        both.engine_step(1)
        engine.save_checkpoint(tmp_path / "out")
        both.require_equal()


def test_it_sleeps_between_steps_only(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes={"gradient_accumulation_steps": 2}) as both:
        engine = both.engine
        engine.wake()  # it is awake
        engine.backward(engine(**make_batch(0)).float().sum())
        with pytest.raises(StepError, match=r"gradients of a step that has not ended.*engine\.step\(\).*zero_grad\(\)"):
            engine.sleep()
        engine.step()
        with pytest.raises(StepError, match="gradients of a step"):
            engine.sleep()  # between two micro-batches
        engine.zero_grad()
        with infinity.GatheredParameters(both.model.parameters()), pytest.raises(StepError, match="gathered"):
            engine.sleep()
        engine.sleep()
        engine.wake()


def test_an_update_in_backward_has_to_end_first(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        both.engine.backward(both.engine(**make_batch(1)).float().sum())
        for call in (both.engine.sleep, both.engine.iter_weights):
            with pytest.raises(StepError, match=r"Call engine\.step\(\) first"):
                call()
        both.engine.step()
        both.engine.sleep()


@pytest.mark.parametrize("gives_back", [True, False, None])
def test_closing_while_asleep(gives_back: bool | None, tmp_path: Path) -> None:
    both = Lockstep.start(tmp_path, changes=_ROOMY)
    both.engine_step(0)
    expected = {name: value.clone() for name, value in both.model.state_dict().items()}
    both.engine.sleep()
    both.engine.close(restore_weights=gives_back)
    assert os.listdir(tmp_path) == []
    if gives_back is not False:
        assert all(torch.equal(value, expected[name]) for name, value in both.model.state_dict().items())
    for call in (both.engine.sleep, both.engine.wake, both.engine.iter_weights):
        with pytest.raises(EngineClosedError):
            call()


def test_an_exception_while_asleep_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of the other engine"), Lockstep.start(tmp_path).engine as engine:
        engine.sleep()
        raise ValueError("of the other engine")
    assert engine.is_closed
    assert os.listdir(tmp_path) == []


def test_a_save_in_the_background_ends_first(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path / "drive") as both:
        both.engine_step(0)
        both.engine.save_checkpoint(tmp_path / "saved", blocking=False)
        both.engine.sleep()
        assert (tmp_path / "saved" / "latest").exists()
        both.engine.wake()
        both.engine.load_checkpoint(tmp_path / "saved")
        both.engine_step(1)
        both.require_equal()
