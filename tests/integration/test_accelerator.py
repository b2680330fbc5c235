"""`InfinityAccelerator` gives the bits of accelerate alone, also after a kill: see `test_thirty_steps`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.state import AcceleratorState
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn

from infinity.errors import ConfigError, ModelError, OptimizerNotPageableError, StepError
from infinity.integrations.accelerate import InfinityAccelerator
from tests.exactness.lockstep import PLAIN, engine_on_nvme
from tests.stand_in.accelerate_script import forget
from tests.stand_in.overflowing import OVERFLOWING, overflowing
from tests.twins import on_nvme


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps what it was told for the whole process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    forget()  # what the tests of another file have told it
    yield
    forget()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def losses_of(
    accelerator: Any, *, steps: int = 5, max_norm: float | None = None, looks_from: int = 0
) -> tuple[list[float], Any]:
    """What a short training gives: losses, and the model."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data = torch.randn(2 * steps, 4, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            if max_norm is not None and accelerator.sync_gradients and len(losses) >= looks_from:
                losses.append(accelerator.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}])
def test_what_the_config_leaves_open(options: dict[str, Any], tmp_path: Path) -> None:
    """Without a word about clipping and precision, nothing is clipped, and autocast is accelerate's."""
    plain, expected = losses_of(Accelerator(**options))
    accelerator = InfinityAccelerator(infinity_config=on_nvme(tmp_path / "nvme"), **options)
    ours, model = losses_of(accelerator)
    assert ours == plain
    assert accelerator.unwrap_model(model) is accelerator.engine.module
    accelerator.save_model(model, str(tmp_path / "saved"))
    saved, values = network(), accelerator.get_state_dict(model)
    load_checkpoint_in_model(saved, str(tmp_path / "saved"))
    for name, value in expected.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value)
        assert torch.equal(values[name], value)
    accelerator.engine.close()


def test_16_bit_weights_by_the_config(tmp_path: Path) -> None:
    """What the model gets is cast to their dtype; the accelerator's ``mixed_precision`` does nothing more."""
    changes = {"bf16": {"enabled": True}}
    accelerator = InfinityAccelerator(infinity_config=on_nvme(tmp_path / "nvme", **changes), mixed_precision="bf16")
    _, model = losses_of(accelerator)
    inputs = torch.ones(1, 8)
    expected = copy.deepcopy(model)(inputs.bfloat16())
    assert expected.dtype is torch.bfloat16 and torch.equal(model(inputs), expected)
    accelerator.engine.close()
    assert torch.equal(model(inputs), expected)
    assert model.float()(inputs).dtype is torch.float32


def test_clipping_by_the_config(tmp_path: Path) -> None:
    plain, _ = losses_of(Accelerator(), max_norm=0.1)
    accelerator = InfinityAccelerator(infinity_config=on_nvme(tmp_path / "nvme", gradient_clipping=0.1))
    ours, model = losses_of(accelerator, max_norm=0.1)
    assert ours == plain
    with pytest.raises(ConfigError, match=r"called with 0\.5, and config key 'gradient_clipping' is 0\.1"):
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    accelerator.engine.close()


def test_gradients_first_looked_at_in_a_later_step(tmp_path: Path) -> None:
    """A norm that is logged from time to time."""
    options: dict[str, Any] = {"max_norm": float("inf"), "looks_from": 3}
    expected, _ = losses_of(Accelerator(), **options)
    accelerator = InfinityAccelerator(infinity_config=on_nvme(tmp_path / "nvme"))
    assert losses_of(accelerator, **options)[0] == expected
    accelerator.engine.close()


def test_prepared_one_by_one_and_what_accelerate_saved(tmp_path: Path) -> None:
    plain = Accelerator()
    losses_of(plain)
    plain.save_state(str(tmp_path / "state"))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    accelerator = InfinityAccelerator(infinity_config=on_nvme(tmp_path / "nvme"))
    other = accelerator.prepare(network())
    assert accelerator.prepare(model) is model
    prepared = accelerator.prepare(optimizer)
    accelerator.prepare(scheduler)
    assert accelerator.engine_of(model) is accelerator.engine and accelerator.engine_of(other) is None
    accelerator._models.remove(other)
    accelerator.load_state(str(tmp_path / "state"))
    expected = plain._models[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert float(prepared.state_dict()["state"][0]["step"]) == 10
    accelerator.engine.close()


@pytest.mark.deep
def test_a_durable_run_needs_a_state_of_the_script(tmp_path: Path) -> None:
    config = on_nvme(tmp_path / "nvme")
    config["infinity"]["durable"] = True
    first = InfinityAccelerator(infinity_config=config)
    losses_of(first, steps=2)
    first.save_state(str(tmp_path / "state"))
    first.free_memory()
    again = InfinityAccelerator(infinity_config=config)
    with pytest.raises(StepError, match=r"is at step 4 already.*Call accelerator\.load_state"):
        losses_of(again)
    again.free_memory()
    again = InfinityAccelerator(infinity_config=config)
    model = network()
    again.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    again.load_state(str(tmp_path / "state"))
    again.backward(model(torch.ones(1, 8)).sum())
    again.engine.close()


def _doubled(accelerator: Any, model: Any, batch: torch.Tensor) -> None:
    """A part of the loss by a backward of the script's own, as large as the accumulation wants it."""
    (model(batch).square().mean() / 2).backward()
    accelerator.backward(model(batch).abs().mean())


def _of_inputs(accelerator: Any, model: Any, batch: torch.Tensor) -> None:
    """The first layer gets gradients of one part, all layers those of the other."""
    accelerator.backward(model(batch).square().mean(), inputs=list(model[0].parameters()))
    accelerator.backward(model(batch).abs().mean())


def _penalised(accelerator: Any, model: Any, batch: torch.Tensor) -> None:
    """The gradients of gradients."""
    accelerator.backward(model(batch).square().mean(), create_graph=True)
    penalty = sum(parameter.grad.square().sum() for parameter in model.parameters())
    model.zero_grad()
    accelerator.backward(penalty)


@pytest.mark.deep(but=1)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("backward", [_doubled, _of_inputs, _penalised])
def test_backwards_beside_the_usual_one(backward: Any, tmp_path: Path) -> None:
    found = []
    for is_ours in (False, True):
        kind: Any = InfinityAccelerator if is_ours else Accelerator
        more = {"infinity_config": on_nvme(tmp_path / "nvme")} if is_ours else {}
        accelerator, model = kind(gradient_accumulation_steps=2, **more), network()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1)):
            with accelerator.accumulate(model):
                backward(accelerator, model, batch)
                optimizer.step()
                optimizer.zero_grad()
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    accelerator.engine.close()


@pytest.mark.deep
def test_one_training_after_the_other(tmp_path: Path) -> None:
    """What a script's hook saves of each model, and what ``free_memory`` leaves: the weights, and no engine."""
    accelerator = InfinityAccelerator(infinity_config=on_nvme(tmp_path / "nvme"))

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        assert len(models) == len(weights) == 2
        torch.save(models[1].state_dict(), Path(directory) / "own.pt")

    accelerator.register_save_state_pre_hook(save)
    teacher = network()
    for number in range(2):
        accelerator.prepare(teacher)
        _, model = losses_of(accelerator)
        accelerator.save_state(str(tmp_path / str(number)))
        expected = model.state_dict()
        accelerator.free_memory()
        assert not accelerator.engines
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        saved = torch.load(tmp_path / str(number) / "own.pt")
        assert all(torch.equal(value, expected[name]) for name, value in saved.items())
        assert (tmp_path / str(number) / "infinity").is_dir() and not (tmp_path / str(number) / "infinity_1").exists()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_micro_batches_without_a_backward(dtype: torch.dtype, tmp_path: Path) -> None:
    """The last one of a step, or all of it: what there is of gradients is the step's."""
    weights = []
    for is_ours in (False, True):
        config = on_nvme(tmp_path / "nvme")
        if dtype is torch.float16:
            config["fp16"] = {"enabled": True, "initial_scale_power": 4}
        more = {"infinity_config": config} if is_ours else {}
        accelerator = (InfinityAccelerator if is_ours else Accelerator)(gradient_accumulation_steps=2, **more)
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for index, batch in enumerate(torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(1))):
            with accelerator.accumulate(model):
                loss = model(batch.to(dtype if is_ours else torch.float32)).float().square().mean()
                if index not in (1, 4, 5):
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        weights.append(model.state_dict())
    if dtype is torch.float32:
        assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
    else:
        assert accelerator.engine.global_steps == 3 and accelerator.engine.skipped_steps == 0
    accelerator.engine.close()


def test_a_step_that_overflows(tmp_path: Path) -> None:
    """It is reported as skipped, and neither weights nor the scheduler move."""
    accelerator = InfinityAccelerator(
        infinity_config=on_nvme(tmp_path / "nvme", fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    )
    assert overflowing(accelerator) == OVERFLOWING
    accelerator.engine.close()


def test_what_is_refused(tmp_path: Path) -> None:
    config = on_nvme(tmp_path / "nvme")
    with pytest.raises(ConfigError, match=r"fp16.*enabled"):
        InfinityAccelerator(infinity_config=config, mixed_precision="fp16")
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        InfinityAccelerator(infinity_config={**config, "gradient_accumulation_steps": 3}, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps' is 4 and gradient_accumulation_steps 1"):
        InfinityAccelerator(infinity_config={**config, "gradient_accumulation_steps": 4})
    with pytest.raises(ConfigError, match="mixed_precision"):
        InfinityAccelerator(infinity_config={**config, "torch_autocast": {"enabled": True}})
    accelerator = InfinityAccelerator(infinity_config=config)
    with pytest.raises(ModelError, match="same accelerator"):
        accelerator.prepare(torch.optim.SGD(network().parameters()))
    for dummy in (DummyOptim(network().parameters()), DummyScheduler(torch.optim.SGD(network().parameters()))):
        with pytest.raises(ModelError, match=r"DummyOptim or DummyScheduler.*Make the optimizer"):
            accelerator.prepare(network(), dummy)
    for key, name in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        both = InfinityAccelerator(infinity_config={**config, key: {"type": name}})
        model = network()
        own = torch.optim.SGD(model.parameters())
        with pytest.raises(ConfigError, match=rf"names the {key} {name}.*Take '{key}' out of the config"):
            both.prepare(model, own, torch.optim.lr_scheduler.ConstantLR(own))
        for engine in both.engines:
            engine.close()
    model = network()
    halves = [torch.optim.SGD(parameters) for parameters in (model[:2].parameters(), model[2:].parameters())]
    with pytest.raises(ModelError, match=r"2 optimizers.*one Sequential.*in groups of their own"):
        accelerator.prepare(model, *halves)
    first, second = network(), network()
    with pytest.raises(ModelError, match=r"several models.*nn\.ModuleList"):
        accelerator.prepare(first, second, torch.optim.SGD([*first.parameters(), *second.parameters()]))


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
            engine_on_nvme(tmp_path, model, optimizer=wrapped)
    finally:
        type(accelerator.state)._reset_state(reset_partial_state=True)
