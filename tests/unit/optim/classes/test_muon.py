"""Muon with Adam for the rest: the formula, the division into groups, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infinity.optim.classes.muon import Muon, is_for_muon
from infinity.optim.registry import resolve
from infinity.optim.template import build_template
from tests.unit.optim.memory_backend import Section


@pytest.mark.parametrize("shape", [(12, 12), (24, 6), (6, 24), (8, 2, 3, 3), (3, 10, 4)])
def test_a_step_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
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


def test_the_rest_goes_by_adam() -> None:
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


def test_which_parameters_are_its_own() -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(4, 4), "inner": nn.Linear(4, 4), "lm_head": nn.Linear(4, 4)})
    found = {name for name, param in model.named_parameters() if is_for_muon(name, param)}
    assert found == {"inner.weight"}
    vars(model.inner.weight)["use_muon"], vars(model.lm_head.weight)["use_muon"] = False, True
    found = {name for name, param in model.named_parameters() if is_for_muon(name, param)}
    assert found == {"lm_head.weight"}, "what the script has said comes first"


def test_groups_are_divided_with_what_they_say() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    section = Section("Muon", {"lr": 0.5, "adam_lr": 0.25})
    given = [{"params": list(model[0].parameters()), "weight_decay": 0.3}, {"params": list(model[1].parameters())}]
    template = build_template(section, model.named_parameters(), "cpu", model_parameters=given)
    told = [
        (group["use_muon"], group["lr"], group["weight_decay"], len(group["params"])) for group in template.param_groups
    ]
    assert told == [(True, 0.5, 0.3, 1), (False, 0.25, 0.3, 1), (True, 0.5, 0.0, 1), (False, 0.25, 0.0, 1)]
    assert template.param_groups[0]["params"] == [model[0].weight]
    empty = build_template(section, model.named_parameters(), "cpu", model_parameters=[*given, {"params": []}])
    assert len(empty.param_groups) == 5, "a schedule may count them"
    alone = build_template(section, model.named_parameters(), "cpu")
    assert [len(group["params"]) for group in alone.param_groups] == [2, 2]


def test_without_rates_each_kind_has_its_own() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = Muon([{"params": [weight], "use_muon": True}, {"params": [bias], "use_muon": False}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]


def test_what_is_refused() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    for params, settings, told in (
        ([weight], {}, "group 0 does not say"),
        ([{"params": [weight]}], {}, "group 0 does not say"),
        ([{"params": [weight, bias], "use_muon": True}], {}, r"group 0 holds a parameter of shape \(2,\)"),
        ([{"params": [weight], "use_muon": True}], {"momentum": 1.0}, "momentum: 1.0"),
        ([{"params": [weight], "use_muon": True}], {"ns_method": "gramm"}, "not 'gram' or 'standard'"),
        ([{"params": [weight], "use_muon": True}], {"lr": -1.0}, "learning rate"),
    ):
        with pytest.raises(ValueError, match=told):
            Muon(params, **settings)
    optimizer = Muon([{"params": [weight], "use_muon": True}])
    with pytest.raises(ValueError, match="group 1 does not say"):
        optimizer.add_param_group({"params": [bias]})
    assert len(optimizer.param_groups) == 1


def test_no_argument_of_deepspeeds_config_is_unknown() -> None:
    params = {"lr": 1.0, "muon_lr": 0.1, "adam_lr": 0.2, "momentum": 0.9, "betas": [0.9, 0.99], "eps": 1e-8}
    taken = resolve(Section("MUON", {**params, "weight_decay": 0.1, "ns_method": "standard"}), torch.device("cpu"))
    assert taken.func is Muon
