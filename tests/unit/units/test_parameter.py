"""Parameters that are paged out: their metadata is true, their values are true or refused, and nothing changes in silence."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import AccessError, ModelError
from infinity.units.parameter import PagedParameter, ResidentParameter
from tests.unit.stage import Held


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.requires_grad_(False)
    return model


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def held(request: pytest.FixtureRequest) -> Held:
    return Held(_model(), dtype=request.param)


_NAME = "0.weight"
_FROZEN = "1.weight"


def _require_untouched(held: Held) -> None:
    """Nothing that rests has changed, and what a later use would see neither."""
    for fqn, values in held.values.items():
        assert torch.equal(held.stored(fqn), values), fqn
        parameter = held.model.get_parameter(fqn)
        assert isinstance(parameter, PagedParameter)
        assert torch.equal(copy.deepcopy(parameter).detach(), values), f"a copy of {fqn} differs"


def test_set_to_itself_is_no_write(held: Held) -> None:
    """torch's parametrizations do so, and a count of a write brings the weight to the drive."""
    parameter = held.model.get_parameter(_NAME)
    version = parameter._version
    with torch.no_grad():
        assert parameter.set_(parameter) is parameter
    assert parameter._version == version and held.source.fetched == []


_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index": lambda p: p[1].clone(),
    "matmul": lambda p: p @ torch.ones(3, 2, dtype=p.dtype),
    "functional": lambda p: torch.nn.functional.linear(torch.ones(3, dtype=p.dtype), p),
    "to": lambda p: p.to(torch.float64),
    "data": lambda p: p.data.clone(),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "foreach norm": lambda p: torch._foreach_norm([p, p])[1],
    "foreach add": lambda p: torch._foreach_add([p], 1.0)[0],
    "aten": lambda p: torch.ops.aten.sum(p),
    "prims": lambda p: torch.ops.prims.neg(p),
    "stack": lambda p: torch.stack([p, p]),
    "equal": lambda p: torch.equal(p, torch.zeros(3, 3, dtype=p.dtype)),
    "total norm": lambda p: torch.nn.utils.get_total_norm([p]),
    "parameters to vector": lambda p: nn.utils.parameters_to_vector([p]),
    "iteration": lambda p: [row.sum().item() for row in p],
    "contiguous": lambda p: p.contiguous().clone(),
    "numpy": lambda p: p.detach().float().numpy().copy().tolist(),
    "assigned from": lambda p: torch.empty(3, 3, dtype=p.dtype).copy_(p.detach()),
    "contains": lambda p: 0.0 in p,
    "autograd": lambda p: torch.autograd.grad((p.detach().requires_grad_() * 2).sum(), [], allow_unused=True),
}


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    return value


@pytest.mark.deep(but=30)
@pytest.mark.parametrize("fqn", [_NAME, _FROZEN])
@pytest.mark.parametrize("read", _READS)
def test_a_read_outside_is_true(held: Held, read: str, fqn: str) -> None:
    function = _READS[read]
    plain = nn.Parameter(held.values[fqn].clone(), requires_grad=fqn == _NAME)
    try:
        expected = _comparable(function(plain))
    except Exception as error:
        with pytest.raises((type(error), AccessError)):
            function(held.model.get_parameter(fqn))
        _require_untouched(held)
        return
    assert _comparable(function(held.model.get_parameter(fqn))) == expected
    _require_untouched(held)


_WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add_": lambda p: p.add_(1),
    "copy_": lambda p: p.copy_(torch.ones(3, 3)),
    "normal_": lambda p: p.normal_(),
    "item assignment": lambda p: p.__setitem__(0, 5.0),
    "init": lambda p: nn.init.constant_(p, 3.0),
    "data": lambda p: p.data.add_(1),
    "data item": lambda p: p.data.__setitem__(0, 5.0),
    "assigned data": lambda p: setattr(p, "data", torch.ones(3, 3, dtype=p.dtype)),
    "detach": lambda p: p.detach().add_(1),
    "view": lambda p: p.view(-1).add_(1),
    "row": lambda p: p[0].fill_(9),
    "out": lambda p: torch.add(torch.ones(3, 3, dtype=p.dtype), 1, out=p),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "aten": lambda p: torch.ops.aten.add_.Scalar(p, 1.0),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.ones(9, dtype=p.dtype), [p]),
    "masked": lambda p: p.masked_fill_(torch.eye(3) > 0, 4.0),
    "index_add_": lambda p: p.index_add_(0, torch.tensor([0]), torch.ones(1, 3, dtype=p.dtype)),
    "resize_": lambda p: p.resize_(2),
    "swap": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.ones(3, 3, dtype=p.dtype))),
}


def _require_written(held: Held, fqn: str, write: str) -> None:
    """What plain torch makes of the write is what is seen, by whatever way, and what rests."""
    plain = nn.Parameter(held.values[fqn].clone(), requires_grad=fqn == _NAME)
    parameter = held.model.get_parameter(fqn)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        with contextlib.suppress(RuntimeError):  # torch refuses some itself
            _WRITES[write](plain)
        torch.manual_seed(1)
        try:
            _WRITES[write](parameter)
        except (AccessError, RuntimeError) as error:
            if isinstance(error, AccessError):
                assert fqn in str(error)
            assert write in ("resize_", "swap")
        else:
            held.values[fqn] = plain.detach()
    assert held.model.get_parameter(fqn) is parameter
    assert parameter.shape == (3, 3)
    _require_untouched(held)
    for unit in held.units:
        held.coordinator.parameter_cache.evict(unit)
    _require_untouched(held)


@pytest.mark.deep(but=20)
@pytest.mark.parametrize("fqn", [_NAME, _FROZEN])
@pytest.mark.parametrize("write", _WRITES)
def test_a_write_outside_counts_or_is_refused_by_name(held: Held, write: str, fqn: str) -> None:
    _require_written(held, fqn, write)


@pytest.mark.parametrize("write", _WRITES)
def test_a_write_outside_counts_where_weights_never_leave_memory(write: str) -> None:
    _require_written(Held(_model(), is_paged=False), _NAME, write)


@pytest.mark.parametrize("write", ["add_", "data", "row", "foreach"])
def test_where_nothing_can_be_stored_a_write_is_refused_and_forgotten(write: str) -> None:
    held = Held(_model(), stores_writes=False)
    with torch.no_grad(), pytest.raises(ModelError, match=_NAME):
        _WRITES[write](held.model.get_parameter(_NAME))
    _require_untouched(held)


def test_a_parameter_outlives_its_engine_with_an_error() -> None:
    model = _model()
    held = Held(model)
    parameter = held.model.get_parameter(_NAME)
    del held
    with pytest.raises(AccessError, match="after its engine was dropped"):
        parameter.sum()


def test_an_open_unit_has_ordinary_parameters_that_copy_truly(held: Held) -> None:
    unit = held.units[0]
    with held.coordinator.lock.held("this test"), held.coordinator.held([unit]):
        parameter = held.model.get_parameter(_NAME)
        assert type(parameter) is ResidentParameter
        assert torch.equal(parameter, held.values[_NAME])
        duplicate = copy.deepcopy(parameter)
        assert type(duplicate) is nn.Parameter
        assert torch.equal(duplicate, held.values[_NAME])
        assert duplicate.data_ptr() != parameter.data_ptr()
    held.coordinator.parameter_cache.unbind_unused(held.units)
    assert type(held.model.get_parameter(_NAME)) is PagedParameter
