"""What a forward computes, held against what can be said on paper."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import infinity
from infinity.deepspeed.profiler.flops_profiler import (
    FlopsProfiler,
    duration_to_string,
    flops_to_string,
    get_model_profile,
    number_to_string,
    params_to_string,
)
from infinity.errors import StepError

_BATCH, _LENGTH, _WIDTH, _HEADS, _CLASSES, _DEPTH = 2, 8, 32, 4, 10, 3


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], _HEADS, _WIDTH // _HEADS)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        mixed = scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Attention() for _ in range(_DEPTH))
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


_TOKENS = _BATCH * _LENGTH
_OF_ATTENTION = _TOKENS * _WIDTH * 4 * _WIDTH + 2 * _BATCH * _LENGTH * _LENGTH * _WIDTH
_MACS = _DEPTH * _OF_ATTENTION + _TOKENS * _WIDTH * _CLASSES
_PARAMS = _DEPTH * (4 * _WIDTH * _WIDTH + _WIDTH) + _WIDTH * _CLASSES + _CLASSES


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(_BATCH, _LENGTH, _WIDTH)


def test_counts_are_those_on_paper(x: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    found = get_model_profile(_Model(), input_shape=tuple(x.shape), as_string=False, print_profile=False)
    assert found == (2 * _MACS, _MACS, _PARAMS)
    assert capsys.readouterr().out == ""
    assert infinity.deepspeed.profiling.flops_profiler.get_model_profile is get_model_profile


def test_each_module_has_its_own(x: torch.Tensor) -> None:
    model = _Model()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    expected = model(x)
    profiler.stop_profile()
    model(x)  # not counted any more
    assert profiler.counts[model.layers[1]].flops == 2 * _OF_ATTENTION
    assert profiler.counts[model.layers[1].into].flops == 2 * _TOKENS * _WIDTH * 3 * _WIDTH
    assert profiler.count_of(model.layers).flops == 2 * _DEPTH * _OF_ATTENTION
    assert profiler.get_total_macs() == _MACS
    assert profiler.get_total_params() == _PARAMS
    seconds = [profiler.count_of(each).seconds for each in (model, model.layers, model.layers[0], model.layers[0].out)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] > 0
    assert torch.equal(expected, model(x))
    profiler.end_profile()
    assert profiler.get_total_flops() == 0
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_a_module_that_is_called_often_and_in_itself() -> None:
    class Often(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self(self.inner(x), depth - 1) if depth else x

    model = Often()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    profiler.stop_profile()
    assert profiler.counts[model].flops == profiler.counts[model.inner].flops == 4 * 2 * 16
    assert (profiler.counts[model].num_calls, profiler.counts[model.inner].num_calls) == (2, 4)


def test_what_an_exception_leaves(x: torch.Tensor) -> None:
    model = _Model()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(RuntimeError):
        model(x[:, :, 1:])
    model(x)
    profiler.stop_profile()
    assert profiler.counts[model].flops == 2 * _MACS


def test_ignored_modules_count_for_those_around_them(x: torch.Tensor) -> None:
    model = _Model()
    profiler = FlopsProfiler(model)
    profiler.start_profile([_Attention, nn.Linear])
    model(x)
    profiler.stop_profile()
    assert set(profiler.counts) == {model}
    assert profiler.get_total_flops() == 2 * _MACS


def test_nothing_to_call_with() -> None:
    with pytest.raises(StepError, match="Pass input_shape, args or kwargs"):
        get_model_profile(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (number_to_string(0), "0 "),
        (number_to_string(1.5e12), "1.5 T"),
        (number_to_string(12_345), "12.35 K"),
        (number_to_string(12_345, "M", 4), "0.0123 M"),
        (flops_to_string(2e9), "2 GFLOPS"),
        (params_to_string(7e9), "7 B"),
        (duration_to_string(0.00312), "3.12 ms"),
        (duration_to_string(3e-6), "3 us"),
    ],
)
def test_texts_are_those_of_deepspeed(told: str, text: str) -> None:
    assert told == text
