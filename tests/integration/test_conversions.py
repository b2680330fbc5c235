"""Conversions of a model that an engine holds: those that change nothing work under all of torch's flags, others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ParameterNotResidentError, UnsupportedModelError
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


@pytest.mark.deep(but=4)
@pytest.mark.usefixtures("flag")
@pytest.mark.parametrize("convert", _NO_OPS)
def test_a_conversion_that_changes_nothing_works_under_torchs_flags(convert: str, engine: infinity.Engine) -> None:
    parameters = list(engine.module.parameters())
    plain = copy.deepcopy(engine.module)
    optimizer = _optimizer(plain)
    for _ in range(2):
        _NO_OPS[convert](engine.module)
        engine.backward(engine(torch.ones(2, 8)).square().sum())
        plain(torch.ones(2, 8)).square().sum().backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert all(new is old for new, old in zip(engine.module.parameters(), parameters, strict=True))
    for parameter, other in zip(parameters, plain.parameters(), strict=True):
        assert torch.equal(parameter.detach().clone(), other)


@pytest.mark.usefixtures("flag")
def test_a_conversion_to_something_else_is_refused_under_torchs_flags(engine: infinity.Engine) -> None:
    with pytest.raises(UnsupportedModelError, match=r"cannot be cast to torch.float64.*bf16"):
        engine.module.double()
    assert torch.__future__.get_swap_module_params_on_conversion.__module__ == "torch.__future__"


def test_torch_asks_for_its_flags_itself_when_the_last_engine_is_closed(engine: infinity.Engine) -> None:
    engine.close()
    for module, name in (
        (torch.utils, "swap_tensors"),
        (torch.__future__, "get_swap_module_params_on_conversion"),
        (torch.__future__, "get_overwrite_module_params_on_conversion"),
    ):
        assert getattr(module, name).__code__.co_filename == module.__file__


@pytest.mark.parametrize(
    ("convert", "cure"),
    [
        (lambda model: model.share_memory(), r"copy\.deepcopy\(model\)\.share_memory\(\)"),
        (lambda model: model.to("meta"), r"torch\.device\('meta'\)"),
        (
            lambda model: torch.utils.swap_tensors(nn.Parameter(torch.ones(8, 8)), model[0].weight),
            r"0\.weight.*p\.data\.copy_",
        ),
    ],
    ids=["share_memory", "meta", "swap_tensors"],
)
def test_what_an_engine_cannot_do_names_its_cure(
    convert: Callable[[nn.Module], object], cure: str, engine: infinity.Engine
) -> None:
    with pytest.raises(ParameterNotResidentError, match=cure):
        convert(engine.module)


def test_set_on_what_data_gives_leaves_the_weight_as_in_torch(engine: infinity.Engine) -> None:
    parameter = next(engine.module.parameters())
    before = parameter.detach().clone()
    view = parameter.data
    other = torch.ones(2, 2)
    assert view.set_(other) is view
    assert view.data_ptr() == other.data_ptr() and view.shape == (2, 2)
    assert torch.equal(parameter.detach().clone(), before)
