"""Weights that a script writes to between steps, in the ways of plain torch, with nothing gathered: what it writes counts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import infinity
from infinity.errors import AccessError, ModelError
from tests.exactness.lockstep import PLAIN, engine_on_nvme, make_batch, take_steps
from tests.exactness.written import MODES, train
from tests.twins import Twins


@torch.no_grad()
def _rows(model: nn.Module) -> None:
    weight = model.get_parameter("blocks.1.up.weight")
    weight[1] = 0.25
    weight[2:4].fill_(0.5)
    weight.t()[3].mul_(2)
    weight.view(-1)[7:9] = -1.0
    weight.detach()[10, :5].zero_()
    weight.data[11][weight.data[11] > 0] = 0.0


@torch.no_grad()
def _foreach(model: nn.Module) -> None:
    parameters = list(model.parameters())
    torch._foreach_mul_(parameters, 0.75)
    torch._foreach_add_(parameters, [torch.full_like(p, 0.0625) for p in parameters])
    torch._foreach_lerp_([p.data for p in parameters], [p.detach().sign() for p in parameters], 0.125)
    torch._foreach_addcmul_(parameters, parameters, parameters, [0.5] * len(parameters))


def _assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.75


def _vector(model: nn.Module) -> None:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(list(model.blocks[1].parameters()))
        nn.utils.vector_to_parameters(vector * 0.75, model.blocks[1].parameters())


@torch.no_grad()
def _singly(model: nn.Module) -> None:
    weight = model.get_parameter("blocks.1.up.weight")
    weight.add_(0.5)
    weight.data.add_(0.25)
    weight.data[5] = 0.125
    weight[6:8].copy_(torch.ones(2, weight.shape[1]))
    weight.detach().mul_(0.5)
    torch.ops.aten.add_.Scalar(weight, 1.0)
    weight.masked_fill_(weight > 1.6, 0.0)
    weight.index_add_(0, torch.tensor([9]), torch.ones(1, weight.shape[1], dtype=weight.dtype))
    bias, norm = model.get_parameter("blocks.0.up.bias"), model.get_parameter("blocks.0.norm.weight")
    bias.normal_()
    nn.init.constant_(norm, 0.75)
    torch.add(torch.ones_like(norm), 1, out=norm)


_WRITES = [_rows, _singly, _foreach, _assign, _vector]
_MODES = [
    pytest.param(mode, marks=[pytest.mark.deep] * (mode not in ("in backward", "bf16 resident"))) for mode in MODES
]


@pytest.mark.parametrize("mode", _MODES)
def test_a_write_between_steps_counts(mode: str, tmp_path: Path) -> None:
    def between(model: nn.Module, step: int) -> None:
        if step:
            for write in _WRITES:
                write(model)

    train(PLAIN, mode, tmp_path, between=between)


class _Ema:
    """The EMA of many a tutorial: a shadow in memory that is swapped in for evaluation."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}
        self.backup: dict[str, torch.Tensor] = {}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.shadow[name] = (0.5 * p.data + 0.5 * self.shadow[name]).clone()

    def swap_in(self) -> None:
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.backup[name] = p.data
                p.data = self.shadow[name]

    def swap_out(self) -> None:
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                p.data = self.backup[name]
        self.backup = {}


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["in backward", "deferred", "bf16", "resident", "vertical"])
def test_a_shadow_is_swapped_in_and_out(mode: str, tmp_path: Path) -> None:
    shadows: dict[int, _Ema] = {}

    def between(model: nn.Module, step: int) -> torch.Tensor:
        ema = shadows.setdefault(id(model), _Ema(model))
        ema.update()
        ema.swap_in()
        total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
        ema.swap_out()
        return total

    train(PLAIN, mode, tmp_path, between=between)


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["in backward", "bf16", "resident"])
@pytest.mark.parametrize("kind", ["AveragedModel", "EMA", "foreach"])
def test_averages_follow(kind: str, mode: str, tmp_path: Path) -> None:
    averages: dict[int, Any] = {}

    def between(model: nn.Module, step: int) -> torch.Tensor:
        if id(model) not in averages:
            if kind == "AveragedModel":
                averages[id(model)] = AveragedModel(model)
            elif kind == "EMA":
                averages[id(model)] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            else:
                averages[id(model)] = copy.deepcopy(model)
        average = averages[id(model)]
        if kind in ("AveragedModel", "EMA"):
            average.update_parameters(model)
        else:
            with torch.no_grad():
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.5)
        return torch.cat([p.detach().flatten() for p in average.parameters()])

    train(PLAIN, mode, tmp_path, between=between)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", ["in backward", "deferred", "bf16 resident", "vertical"])
def test_a_view_that_is_kept_shows_the_weight_as_it_is(mode: str, tmp_path: Path) -> None:
    views: dict[int, torch.Tensor] = {}

    def between(model: nn.Module, step: int) -> torch.Tensor:
        weight = model.get_parameter("blocks.1.up.weight")
        view = views.setdefault(id(model), weight.data[1:4].t())
        if step == 2:
            view.mul_(0.5)
        if step == 3:
            view[0] = 7.0
        return torch.cat([view.flatten(), weight.detach()[2]])

    train(PLAIN, mode, tmp_path, between=between)


def test_an_assigned_tensor_follows_the_weight(tmp_path: Path) -> None:
    """Assigned once more, it has in torch what the weight has become (Lightning's ModelPruning does so); unless written to."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    kept: dict[nn.Module, torch.Tensor] = {}

    def assign(model: Any, _: torch.optim.Optimizer) -> None:
        weight = model.blocks[0].up.weight
        kept.setdefault(model, torch.linspace(-0.5, 0.5, weight.numel()).reshape(weight.shape))
        weight.data = kept[model].data

    with Twins(tmp_path, PLAIN.make("none"), make) as twins:
        for step in range(4):
            if step == 3:
                for values in kept.values():
                    values.data.zero_()  # which torch does not count
            twins.change(assign)
            twins.step(lambda model, step=step: model(**make_batch(step)), by_hand=True)
        twins.require_equal()


@pytest.mark.parametrize("is_gathered", [False, True])
def test_two_parameters_do_not_get_one_memory(is_gathered: bool, tmp_path: Path) -> None:
    engine = engine_on_nvme(tmp_path, PLAIN.make("none"))
    with engine, infinity.GatheredParameters(engine.module.parameters(), enabled=is_gathered):
        one, other = (engine.module.get_parameter(f"blocks.{index}.up.weight") for index in (0, 2))
        one.data = values = torch.full(one.shape, 0.25)
        message = r"'blocks\.2\.up\.weight' and 'blocks\.0\.up\.weight' would share memory.*copy_"
        for shared in (values, one.data, one):
            with pytest.raises(ModelError, match=message):
                other.data = shared
        other.data = one.data.clone()
        assert other.eq(0.25).all()


def test_what_is_written_to_an_assigned_tensor_is_an_error(tmp_path: Path) -> None:
    with engine_on_nvme(tmp_path, PLAIN.make("none")) as engine:
        parameter = engine.module.get_parameter("blocks.0.up.weight")
        kept = torch.full(parameter.shape, 0.25)
        parameter.data = kept
        take_steps(engine, 0)
        kept.zero_()
        with pytest.raises(AccessError, match=r"'blocks\.0\.up\.weight'.* Write to p\.data"):
            engine(**make_batch(1))
        parameter.data = kept
        assert not parameter.detach().any()
        parameter.data = parameter.data + 1  # what was assigned before has nothing to do with it any more
        kept.add_(1)
        take_steps(engine, 1)


@pytest.mark.parametrize(
    "write", [lambda weight: weight.add_(1), lambda weight: torch._foreach_add_([weight.data], 1.0)]
)
def test_a_write_that_cannot_be_stored_is_refused_and_forgotten(write: Any, tmp_path: Path) -> None:
    with engine_on_nvme(tmp_path, PLAIN.make("none")) as engine:
        weight = engine.module.get_parameter("blocks.0.up.weight")
        before = weight.detach().clone()
        cache = engine._coordinator.parameter_cache
        stores, cache._writer = cache._writer, None
        with torch.no_grad(), pytest.raises(ModelError, match=r"'blocks.0.up.weight' was written to where that cannot"):
            write(weight)
        cache._writer = stores
        assert torch.equal(weight.detach(), before)


class _WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty, self.layer = nn.Parameter(torch.ones(0, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean() + self.empty.square().sum()


def test_a_write_is_not_taken_for_one_to_an_empty_parameter_in_front_of_the_weight(tmp_path: Path) -> None:
    with Twins(tmp_path, _WithEmpty(), is_tight=True) as twins:
        for _ in range(2):
            for model, _ in twins.sides:
                with torch.no_grad():
                    model.layer.weight.mul_(0.5)
            twins.step(lambda model: model(torch.ones(2, 8)))
        twins.require_equal()
