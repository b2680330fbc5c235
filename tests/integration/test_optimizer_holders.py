"""Libraries that hold, wrap or move the optimizer that `initialize` returns, or pass one of theirs to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import OptimizerNotPageableError
from tests.exactness.lockstep import PLAIN, Lockstep, everything_on_nvme


@pytest.fixture
def both(tmp_path: Path) -> Any:
    with Lockstep.start(tmp_path) as pair:
        for step in range(2):
            pair.engine_step(step)
        yield pair
        pair.engine_step(2)
        pair.require_equal()


def test_accelerate_wraps_what_initialize_returned(both: Lockstep) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    try:
        wrapped = accelerator.prepare_optimizer(both.optimizer, device_placement=True)
        assert wrapped.state is both.optimizer.state
        both.plain_backward(5)
        both.reference.step()
        wrapped.step()
        wrapped.zero_grad()
    finally:
        accelerator.free_memory()
        type(accelerator.state)._reset_state(reset_partial_state=True)


def test_accelerates_wrapper_is_refused_by_name(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    accelerator = Accelerator(cpu=True)
    try:
        model = PLAIN.make("none")
        wrapped = AcceleratedOptimizer(torch.optim.AdamW(model.parameters()), device_placement=False)
        with pytest.raises(
            OptimizerNotPageableError, match=r"AcceleratedOptimizer .*'optimizer' \(AdamW\)\. Pass that one"
        ):
            infinity.initialize(
                model=model, config=everything_on_nvme(tmp_path, {"optimizer": None}), optimizer=wrapped
            )
    finally:
        type(accelerator.state)._reset_state(reset_partial_state=True)
