"""Libraries that hold, wrap or move the optimizer that `initialize` returns, or pass one of theirs to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import OptimizerNotPageableError
from tests.exactness.lockstep import PLAIN, Lockstep, everything_on_nvme, make_batch


@pytest.fixture
def both(tmp_path: Path) -> Any:
    with Lockstep.start(tmp_path) as pair:
        for step in range(2):
            pair.engine_step(step)
        yield pair
        pair.engine_step(2)
        pair.require_equal()


def test_lightning_moves_states_at_the_end_and_at_resume(both: Lockstep) -> None:
    # What lightning.fabric.utilities.optimizer._optimizer_to_device does (2.5), without that package.
    for parameter, state in both.optimizer.state.items():
        both.optimizer.state[parameter] = {
            name: value.to("cpu", non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }


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


@pytest.mark.parametrize("clipping", [0.0, 0.1])
def test_adapters_that_come_after_initialize_are_trained_once_they_are_in_a_group(
    clipping: float, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    models = [PLAIN.make("none") for _ in range(2)]
    changes = {"optimizer": None, "gradient_clipping": clipping}
    plain = torch.optim.AdamW(models[1].parameters(), lr=1e-2)
    engine, optimizer, *_ = infinity.initialize(
        model=models[0],
        config=everything_on_nvme(tmp_path, changes),
        optimizer=torch.optim.AdamW(models[0].parameters(), lr=1e-2),
    )
    with engine:
        adapted: list[Any] = []
        for model, side in zip(models, (optimizer, plain), strict=True):
            torch.manual_seed(1)
            adapted.append(get_peft_model(model, LoraConfig(target_modules=["up"], r=4)))  # type: ignore[arg-type]
            side.add_param_group({"params": [param for param in model.parameters() if param.requires_grad]})
        for step in range(4):
            expected = adapted[1](**make_batch(step))
            expected.backward()
            if clipping:
                torch.nn.utils.clip_grad_norm_(models[1].parameters(), clipping)
            plain.step()
            plain.zero_grad()
            loss = adapted[0](**make_batch(step))
            engine.backward(loss)
            engine.step()
            assert torch.equal(expected, loss), step
