"""Optimizers by the names and parameters of a config."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from infinity.errors import (
    ConfigError,
    OptimizerNotPageableError,
)
from infinity.optim.classes.lion import Lion
from infinity.optim.classes.muon import Muon
from infinity.optim.classes.one_bit_adam import OneBitAdam
from infinity.optim.classes.uncorrected_adam import UncorrectedAdam
from infinity.optim.registry import resolve
from tests.unit.optim.memory_backend import Section


def _resolve(name: str, **params: Any) -> functools.partial[torch.optim.Optimizer]:
    return resolve(Section(name, params), torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("Adam", torch.optim.AdamW),  # DeepSpeed's default is decoupled decay
        ("adamw", torch.optim.AdamW),
        ("ADAMW", torch.optim.AdamW),
        ("SGD", torch.optim.SGD),
        ("adagrad", torch.optim.Adagrad),
        ("RMSProp", torch.optim.RMSprop),
        ("lion", Lion),
        ("OneBitAdam", OneBitAdam),
        ("NAdam", torch.optim.NAdam),
        ("radam", torch.optim.RAdam),
        ("Adadelta", torch.optim.Adadelta),
    ],
)
def test_names(name: str, cls: type[torch.optim.Optimizer]) -> None:
    assert _resolve(name).func is cls


@pytest.mark.parametrize(
    ("name", "mode", "cls"),
    [
        ("Adam", False, torch.optim.Adam),
        ("Adam", True, torch.optim.AdamW),
        ("AdamW", False, torch.optim.AdamW),  # as in DeepSpeed: the name says it already
    ],
)
def test_adam_w_mode(name: str, mode: bool, cls: type[torch.optim.Optimizer]) -> None:
    recipe = _resolve(name, adam_w_mode=mode)
    assert recipe.func is cls
    assert "adam_w_mode" not in recipe.keywords


def test_weight_decay_defaults_to_deepspeeds() -> None:
    assert _resolve("AdamW").keywords["weight_decay"] == 0.0
    assert _resolve("AdamW", weight_decay=0.3).keywords["weight_decay"] == 0.3
    assert "weight_decay" not in _resolve("AdamW", torch_adam=True).keywords


def test_lion_defaults_to_deepspeeds() -> None:
    assert _resolve("Lion").keywords == {"lr": 1e-3, "betas": (0.9, 0.999)}
    assert _resolve("Lion", lr=2e-4, betas=[0.9, 0.99]).keywords == {"lr": 2e-4, "betas": (0.9, 0.99)}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_where_torch_has_it(name: str) -> None:
    assert _resolve(name, lr=0.1).keywords["fused"] is True
    assert _resolve(name, lr=0.1, fused=False).keywords["fused"] is False
    assert "fused" not in _resolve(name, lr=0.1, foreach=True).keywords


@pytest.mark.parametrize("name", ["RMSprop", "Lion", "NAdam"])
def test_not_fused_where_torch_lacks_it(name: str) -> None:
    assert "fused" not in _resolve(name, lr=0.1).keywords


def test_the_config_is_not_modified() -> None:
    params = {"lr": 0.1, "torch_adam": True, "betas": [0.9, 0.99]}
    kwargs = resolve(Section("Adam", params), torch.device("cpu")).keywords
    assert params == {"lr": 0.1, "torch_adam": True, "betas": [0.9, 0.99]}
    assert kwargs == {"lr": 0.1, "betas": (0.9, 0.99), "fused": True}


def test_parameters_that_change_nothing_are_dropped() -> None:
    kwargs = _resolve("Adam", bias_correction=True, fp32_optimizer_states=True, set_grad_none=True).keywords
    assert kwargs == {"weight_decay": 0.0, "fused": True}


def test_parameters_that_would_change_the_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params\.fp32_optimizer_states"):
        _resolve("AdamW", fp32_optimizer_states=False)
    with pytest.raises(ConfigError, match=r"bias_correction.*amsgrad is not defined"):
        _resolve("AdamW", bias_correction=False, amsgrad=True)


@pytest.mark.parametrize(
    ("name", "params", "is_decoupled"),
    [("AdamW", {}, True), ("Adam", {}, True), ("Adam", {"adam_w_mode": False, "amsgrad": False}, False)],
)
def test_adam_without_correction_for_bias(name: str, params: dict[str, Any], is_decoupled: bool) -> None:
    found = _resolve(name, bias_correction=False, lr=0.1, **params)
    assert found.func is UncorrectedAdam
    assert found.keywords == {"lr": 0.1, "weight_decay": 0.0, "decoupled_weight_decay": is_decoupled}


def test_unknown_parameter_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'optimizer\.params\.weight_decai' \(did you mean 'weight_decay'"):
        _resolve("AdamW", weight_decai=0.1)


def test_max_grad_norm_points_to_gradient_clipping() -> None:
    with pytest.raises(ConfigError, match="gradient_clipping"):
        _resolve("AdamW", max_grad_norm=1.0)


def test_differentiable_is_refused() -> None:
    with pytest.raises(ConfigError, match="differentiable"):
        _resolve("AdamW", differentiable=True)


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'optimizer.type' = 'AdamWW'.*Did you mean 'AdamW'"):
        _resolve("AdamWW")


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "Adafactor", "onebitlamb", "ZeroOneAdam", "MuSGD"])
def test_optimizers_that_mix_elements_are_refused_by_name(name: str) -> None:
    with pytest.raises(OptimizerNotPageableError, match=f"(?i)optimizer {name} cannot be paged: .+"):
        _resolve(name)


@pytest.mark.parametrize("name", ["ZeroOneAdam", "OneBitLamb"])
def test_the_other_1_bit_ones_name_the_nearest(name: str) -> None:
    with pytest.raises(OptimizerNotPageableError, match=r'The nearest (is|are) .*"OneBitAdam"'):
        _resolve(name)


def test_what_deepspeed_takes_for_one_bit_adam() -> None:
    taken = _resolve("OneBitAdam", lr=1e-4, freeze_step=7, cuda_aware=True, comm_backend_name="nccl", amsgrad=False)
    assert taken.keywords == {"lr": 1e-4, "freeze_step": 7, "fused": True}
    with pytest.raises(ConfigError, match="eps_inside_sqrt"):
        _resolve("OneBitAdam", eps_inside_sqrt=True)


def test_muon_is_deepspeeds_whether_torch_has_one_or_not() -> None:
    taken = _resolve("muon", lr=0.01, adam_lr=1e-4, ns_method="gram", betas=[0.8, 0.9])
    assert taken.func is Muon and taken.keywords["adam_lr"] == 1e-4
    with pytest.raises(ConfigError, match="momentum"):
        _resolve("Muon", momentun=0.9)
