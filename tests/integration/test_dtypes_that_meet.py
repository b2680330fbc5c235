"""A forward in which two dtypes meet fails as in torch, with a note that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import infinity

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
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
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


def test_tensors_that_forward_makes() -> None:
    notes = _notes(_MakesItsOwn(4, 4), torch.bfloat16, torch.ones(2, 4, dtype=torch.bfloat16))
    assert "What forward makes" in notes and "dtype=torch.bfloat16" in notes


def test_ids_that_are_no_whole_numbers() -> None:
    assert "torch.int64" in _notes(nn.Embedding(4, 4), torch.bfloat16, torch.ones(2, 4))


def test_an_error_that_is_not_about_dtypes_gets_no_note() -> None:
    assert _notes(nn.Linear(4, 4), torch.bfloat16, torch.ones(2, 3, dtype=torch.bfloat16)) == ""


def test_the_cure_works() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True, "auto_cast": True}}
    engine, *_ = infinity.initialize(model=nn.Linear(4, 4), config={**config, "optimizer": {"type": "AdamW"}})
    with engine:
        assert engine(torch.ones(2, 4)).dtype == torch.bfloat16
