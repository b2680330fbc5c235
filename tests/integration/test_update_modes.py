"""When updates run makes no difference to anybody who looks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import StepError
from tests.exactness.lockstep import BF16, Lockstep, engine_on_nvme, with_smallest_budget
from tests.states import state_of
from tests.twins import Twins
from tests.updates_on_demand import let_run_what_may, num_pending, updates_on_demand

_MODES = ("in_backward", "deferred", "step")
_DEFERRED = {"infinity": {"update": "deferred"}}


@pytest.mark.deep
def test_deferred_updates_wait_for_the_forward_that_wants_them(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=with_smallest_budget(tmp_path, {**BF16, **_DEFERRED})) as both:
        with updates_on_demand(both.engine):
            for step in range(3):
                both.engine_step(step)
        let_run_what_may(both.engine)
        assert num_pending(both.engine) > 0, "some units are not in memory, and nobody wants them"
        both.engine_step(3)
        both.require_equal()


def _gather(both: Lockstep, directory: Path) -> None:
    with infinity.GatheredParameters(both.model.blocks[0].up.weight):
        pass


_LOOKS: dict[str, Callable[[Lockstep, Path], Any]] = {
    "eval": lambda both, directory: both.engine.eval(),
    "train-false": lambda both, directory: both.engine.train(False),
    "save": lambda both, directory: both.engine.save_16bit_model(directory / "out"),
    "gather": _gather,
    "optimizer-state": lambda both, directory: dict(both.optimizer.state_dict()["state"][0]),
    "state": lambda both, directory: state_of(both.engine, both.model.blocks[0].up.weight),
    "flush": lambda both, directory: both.engine.flush(),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("look", _LOOKS)
def test_whoever_looks_sees_the_step_done(look: str, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    with Lockstep.start(drive, changes={**BF16, **_DEFERRED}) as both, updates_on_demand(both.engine):
        for step in range(3):
            both.engine_step(step)
        assert num_pending(both.engine) > 0
        _LOOKS[look](both, tmp_path)
        assert num_pending(both.engine) == 0
        both.engine.train()
        both.engine_step(3)
        both.require_equal()


@pytest.mark.parametrize("width", [8, 600])
def test_small_units_are_updated_when_backward_ends_and_large_ones_beside_it(width: int, tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))
    pending: list[int] = []
    with engine_on_nvme(tmp_path, model) as engine:
        for _ in range(3):
            x = torch.randn(2, width, requires_grad=True)
            engine.flush()
            with updates_on_demand(engine):
                x.register_hook(lambda _: pending.append(num_pending(engine)))  # at the end of backward
                engine.backward(engine(x).square().mean())
                pending.append(num_pending(engine))
                engine.step()
    assert (pending[-2] > 0) == (width > 8)
    assert pending[-1] == 3


def test_what_cures_a_backward_that_is_cut_off_while_units_wait(tmp_path: Path) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    with engine_on_nvme(tmp_path, model) as engine:
        x = torch.randn(2, 8, requires_grad=True)
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()
        x.register_hook(fail)  # at the end of backward
        with pytest.raises(ZeroDivisionError):
            engine.backward(engine(x).square().mean())
        with pytest.raises(StepError, match=r"cut off .* engine\.reset"):
            model.state_dict()
        engine.reset()
        model.state_dict()


def test_closing_finishes_what_is_pending(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=_DEFERRED) as both, updates_on_demand(both.engine):
        for step in range(3):
            both.engine_step(step)
        assert num_pending(both.engine) > 0
        both.engine.close()
        assert num_pending(both.engine) == 0


def test_an_exception_waits_for_nothing(tmp_path: Path) -> None:
    both = Lockstep.start(tmp_path, changes=_DEFERRED)
    with pytest.raises(ZeroDivisionError), updates_on_demand(both.engine), both.engine:
        for step in range(3):
            both.engine_step(step)
        raise ZeroDivisionError
    assert num_pending(both.engine) > 0


def test_what_fails_while_closing_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Lockstep.start(tmp_path)
    both.engine_step(0)

    def fail() -> None:
        raise OSError("the drive is gone")

    monkeypatch.setattr(both.engine._parts.storage, "flush", fail)
    with caplog.at_level(logging.WARNING):
        both.engine.close()
    assert "the drive is gone" in caplog.text
    assert not list(tmp_path.iterdir())


def test_rounded_gradients_are_shown_as_they_wait(tmp_path: Path) -> None:
    changes = {**BF16, "infinity": {"update": "deferred", "gradient_dtype": "bf16"}}
    with Lockstep.start(tmp_path, changes=changes, loop="plain") as both:
        for micro_batch in range(2):
            both.plain_backward(0, micro_batch)
        for fqn, param in both.model.named_parameters():
            assert param.grad.dtype == torch.bfloat16
            assert torch.equal(param.grad.float(), both.reference.main[fqn].grad)
        both.plain_update()
        both.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("update", _MODES)
def test_the_state_of_a_first_update_that_is_pending_is_not_missed(update: str, tmp_path: Path) -> None:
    changes = {"infinity": {"update": update}}
    with Lockstep.start(tmp_path, changes=changes) as both, updates_on_demand(both.engine):
        both.engine_step(0)
        assert (num_pending(both.engine) > 0) == (update != "step")
        assert len(both.optimizer.state) == len(list(both.model.parameters()))
        both.optimizer.load_state_dict(both.optimizer.state_dict())
        both.engine_step(1)
        both.require_equal()


class _Routed(torch.nn.Module):
    """Two experts that lie in one unit; a micro-batch goes through those it names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, names: list[int]) -> torch.Tensor:
        for name in names:
            x = x + (self.first, self.second)[name](x)
        return x.square().mean()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("routes", [([1, 0], [0], [1, 0]), ([1], [0], [1, 0]), ([0, 1], [0, 1], [1])])
@pytest.mark.parametrize("max_norm", [0.0, 0.1])
def test_a_gradient_that_was_not_expected_is_part_of_the_same_update(
    routes: tuple[list[int], ...], max_norm: float, tmp_path: Path
) -> None:
    # A unit is updated when what fired in the micro-batch before has fired: gradients of earlier ones must not go before.
    torch.manual_seed(0)
    batches = [torch.randn(3, 6) for _ in routes]
    changes = {"gradient_accumulation_steps": len(routes), "gradient_clipping": max_norm}
    losses = [lambda model, x=x, names=names: model(x, names) for x, names in zip(batches, routes, strict=True)]
    with Twins(tmp_path, _Routed(), **changes) as twins:
        for _ in range(3):
            twins.step(*losses, max_norm=max_norm)
        twins.require_equal()
