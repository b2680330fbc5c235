"""Our optimizer classes against their formulas, written down in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config.resolved import OptimizerSection
from infinity.optim.classes import IS_MOMENTUM, Lamb, Lion, Muon, OneBitAdam, UncorrectedAdam, is_for_muon
from infinity.optim.wrapped_optimizer import wrap_optimizer


def _drawn(num: int, seed: int = 1, shape: tuple[int, ...] = (13, 11)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(num)]


def _param(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(_drawn(1, seed=0)[0].to(dtype))


def _trained(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> torch.Tensor:
    [param] = optimizer.param_groups[0]["params"]
    for gradient in gradients:
        param.grad = gradient.to(param.dtype, copy=True)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (Lion, {"lr": -1.0}, "learning rate"),
        (Lion, {"lr": float("nan")}, "learning rate"),
        (Lion, {"betas": (0.9, 1.0)}, "beta parameter at index 1"),
        (Lion, {"betas": (-0.1, 0.9)}, "beta parameter at index 0"),
        (Lion, {"weight_decay": -0.1}, "weight_decay"),
        (UncorrectedAdam, {"eps": -1.0}, "epsilon"),
        (Lamb, {"eps": -1.0}, "epsilon"),
        (Lamb, {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff 2.0, max_coeff 1.0"),
        (OneBitAdam, {"freeze_step": 0}, "freeze_step"),
    ],
)
def test_values_out_of_range_are_named(cls: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls([_param()], **arguments)


def test_what_all_of_them_do_with_closures_and_gradients() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = Lion([param], lr=0.5, weight_decay=0.5)
    optimizer.step()
    assert param.tolist() == [1.0, 1.0, 1.0] and not optimizer.state, "it has no gradient"
    optimizer.param_groups[0]["weight_decay"] = 0.0
    calls: list[bool] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        param.grad = torch.ones(3)
        return 7.0

    with torch.no_grad():
        assert optimizer.step(closure) == 7.0
    assert calls == [True] and param.tolist() == [0.5, 0.5, 0.5]
    param.grad = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_follows_its_paper(maximize: bool) -> None:
    param = _param()
    optimizer = Lion([param], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.3, maximize=maximize)
    weight, momentum = param.detach().clone(), torch.zeros(13, 11)
    for gradient in _drawn(5):
        g = -gradient if maximize else gradient
        weight = weight - 1e-2 * (torch.sign(0.9 * momentum + 0.1 * g) + 0.3 * weight)
        momentum = 0.99 * momentum + 0.01 * g
    torch.testing.assert_close(_trained(optimizer, _drawn(5)), weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], momentum, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adam_without_correction(decay: float, is_decoupled: bool) -> None:
    param = _param()
    w, m, v = param.detach().clone(), torch.zeros(13, 11), torch.zeros(13, 11)
    settings = {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": decay, "decoupled_weight_decay": is_decoupled}
    optimizer = UncorrectedAdam([param], 0.1, **settings)  # type: ignore[arg-type]
    for gradient in _drawn(3):
        g = gradient + (0.0 if is_decoupled else decay) * w
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w = w - 0.1 * (m / (v.sqrt() + 1e-3) + (decay if is_decoupled else 0.0) * w)
    torch.testing.assert_close(_trained(optimizer, _drawn(3)), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-3},
        {"lr": 0.1, "bias_correction": False},
        {"lr": 0.1, "eps_inside_sqrt": True, "eps": 1e-2},
        {"lr": 0.1, "max_coeff": 0.2},
        {"lr": 0.01, "min_coeff": 5.0},
    ],
)
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_lamb_follows_its_formula(start: float, settings: dict[str, Any]) -> None:
    given = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_coeff": 10.0, "min_coeff": 0.01, **settings}
    beta1, beta2 = given["betas"]
    w, m, v = start * _param().detach(), torch.zeros(13, 11), torch.zeros(13, 11)
    optimizer = Lamb([nn.Parameter(w.clone())], **settings)
    for step, g in enumerate(_drawn(3), start=1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        root = (v + given["eps"]).sqrt() if given.get("eps_inside_sqrt") else v.sqrt() + given["eps"]
        u = m / root + given["weight_decay"] * w
        quotient = 1.0
        if w.norm() > 0 and u.norm() > 0:
            quotient = min(max(float(w.norm() / u.norm()), given["min_coeff"]), given["max_coeff"])
        correction = 1.0
        if given.get("bias_correction", True):
            correction = math.sqrt(1 - beta2**step) / (1 - beta1**step)
        w = w - given["lr"] * correction * quotient * u
    torch.testing.assert_close(_trained(optimizer, _drawn(3)), w, rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------------------------------------- 1-bit Adam

_FREEZE, _BETAS, _LR, _DECAY = 3, (0.9, 0.99), 1e-2, 0.1


@pytest.mark.parametrize("fused", [True, False])
def test_the_warm_up_has_the_bits_of_adamw(fused: bool) -> None:
    options: dict[str, Any] = {"lr": _LR, "betas": _BETAS, "weight_decay": _DECAY, "fused": fused}
    one_bit = OneBitAdam([_param(torch.float32)], freeze_step=_FREEZE, **options)
    adamw = torch.optim.AdamW([_param(torch.float32)], foreach=False, **options)
    assert torch.equal(_trained(one_bit, _drawn(_FREEZE)), _trained(adamw, _drawn(_FREEZE)))
    assert not torch.equal(_trained(one_bit, _drawn(1)), _trained(adamw, _drawn(1)))


@pytest.mark.parametrize("corrects", [True, False])
def test_after_it_the_variance_stays(corrects: bool) -> None:
    param = _param()
    optimizer = OneBitAdam([param], _LR, _FREEZE, corrects, _BETAS, weight_decay=_DECAY)
    weight, momentum, variance = param.detach().clone(), torch.zeros(13, 11), torch.zeros(13, 11)
    for number, gradient in enumerate(_drawn(7), 1):
        momentum = _BETAS[0] * momentum + (1 - _BETAS[0]) * gradient
        if number <= _FREEZE:
            variance = _BETAS[1] * variance + (1 - _BETAS[1]) * gradient.square()
        of_momentum = 1 - _BETAS[0] ** number if corrects else 1.0
        of_variance = 1 - _BETAS[1] ** min(number, _FREEZE) if corrects else 1.0
        update = (momentum / of_momentum) / ((variance / (of_variance)).sqrt() + 1e-8)
        weight = weight - _LR * (update + _DECAY * weight)
    torch.testing.assert_close(_trained(optimizer, _drawn(7)), weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], variance, rtol=1e-12, atol=1e-12)
    optimizer.param_groups[0][IS_MOMENTUM] = True  # from other ranks, too
    _trained(optimizer, _drawn(1, seed=2))
    assert torch.equal(optimizer.state[param]["exp_avg"], _drawn(1, seed=2)[0])


def test_an_element_without_a_variance_stays_where_it_is() -> None:
    param = _param()
    before = param.detach().clone()
    never, later = torch.ones(13, 11), torch.ones(13, 11)
    never[7, 0] = 0.0
    trained = _trained(OneBitAdam([param], freeze_step=2), [never, never, later])
    assert trained[7, 0] == before[7, 0] and (trained != before).sum() == 13 * 11 - 1


# --------------------------------------------------------------------------------------------------------------- Muon


@pytest.mark.parametrize("shape", [(12, 12), (24, 6), (6, 24), (8, 2, 3, 3), (3, 10, 4)])
def test_a_step_of_muon_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(shape, generator=generator))
    before, momentum = param.detach().clone(), torch.zeros(shape)
    optimizer = Muon([{"params": [param], "use_muon": True}], lr=0.1, momentum=0.9, weight_decay=0.5)
    for _ in range(2):
        before = param.detach().clone()
        param.grad = torch.randn(shape, generator=generator)
        momentum = 0.9 * momentum + 0.1 * param.grad
        ahead = 0.9 * momentum + 0.1 * param.grad
        optimizer.step()
    update = (0.95 * before - param.detach()) / 0.1 / max(1.0, shape[-2] / shape[-1]) ** 0.5
    if len(shape) == 4:
        update, ahead = update.flatten(1), ahead.flatten(1)
    assert torch.linalg.svdvals(update).sub(1).abs().max() < 0.5
    left, _, right = torch.linalg.svd(ahead, full_matrices=False)
    alike = nn.functional.cosine_similarity(update.flatten(), (left @ right).flatten(), dim=0)
    assert alike > 0.95
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], momentum)


def test_the_rest_of_muon_goes_by_adam() -> None:
    params = [nn.Parameter(torch.linspace(-1, 1, 10)) for _ in range(2)]
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1}
    mine = Muon([{"params": params[:1], "use_muon": False}], adam_lr=0.01, **settings)
    torchs = torch.optim.AdamW(params[1:], lr=0.01, **settings)
    for step in range(5):
        for param in params:
            param.grad = torch.linspace(-2, 3, 10) * (step + 1)
        mine.step()
        torchs.step()
    torch.testing.assert_close(params[0], params[1])
    assert mine.state[params[0]]["step"] == 5


def test_which_parameters_are_muons() -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(4, 4), "inner": nn.Linear(4, 4), "lm_head": nn.Linear(4, 4)})
    found = {name for name, param in model.named_parameters() if is_for_muon(name, param)}
    assert found == {"inner.weight"}
    vars(model.inner.weight)["use_muon"], vars(model.lm_head.weight)["use_muon"] = False, True
    found = {name for name, param in model.named_parameters() if is_for_muon(name, param)}
    assert found == {"lm_head.weight"}, "what the script has said comes first"


def test_groups_are_divided_for_muon_with_what_they_say() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    section = OptimizerSection("Muon", {"lr": 0.5, "adam_lr": 0.25})
    given = [{"params": list(model[0].parameters()), "weight_decay": 0.3}, {"params": list(model[1].parameters())}]
    wrapped_optimizer = wrap_optimizer(section, model.named_parameters(), "cpu", model_parameters=given)
    told = [
        (group["use_muon"], group["lr"], group["weight_decay"], len(group["params"]))
        for group in wrapped_optimizer.param_groups
    ]
    assert told == [(True, 0.5, 0.3, 1), (False, 0.25, 0.3, 1), (True, 0.5, 0.0, 1), (False, 0.25, 0.0, 1)]
    assert wrapped_optimizer.param_groups[0]["params"] == [model[0].weight]
    empty = wrap_optimizer(section, model.named_parameters(), "cpu", model_parameters=[*given, {"params": []}])
    assert len(empty.param_groups) == 5, "a schedule may count them"
    alone = wrap_optimizer(section, model.named_parameters(), "cpu")
    assert [len(group["params"]) for group in alone.param_groups] == [2, 2]


def test_what_muon_refuses() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    for params, settings, told in (
        ([weight], {}, "group 0 has no 'use_muon'"),
        ([{"params": [weight]}], {}, "group 0 has no 'use_muon'"),
        ([{"params": [weight, bias], "use_muon": True}], {}, r"group 0 holds a parameter of shape \(2,\)"),
        ([{"params": [weight], "use_muon": True}], {"momentum": 1.0}, "momentum: 1.0"),
        ([{"params": [weight], "use_muon": True}], {"ns_method": "gramm"}, "not 'gram' or 'standard'"),
        ([{"params": [weight], "use_muon": True}], {"lr": -1.0}, "learning rate"),
    ):
        with pytest.raises(ValueError, match=told):
            Muon(params, **settings)
    optimizer = Muon([{"params": [weight], "use_muon": True}, {"params": [bias], "use_muon": False}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4], "each kind has its own"
    with pytest.raises(ValueError, match="has no 'use_muon'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2
