"""Parameters of other dtypes, and with gaps in memory: those that keep their values, and those that are warned of."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.errors import ModelError, OtherNumbersWarning
from tests.exactness.lockstep import BF16, everything_on_nvme
from tests.twins import Twins

_IN_MEMORY: dict[str, Any] = {"zero_optimization": {"offload_param": None, "offload_optimizer": None}}


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), requires_grad=False)
        self.numbers = nn.Parameter(torch.tensor([2**24 + 1, 2**53 + 1]), requires_grad=False)
        self.phases = nn.Parameter(torch.randn(4, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.linear(x) * self.phases).abs().sum() * self.scale.sum()
        return y + self.numbers.sum() % 7


@pytest.mark.parametrize("place", [{}, _IN_MEMORY], ids=["nvme", "memory"])
def test_fp64_integers_and_complex_numbers_keep_every_bit(place: dict[str, Any], tmp_path: Path) -> None:
    with Twins(tmp_path, Constants(), **place) as twins:
        for _ in range(2):
            twins.step(lambda model: model(torch.ones(2, 4)))
        twins.engine.close(restore_weights=True)
        for fqn, value in twins.plain.named_parameters():
            found = twins.model.get_parameter(fqn)
            assert type(found) is nn.Parameter and found.dtype == value.dtype and torch.equal(found, value), fqn


def test_trained_fp64_is_warned_of(tmp_path: Path) -> None:
    model = Constants()
    model.scale.requires_grad_(True)
    with pytest.warns(OtherNumbersWarning, match=r"'scale' is fp64, but .* fp32.*model\.float"):
        engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    engine.close()


@pytest.mark.parametrize("is_trained", [True, False])
def test_16_bits_that_the_config_does_not_enable_are_warned_of(is_trained: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(is_trained))
    message = r"'1\.weight' is bf16 \(and 1 more\), but is computed with%s in fp32.*or set \"bf16\" or \"fp16\""
    with pytest.warns(OtherNumbersWarning, match=message % (" and trained" if is_trained else "")):
        engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    engine.close()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the config says it
        infinity.initialize(model=model, config=everything_on_nvme(tmp_path, BF16))[0].close()


class Sliced(nn.Module):
    """Weights that begin as parts of larger ones, as in a model that is distilled from a wider one."""

    def __init__(self, *, clones: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for layer in self.layers:
            layer.weight = nn.Parameter(torch.randn(8, 2, 32)[:, 1, ::4].t())
        self.scale = nn.Parameter(torch.randn(4, 6, 8)[:, ::3, :].permute(2, 0, 1))
        for parameter in self.parameters() if clones else ():
            parameter.data = parameter.data.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale.sum((1, 2))
        return x.square().mean()


@pytest.mark.parametrize("place", [{}, _IN_MEMORY], ids=["nvme", "memory"])
def test_weights_with_gaps_are_warned_of_and_lie_as_their_clones(place: dict[str, Any], tmp_path: Path) -> None:
    message = r"'scale' does not fill its memory .*strides \(1, 48, 24\).* \(1, 16, 8\).*parameter\.data\.clone\(\)"
    with pytest.warns(OtherNumbersWarning, match=message):
        twins = Twins(tmp_path, Sliced(clones=False), plain=Sliced(clones=True), **place)
    with twins:
        for step in range(3):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
            twins.step(lambda model, x=x: model(x))
        twins.require_equal()
        for one, other in zip(twins.model.parameters(), twins.plain.parameters(), strict=True):
            assert one.stride() == other.stride()


@pytest.mark.filterwarnings("ignore::infinity.errors.OtherNumbersWarning")
def test_a_model_that_is_fp64_as_a_whole_is_cast_as_a_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[0].requires_grad_(False)
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    with engine:
        assert engine(torch.ones(2, 4)).dtype == torch.float32


class Scaled(nn.Module):
    """As an fp8 checkpoint has it: a float8 weight and its scale, both frozen, beside what is trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(8), requires_grad=False)
        self.adapter = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(x) + x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype))


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu)


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("place", [{}, _IN_MEMORY], ids=["nvme", "memory"])
@pytest.mark.parametrize("dtype", _FLOAT8, ids=str)
def test_frozen_float8_keeps_every_bit(dtype: torch.dtype, place: dict[str, Any], tmp_path: Path) -> None:
    plain, model = (nn.Sequential(Scaled(dtype), Scaled(dtype)) for _ in range(2))
    from infinity.deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found]
        get_fp32_state_dict_from_zero_checkpoint,
    )

    frozen = {name: value.detach().clone() for name, value in plain.named_parameters() if value.dtype == dtype}
    twins = Twins(tmp_path / "drive", model, plain=plain, **place)
    engine = twins.engine
    for _ in range(2):
        twins.step(lambda model: model(torch.ones(2, 8)).sum())
    engine.save_checkpoint(tmp_path / "saved")
    engine.save_fp32_model(tmp_path / "out")
    with torch.no_grad(), infinity.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model[0].weight.copy_(model[1].scale.to(dtype))
    engine.load_checkpoint(tmp_path / "saved")
    engine.close(restore_weights=True)
    exported = load_file(tmp_path / "out" / "model.safetensors") if dtype != torch.float8_e8m0fnu else {}
    whole = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    for fqn, value in plain.named_parameters():
        found = model.get_parameter(fqn)
        assert found.dtype == value.dtype and torch.equal(
            found.detach().view(torch.uint8), value.detach().view(torch.uint8)
        ), fqn
    for fqn, value in frozen.items():
        for found in (whole[fqn], exported.get(fqn, value)):
            assert found.dtype == dtype and torch.equal(
                found.detach().view(torch.uint8), value.detach().view(torch.uint8)
            )


def test_float8_that_is_trained_is_refused(tmp_path: Path) -> None:
    model = Scaled(torch.float8_e4m3fn)
    model.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"'weight' is a torch\.float8_e4m3fn that is trained.*Freeze it"):
        infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    assert model.weight.dtype == torch.float8_e4m3fn


def test_float8_that_is_thawed_is_refused(tmp_path: Path) -> None:
    model = Scaled(torch.float8_e4m3fn)
    config = everything_on_nvme(tmp_path)
    engine, *_ = infinity.initialize(model=model, model_parameters=model.parameters(), config=config)
    with engine:
        model.weight.requires_grad_(True)
        with pytest.raises((RuntimeError, ValueError), match="weight"):
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
