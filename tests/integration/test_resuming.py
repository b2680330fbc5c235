"""Model and optimizer state dicts resume a training in 16 bits bit for bit, in either order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.exactness.lockstep import everything_on_nvme
from tests.integration.test_checkpoints import MODES, Model, steps_of
from tests.states import require_equal, state_of, weights_and_states

_MODES: dict[str, dict[str, Any]] = {
    **{name: MODES[name] for name in ("remainder", "fp32 beside bf16", "in memory", "fp32", "int8 states")},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 8}},
}


@contextmanager
def _training(
    directory: Path, mode: str, model: nn.Module, optimizer: Any = None
) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    chosen = {"optimizer": None} if optimizer is not None else {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    config = everything_on_nvme(directory, {**_MODES[mode], **chosen})
    engine, paged, *_ = infinity.initialize(model=model, optimizer=optimizer, config=config)
    with engine:
        yield engine, paged


def _saved(engine: Any, optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Any]:
    torch.save({"model": engine.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return torch.load(path)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("order", ["model, optimizer", "optimizer, model"])
@pytest.mark.parametrize("mode", _MODES)
def test_state_dicts_resume_with_every_bit(mode: str, order: str, tmp_path: Path) -> None:
    with _training(tmp_path, mode, Model()) as (engine, optimizer):
        steps_of(engine, 0, 1)
        saved = _saved(engine, optimizer, tmp_path / "saved.pt")
        losses = steps_of(engine, 2, 3, 4)
        expected = weights_and_states(engine)
    with _training(tmp_path, mode, Model(seed=1)) as (engine, optimizer):
        for what in order.split(", "):
            (engine.module if what == "model" else optimizer).load_state_dict(saved[what])
        assert steps_of(engine, 2, 3, 4) == losses
        found = weights_and_states(engine)
    require_equal(found, expected)


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("mode", ["remainder", "fp32 beside bf16", "fp16"])
def test_what_is_loaded_before_initialize_resumes_with_every_bit(
    mode: str, make: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    """nanoGPT's way: a plain model and a plain optimizer load the state dicts."""

    def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model(seed)
        return model, make([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    model, plain = fresh(0)
    with _training(tmp_path, mode, model, plain) as (engine, optimizer):
        steps_of(engine, 0, 1, 2, 3)
        saved = _saved(engine, optimizer, tmp_path / "saved.pt")
        steps_of(engine, 4)
        expected = weights_and_states(engine)
    model, plain = fresh(1)
    model.load_state_dict(saved["model"])
    plain.load_state_dict(saved["optimizer"])
    with _training(tmp_path, mode, model, plain) as (engine, optimizer):
        steps_of(engine, 4)
        found = weights_and_states(engine)
    require_equal(found, expected)


def test_a_plain_optimizer_keeps_main_weights_and_trains_on(tmp_path: Path) -> None:
    with _training(tmp_path, "remainder", Model()) as (engine, optimizer):
        steps_of(engine, 3)
        saved = _saved(engine, optimizer, tmp_path / "saved.pt")
        first = next(iter(optimizer.param_groups[0]["params"]))
        assert set(optimizer.state[first]) == {"step", "exp_avg", "exp_avg_sq"}
    model = Model(1)
    model.load_state_dict(saved["model"])
    plain = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    plain.load_state_dict(saved["optimizer"])
    model(torch.ones(2, 8), 3).backward()
    plain.step()
    # Weights and state have moved on; the main weights in the dict have not, and must not bring the old ones back.
    again = {"model": model.state_dict(), "optimizer": plain.state_dict()}
    expected = {fqn: value.clone() for fqn, value in model.named_parameters()}
    with _training(tmp_path, "remainder", Model(2)) as (engine, optimizer):
        engine.module.load_state_dict(again["model"])
        optimizer.load_state_dict(again["optimizer"])
        for fqn, parameter in engine.module.named_parameters():
            assert torch.equal(parameter.clone(), expected[fqn].to(parameter.dtype)), fqn
    with _training(tmp_path, "remainder", model, plain) as (engine, _):
        for fqn, parameter in engine.module.named_parameters():
            assert torch.equal(state_of(engine, parameter)["weight"], expected[fqn]), fqn


def test_a_main_weight_of_another_shape_is_refused_before_anything_changes(tmp_path: Path) -> None:
    with _training(tmp_path, "remainder", Model()) as (engine, optimizer):
        steps_of(engine, 3)
        saved = _saved(engine, optimizer, tmp_path / "saved.pt")["optimizer"]
        before = weights_and_states(engine)
        saved["state"][1]["main_weight"] = torch.ones(3)
        with pytest.raises(ValueError, match=r"main weight of parameter 'first.weight' with shape"):
            optimizer.load_state_dict(saved)
        require_equal(weights_and_states(engine), before)


@pytest.mark.deep(but=4)
@pytest.mark.parametrize("mode", [mode for mode in _MODES if mode != "int8 states"])  # which rounds what is set
def test_single_main_weights_and_states_are_read_and_set(mode: str, tmp_path: Path) -> None:
    model = Model()
    originals = {fqn: value.detach().clone() for fqn, value in model.named_parameters()}
    with _training(tmp_path, mode, model) as (engine, _):
        for fqn, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(infinity.safe_get_full_fp32_param(parameter), originals[fqn])
        weight = model.first.weight
        assert infinity.safe_get_full_optimizer_state(weight, "exp_avg") is None
        steps_of(engine, 3)
        new = torch.randn(96, 8)
        others = weights_and_states(engine)
        infinity.safe_set_full_fp32_param(weight, new)
        assert torch.equal(infinity.safe_get_full_fp32_param(weight), new)
        assert torch.allclose(weight.clone().float(), new, atol=0.05)
        infinity.safe_set_full_optimizer_state(weight, new.abs(), "exp_avg_sq")
        assert torch.equal(infinity.safe_get_full_optimizer_state(weight, "exp_avg_sq"), new.abs())
        with pytest.raises(ValueError, match="no state 'momentum'"):
            infinity.safe_set_full_optimizer_state(weight, new, "momentum")
        with pytest.raises(ValueError, match="shape"):
            infinity.safe_set_full_fp32_param(weight, new[1:])
        changed = {"first.weight", "last.weight", "first.weight weight", "first.weight exp_avg_sq"}
        after = weights_and_states(engine)
        assert all(torch.equal(after[key], value) for key, value in others.items() if key not in changed)
        infinity.safe_set_full_fp32_param(model.frozen.weight, torch.zeros(8, 96))
        assert not model.frozen.weight.clone().any()
