"""Parameters, buffers and inputs of other dtypes and strides: which keep their values, are warned of, fail with a note."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.errors import ModelError, OtherNumbersWarning
from tests.exactness.case import Case
from tests.exactness.lockstep import BF16, Lockstep, engine_on_nvme
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
        engine = engine_on_nvme(tmp_path, model)
    engine.close()


@pytest.mark.parametrize("is_trained", [True, False])
def test_16_bits_that_the_config_does_not_enable_are_warned_of(is_trained: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(is_trained))
    message = r"'1\.weight' is bf16 \(and 1 more\), but is computed with%s in fp32.*or set \"bf16\" or \"fp16\""
    with pytest.warns(OtherNumbersWarning, match=message % (" and trained" if is_trained else "")):
        engine = engine_on_nvme(tmp_path, model)
    engine.close()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the config says it
        engine_on_nvme(tmp_path, model, BF16).close()


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
    message = (
        r"'scale' is a slice of a larger tensor .*strides \(1, 48, 24\).* \(1, 16, 8\).*parameter\.data\.clone\(\)"
    )
    with pytest.warns(OtherNumbersWarning, match=message):
        twins = Twins(tmp_path, Sliced(clones=False), plain=Sliced(clones=True), **place)
    with twins:
        for step in range(3):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
            twins.step(lambda model, x=x: model(x))
        twins.require_equal()
        for one, other in zip(twins.model.parameters(), twins.plain.parameters(), strict=True):
            assert one.stride() == other.stride()


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
        engine_on_nvme(tmp_path, model)
    assert model.weight.dtype == torch.float8_e4m3fn


_FP16: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 64}}


class Buffered(nn.Module):
    """Rotary frequencies far out, a counter, running statistics of several kinds, and a codebook's usage."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("count", torch.tensor(300.0))
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("used", torch.zeros(8))
        self.linear = nn.Linear(8, 8)
        self.normed = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        self.plain = nn.BatchNorm1d(8, affine=False)
        self.learned = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(8000, 8000 + x.shape[1]).float(), self.inv_freq).repeat(1, 2)
        h = x * angles.cos().to(x.dtype) + x.roll(1, -1) * angles.sin().to(x.dtype)
        if self.training:
            self.count += 1
            self.mean.lerp_(h.detach().double().mean((0, 1)), 1e-3)
            self.used.mul_(0.999).add_(h.detach().float().abs().sum((0, 1)), alpha=1e-3)
        h = self.normed(self.linear(h).transpose(1, 2))
        h = self.learned(self.plain(h)).transpose(1, 2) / (1 + self.used).to(x.dtype)
        return (self.head(h) * self.count.rsqrt().to(x.dtype)).float().square().mean()


_CASE = Case("buffered", Buffered, lambda draw: {"x": draw.floats(2, 6, 8)}, has_checkpointing=False)


@pytest.mark.parametrize("changes", [{}, BF16, _FP16], ids=["fp32", "bf16", "fp16"])
def test_training_equals_plain_torch_with_its_buffers_as_they_came(changes: dict[str, Any], tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=_CASE, changes=changes) as both:
        both.engine_steps(range(3))
        found = {fqn: buffer.dtype for fqn, buffer in both.model.named_buffers() if buffer.is_floating_point()}
        in_weights_dtype = {"learned.running_mean", "learned.running_var"}
        for fqn, dtype in found.items():
            expected = torch.float64 if fqn == "mean" else both.dtype if fqn in in_weights_dtype else torch.float32
            assert dtype == expected, fqn


class Positions(nn.Module):
    """The table of the tutorials: added in its own dtype, it makes the activations fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("table", torch.randn(6, 8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.table).float().square().mean()


def test_a_buffer_that_meets_weights_names_the_cure(tmp_path: Path) -> None:
    engine = engine_on_nvme(tmp_path, Positions(), BF16)
    with engine, pytest.raises(RuntimeError, match=r"'table' is float32.*data_types.buffer_dtype' to \"bfloat16\""):
        engine(torch.ones(2, 6, 8).bfloat16())
    with engine_on_nvme(tmp_path, Positions(), BF16) as unrelated, pytest.raises(RuntimeError) as caught:
        unrelated(torch.ones(2, 5, 8).bfloat16())
    assert not getattr(caught.value, "__notes__", [])


def test_the_config_casts_buffers(tmp_path: Path) -> None:
    changes = {**BF16, "data_types": {"buffer_dtype": "bfloat16"}}
    plain, model = Positions().bfloat16(), Positions()
    with engine_on_nvme(tmp_path, model, changes) as engine:
        assert model.table.dtype == torch.bfloat16
        x = torch.randn(2, 6, 8).bfloat16()
        assert torch.equal(engine(x), plain(x))


@pytest.mark.filterwarnings("ignore::infinity.errors.OtherNumbersWarning")  # fp64 parameters are trained in fp32
@pytest.mark.parametrize("came", [torch.bfloat16, torch.float64])
def test_buffers_of_a_model_that_is_cast_to_fp32_as_a_whole_go_with_it(came: torch.dtype, tmp_path: Path) -> None:
    model = Positions().to(came)
    with engine_on_nvme(tmp_path, model) as engine:
        assert model.table.dtype == torch.float32 and engine(torch.ones(2, 6, 8)).isfinite()


_CONFIGS: dict[torch.dtype, dict[str, Any]] = {
    torch.bfloat16: {"bf16": {"enabled": True}},
    torch.float16: {"fp16": {"enabled": True}},
    torch.float32: {},
}
_MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "without bias": lambda: nn.Linear(4, 4, bias=False),
    "conv": lambda: nn.Conv1d(2, 2, 1),
    "transposed conv": lambda: nn.ConvTranspose1d(2, 2, 1),
    "norm": lambda: nn.LayerNorm(4),
    "rnn": lambda: nn.LSTM(4, 4),
    "attention": lambda: nn.TransformerEncoderLayer(4, 1, 8),
    "bilinear": lambda: _Bilinear(4, 4, 4),
}


class _Bilinear(nn.Bilinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x)


class _MakesItsOwn(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.zeros(2, 4, dtype=torch.float64) + x)


def _notes(model: nn.Module, dtype: torch.dtype, *given: Any, calls: str = "engine") -> str:
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    config = {"train_micro_batch_size_per_gpu": 2, **optimizer, **_CONFIGS[dtype]}
    with infinity.initialize(model=model, config=config)[0] as engine:
        call = {"engine": engine, "model": model, "train_batch": lambda x: engine.train_batch(iter([x]))}[calls]
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call(*given)
        return "\n".join(getattr(caught.value, "__notes__", []))


@pytest.mark.deep(but=11)
@pytest.mark.parametrize("dtype", _CONFIGS, ids=str)
@pytest.mark.parametrize("kind", _MODELS)
def test_inputs_of_another_dtype(kind: str, dtype: torch.dtype) -> None:
    given = torch.float32 if dtype != torch.float32 else torch.float64
    notes = _notes(_MODELS[kind](), dtype, torch.ones(2, 2, 4, dtype=given))
    name = str(dtype).removeprefix("torch.")
    assert f"Weights are {name}. The model was called with {str(given).removeprefix('torch.')}: cast it" in notes
    assert f"x.to({dtype})" in notes
    assert ("auto_cast" in notes) == (dtype != torch.float32)


@pytest.mark.parametrize("calls", ["engine", "model", "train_batch"])
def test_whoever_calls_the_model(calls: str) -> None:
    assert "cast it" in _notes(nn.Linear(4, 4), torch.bfloat16, torch.ones(2, 4), calls=calls)


def test_notes_of_errors_about_dtypes_and_of_others() -> None:
    notes = _notes(_MakesItsOwn(4, 4), torch.bfloat16, torch.ones(2, 4, dtype=torch.bfloat16))
    assert "What forward makes" in notes and "dtype=torch.bfloat16" in notes
    assert "torch.int64" in _notes(nn.Embedding(4, 4), torch.bfloat16, torch.ones(2, 4))  # not of whole numbers
    assert _notes(nn.Linear(4, 4), torch.bfloat16, torch.ones(2, 3, dtype=torch.bfloat16)) == ""
