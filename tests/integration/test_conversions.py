"""Conversions of a model that an engine holds: those that change nothing work, others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ModelError
from tests.exactness.lockstep import everything_on_nvme


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[infinity.Engine]:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    config = everything_on_nvme(tmp_path, {"optimizer": None})
    with infinity.initialize(model=model, optimizer=_optimizer(model), config=config)[0] as engine:
        yield engine


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture(params=["swap", "overwrite"])
def flag(request: pytest.FixtureRequest) -> Iterator[None]:
    switch = getattr(torch.__future__, f"set_{request.param}_module_params_on_conversion")
    switch(True)
    yield
    switch(False)


_NO_OPS: dict[str, Callable[[nn.Module], object]] = {
    "float": lambda model: model.float(),
    "cpu": lambda model: model.cpu(),
    "to": lambda model: model.to("cpu", torch.float32),
    "load_state_dict": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
}


@pytest.mark.deep(but=3)
@pytest.mark.usefixtures("flag")
@pytest.mark.parametrize("convert", _NO_OPS)
def test_under_torchs_flags_a_conversion_is_an_error_and_changes_nothing(
    convert: str, engine: infinity.Engine, request: pytest.FixtureRequest
) -> None:
    before = {name: (p, p.detach().clone()) for name, p in engine.module.named_parameters()}
    if convert == "load_state_dict" and "overwrite" in request.node.name:
        _NO_OPS[convert](engine.module)  # which does not ask for this flag
    else:
        with pytest.raises((RuntimeError, ModelError)) as refused:
            _NO_OPS[convert](engine.module)
        causes = f"{refused.value} {refused.value.__cause__}"
        assert "torch.__future__" in causes or "weakref" in causes
    for name, parameter in engine.module.named_parameters():
        kept, values = before[name]
        assert parameter is kept and torch.equal(parameter.detach().clone(), values)


def test_parameters_cannot_be_swapped(engine: infinity.Engine) -> None:
    parameter = next(engine.module.parameters())
    other = nn.Parameter(torch.ones(8, 8))
    for pair in ((parameter, other), (other, parameter)):
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(*pair)
    with infinity.GatheredParameters(parameter), pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(parameter, other)
