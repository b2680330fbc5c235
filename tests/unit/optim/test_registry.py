"""Optimizers by the names and parameters of a config."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from infinity.config.resolved import OptimizerSection
from infinity.errors import ConfigError, OptimizerNotPageableError
from infinity.optim.classes import Lion, Muon, OneBitAdam, UncorrectedAdam
from infinity.optim.registry import refuse_wrapper, resolve


def _resolve(name: str, **params: Any) -> functools.partial[torch.optim.Optimizer]:
    return resolve(OptimizerSection(name, params), torch.device("cpu"))


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


def test_defaults_are_deepspeeds() -> None:
    for name, mode, cls in (("Adam", False, torch.optim.Adam), ("Adam", True, torch.optim.AdamW)):
        assert _resolve(name, adam_w_mode=mode).func is cls and "adam_w_mode" not in _resolve(name).keywords
    assert _resolve("AdamW", adam_w_mode=False).func is torch.optim.AdamW, "the name says it already"
    assert _resolve("AdamW").keywords["weight_decay"] == 0.0
    assert _resolve("AdamW", weight_decay=0.3).keywords["weight_decay"] == 0.3
    assert "weight_decay" not in _resolve("AdamW", torch_adam=True).keywords
    assert _resolve("Lion").keywords == {"lr": 1e-3, "betas": (0.9, 0.999)}
    assert _resolve("Lion", lr=2e-4, betas=[0.9, 0.99]).keywords == {"lr": 2e-4, "betas": (0.9, 0.99)}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_where_torch_has_it(name: str) -> None:
    assert _resolve(name, lr=0.1).keywords["fused"] is True
    assert _resolve(name, lr=0.1, fused=False).keywords["fused"] is False
    assert "fused" not in _resolve(name, lr=0.1, foreach=True).keywords
    assert not any("fused" in _resolve(other, lr=0.1).keywords for other in ("RMSprop", "Lion", "NAdam"))


def test_the_config_is_not_modified() -> None:
    params = {"lr": 0.1, "torch_adam": True, "betas": [0.9, 0.99]}
    kwargs = resolve(OptimizerSection("Adam", params), torch.device("cpu")).keywords
    assert params == {"lr": 0.1, "torch_adam": True, "betas": [0.9, 0.99]}
    assert kwargs == {"lr": 0.1, "betas": (0.9, 0.99), "fused": True}


def test_parameters_that_change_nothing_are_dropped() -> None:
    kwargs = _resolve("Adam", bias_correction=True, fp32_optimizer_states=True, set_grad_none=True).keywords
    assert kwargs == {"weight_decay": 0.0, "fused": True}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("AdamW", {"fp32_optimizer_states": False}, r"optimizer\.params\.fp32_optimizer_states"),
        ("AdamW", {"bias_correction": False, "amsgrad": True}, "bias_correction.*amsgrad is not defined"),
        (
            "AdamW",
            {"weight_decai": 0.1},
            r"'optimizer\.params\.weight_decai'.*Did you mean 'weight_decay'\? AdamW takes lr",
        ),
        ("AdamW", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("AdamW", {"differentiable": True}, "differentiable"),
        ("AdamWW", {}, r"'optimizer.type' = 'AdamWW'.*Did you mean 'AdamW'"),
        ("OneBitAdam", {"eps_inside_sqrt": True}, "eps_inside_sqrt"),
        ("Muon", {"momentun": 0.9}, "momentum"),
    ],
)
def test_what_would_change_the_numbers_or_is_unknown(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(name, **params)


@pytest.mark.parametrize(
    ("name", "params", "is_decoupled"),
    [("AdamW", {}, True), ("Adam", {}, True), ("Adam", {"adam_w_mode": False, "amsgrad": False}, False)],
)
def test_adam_without_correction_for_bias(name: str, params: dict[str, Any], is_decoupled: bool) -> None:
    found = _resolve(name, bias_correction=False, lr=0.1, **params)
    assert found.func is UncorrectedAdam
    assert found.keywords == {"lr": 0.1, "weight_decay": 0.0, "decoupled_weight_decay": is_decoupled}


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        *((name, ".+") for name in ("LBFGS", "SparseAdam", "Adafactor", "MuSGD")),
        *((name, r'.* The nearest (is|are) .*"OneBitAdam"') for name in ("ZeroOneAdam", "onebitlamb")),
    ],
)
def test_optimizers_that_mix_elements_are_refused_by_name(name: str, cure: str) -> None:
    with pytest.raises(OptimizerNotPageableError, match=f"(?i)optimizer {name} cannot be paged: {cure}"):
        _resolve(name)


def test_what_deepspeed_takes_for_one_bit_adam() -> None:
    taken = _resolve("OneBitAdam", lr=1e-4, freeze_step=7, cuda_aware=True, comm_backend_name="nccl", amsgrad=False)
    assert taken.keywords == {"lr": 1e-4, "freeze_step": 7, "fused": True}


def test_muon_is_deepspeeds_whether_torch_has_one_or_not() -> None:
    rates = {"lr": 0.01, "muon_lr": 0.1, "adam_lr": 1e-4, "momentum": 0.9, "weight_decay": 0.1, "eps": 1e-8}
    taken = _resolve("muon", ns_method="standard", betas=[0.8, 0.9], **rates)
    assert taken.func is Muon and taken.keywords["adam_lr"] == 1e-4


class _Hides(torch.optim.Optimizer):
    """Shows the groups and states of an optimizer that no attribute holds directly."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._box = [[inner]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._box[0][0].param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._box[0][0].state


def test_a_wrapper_without_groups_of_its_own_is_refused() -> None:
    """Else its setters would empty the optimizer inside."""
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(OptimizerNotPageableError, match=r"no parameter groups of its own.*Pass the wrapped optimizer"):
        refuse_wrapper(_Hides(inner))
