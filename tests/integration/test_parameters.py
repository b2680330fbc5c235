"""What scripts do with parameters besides computing: read, print, convert, copy. As in torch, or an error with the cure."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.errors import AccessError, BudgetTooSmallError, InfinityError, ModelError, OtherNumbersWarning
from tests.exactness.families import FAMILIES
from tests.exactness.lockstep import BF16, Lockstep, engine_on_nvme, make_batch

_NAME = "blocks.1.up.weight"


@pytest.fixture(params=["nvme", "none"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lockstep]:
    tier = request.param
    path = str(tmp_path) if tier == "nvme" else None
    offload = {key: {"device": tier, "nvme_path": path} for key in ("offload_param", "offload_optimizer")}
    with Lockstep.start(tmp_path, changes={"zero_optimization": offload}) as started:
        started.engine_step(0)
        yield started
        started.engine_step(1)
        started.require_equal()


_LOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "repr": repr,
    "str": str,
    "format": lambda p: f"{p}",
    "repr of data": lambda p: repr(p.data),
    "repr of a row": lambda p: repr(p.data[0]),
    "detach": lambda p: p.detach().tolist(),
    "detach cpu numpy": lambda p: p.detach().cpu().numpy().tolist(),
    "array": lambda p: np.asarray(p.data).tolist(),
    "histogram": lambda p: torch.histc(p.data.cpu(), 4).tolist(),
    "clamp": lambda p: p.clamp(-0.01, 0.01).tolist(),
    "strides": lambda p: (p.data.stride(), p.data.t().stride(), p.t().is_contiguous(), p[1:].shape),
    "type": lambda p: (p.type(), p.data.type(), p.data.requires_grad, isinstance(p, nn.Parameter)),
    "slices": lambda p: [part.sum().item() for part in p.detach().chunk(3)],
    "copy": lambda p: (type(copy.deepcopy(p.data)), copy.deepcopy(p.data).tolist()),
    "gradient through a view": lambda p: torch.autograd.grad(p.t()[0].pow(3).sum(), p)[0].tolist(),
    "norm penalty": lambda p: torch.autograd.grad(p.view(-1)[3:9].norm(), p)[0].tolist(),
    "same objects": lambda p: (p.to(p.device) is p, p.cpu() is p, p.float() is p, p.contiguous() is p),
    "matmul": lambda p: (p @ torch.ones(24, 2)).tolist(),
    "functional": lambda p: nn.functional.linear(torch.ones(24), p).tolist(),
    "another dtype": lambda p: p.to(torch.float64).tolist(),
    "item": lambda p: p[0, 0].item(),
    "foreach": lambda p: [part.tolist() for part in (*torch._foreach_norm([p, p]), *torch._foreach_add([p], 1.0))],
    "aten": lambda p: torch.ops.aten.sum(p).item(),
    "prims": lambda p: torch.ops.prims.neg(p).tolist(),
    "stack": lambda p: torch.stack([p, p]).tolist(),
    "equal": lambda p: (torch.equal(p, torch.zeros(104, 24)), torch.equal(p, p.detach().clone())),
    "total norm": lambda p: torch.nn.utils.get_total_norm([p]).item(),
    "parameters to vector": lambda p: nn.utils.parameters_to_vector([p]).tolist(),
    "iteration": lambda p: [row.sum().item() for row in p],
    "assigned from": lambda p: torch.empty(104, 24).copy_(p.detach()).tolist(),
    "contains": lambda p: 0.0 in p,
}


def test_a_look_at_a_weight_gives_what_torch_gives(both: Lockstep) -> None:
    plain = nn.Parameter(both.reference.model.get_parameter(_NAME).detach().clone())
    for look, function in _LOOKS.items():
        assert function(both.model.get_parameter(_NAME)) == function(plain), look


@pytest.mark.deep(but=1)
def test_an_array_of_a_weight_cannot_be_written_to_in_silence(both: Lockstep) -> None:
    array = both.model.get_parameter(_NAME).detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.deep(but=1)
def test_a_view_in_grad_mode_is_written_to_only_where_torch_allows(both: Lockstep) -> None:
    for parameter in (both.reference.model.get_parameter(_NAME), both.model.get_parameter(_NAME)):
        with pytest.raises(RuntimeError, match="view of a leaf"):
            parameter[0].mul_(2)


_NOTHING: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda model: model.to("cpu"),
    "to device and dtype": lambda model: model.to(torch.device("cpu"), torch.float32, non_blocking=True),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "type": lambda model: model.type(torch.float32),
    "requires_grad_": lambda model: model.requires_grad_(),
    "apply": lambda model: model.apply(lambda module: None),
    "_apply": lambda model: model._apply(lambda tensor: tensor),
    "train": lambda model: model.train(),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("call", _NOTHING)
def test_a_conversion_to_what_the_model_is_does_nothing(call: str, both: Lockstep) -> None:
    parameters = list(both.model.parameters())
    assert _NOTHING[call](both.model) is both.model
    assert all(a is b for a, b in zip(both.model.parameters(), parameters, strict=True))


_OTHERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "half": (lambda model: model.half(), r"'embedding\.weight' cannot be cast to torch\.float16.*config"),
    "bfloat16": (
        lambda model: model.to(torch.bfloat16),
        r"'embedding\.weight' cannot be cast to torch\.bfloat16.*config",
    ),
    "double": (lambda model: model.double(), r"'embedding\.weight' cannot be cast to torch\.float64.*config"),
    "meta": (lambda model: model.to("meta"), r"'embedding\.weight' was used in moving to the meta device"),
    "to_empty": (lambda model: model.to_empty(device="meta"), r"'embedding\.weight' was used in moving"),
    "share_memory": (lambda model: model.share_memory(), r"'embedding\.weight' was used in share_memory_"),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("call", _OTHERS)
def test_a_conversion_to_something_else_is_refused_by_name(call: str, both: Lockstep) -> None:
    convert, message = _OTHERS[call]
    with pytest.raises(InfinityError, match=message):
        convert(both.model)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(3), r"'blocks\.1\.up\.weight' cannot be given the shape \(3,\)"),
        (torch.ones(104, 24, dtype=torch.float16), r"cannot be cast to torch\.float16"),
    ],
)
def test_data_that_does_not_fit_is_refused_by_name(values: torch.Tensor, message: str, both: Lockstep) -> None:
    parameter = both.model.get_parameter(_NAME)
    with pytest.raises(ModelError, match=message):
        parameter.data = values
    with infinity.GatheredParameters(parameter), pytest.raises(ModelError, match=message):
        parameter.data = values


@pytest.mark.deep(but=1)
def test_values_in_another_order_in_memory_are_warned_of_once(both: Lockstep) -> None:
    parameter = both.model.get_parameter(_NAME)
    values = parameter.detach().clone()
    with pytest.warns(
        OtherNumbersWarning, match=r"up\.weight' .*strides \(1, 104\).*before infinity.initialize"
    ) as caught:
        for _ in range(2):
            parameter.data = values.t().contiguous().t()
    assert len(caught) == 1 and torch.equal(parameter, values)
    parameter.data = values


@pytest.mark.deep(but=1)
def test_what_a_script_notes_on_a_parameter_is_pickled(both: Lockstep) -> None:
    parameter: Any = both.model.get_parameter(_NAME)
    parameter.decays = False
    copied = pickle.loads(pickle.dumps(both.model)).get_parameter(_NAME)
    assert copied.decays is False and type(copied) is nn.Parameter


@pytest.mark.deep
@pytest.mark.parametrize("operation", ["data_ptr", "untyped_storage", "storage", "__dlpack__"])
def test_memory_is_not_given_away(operation: str, both: Lockstep) -> None:
    for tensor in (both.model.get_parameter(_NAME).data, both.model.get_parameter(_NAME).detach()[1:]):
        with pytest.raises(AccessError, match=rf"up\.weight' was used in {operation} .*one module after the"):
            getattr(tensor, operation)()


@pytest.mark.deep(but=1)
def test_other_memory_is_refused_by_name(both: Lockstep) -> None:
    parameter = both.model.get_parameter(_NAME)
    storage: Any = torch.ones(parameter.shape).untyped_storage()
    refused = pytest.raises(ModelError, match=r"up\.weight' cannot be given other memory by set_.*copy_")
    with torch.no_grad(), refused:
        parameter.set_(storage)
    with torch.no_grad(), infinity.GatheredParameters(parameter), refused:
        parameter.set_(storage)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        parameter.set_(torch.ones(parameter.shape))
    with torch.no_grad(), pytest.raises(ModelError, match=r"'blocks\.1\.up\.weight' cannot be given the shape"):
        parameter.set_(torch.ones(3))
    with torch.no_grad(), pytest.raises(RuntimeError):
        parameter.resize_(2)
    assert parameter.shape == (104, 24)
    version = parameter._version
    with torch.no_grad():
        assert parameter.set_(parameter) is parameter
    assert parameter._version == version, "it is no write: torch's parametrizations do so"


def test_a_parameter_prints_between_backward_and_step(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        for step in range(2):
            both.engine_step(step)
        loss = both.engine(**make_batch(2))
        both.engine.backward(loss)
        text = repr(both.model.get_parameter(_NAME))
        assert text.startswith("Parameter containing:") and "size=(104, 24)" in text and "engine.step()" in text
        both.engine.step()


def test_an_exception_in_a_gathered_block_leaves_training_possible(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        with pytest.raises(KeyError), infinity.GatheredParameters(both.model.parameters()):
            raise KeyError("in the block")
        both.engine_step(1)
        both.require_equal()


def test_gathering_parameters_nobody_holds_does_nothing() -> None:
    param = nn.Parameter(torch.ones(3))
    with infinity.GatheredParameters([param]), torch.no_grad():
        param.add_(1)
    assert torch.equal(param, torch.full((3,), 2.0))


def test_a_gather_beyond_the_budget_names_one_that_is_enough(tmp_path: Path) -> None:
    llama = next(case for case in FAMILIES if case.name == "llama")

    def start(budget_bytes: int) -> infinity.Engine:
        return engine_on_nvme(tmp_path, llama.make("none"), {**BF16, "infinity": {"host_memory_budget": budget_bytes}})

    with pytest.raises(BudgetTooSmallError) as refused:
        start(1)
    with start(refused.value.minimum_bytes) as engine:
        with (
            pytest.raises(BudgetTooSmallError, match="gather fewer parameters at a time") as refused,
            infinity.GatheredParameters(engine.module.parameters()),
        ):
            pass
        assert f"{engine.plan.host_budget_bytes} bytes" in str(refused.value)
        with infinity.GatheredParameters(next(engine.module.parameters())):
            pass
    with start(refused.value.minimum_bytes) as engine, infinity.GatheredParameters(engine.module.parameters()):
        assert all(bool(parameter.isfinite().all()) for parameter in engine.module.parameters())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[infinity.Engine]:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    with engine_on_nvme(tmp_path, model, optimizer=_optimizer(model)) as engine:
        yield engine


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_parameters_cannot_be_swapped(engine: infinity.Engine) -> None:
    parameter = next(engine.module.parameters())
    other = nn.Parameter(torch.ones(8, 8))
    for pair in ((parameter, other), (other, parameter)):
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(*pair)
    with infinity.GatheredParameters(parameter), pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(parameter, other)
    with pytest.raises(ModelError, match=r"\(8, 8\) is not a parameter of the engine's model"):
        engine._parts.consistent.has_state(other)
