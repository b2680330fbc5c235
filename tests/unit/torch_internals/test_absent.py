"""What gets below every guard and computes with a paged-out parameter fails, and does not end the process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from infinity.torch_internals import absent as absence
from infinity.torch_internals.absent import absent
from tests.exactness.lockstep import everything_on_nvme

_REFUSED = r"invalid|not in memory"
_CPU = torch.device("cpu")

_OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: t + 1,
    "clone": torch.clone,
    "copy to": lambda t: torch.zeros(4, 4).copy_(t),
    "copy from": lambda t: t.copy_(torch.zeros(4, 4)),
    "fill": lambda t: t[0, 0].fill_(0),
    "sum": torch.sum,
    "any": lambda t: torch.isnan(t).any(),
    "item": lambda t: t[0, 0].item(),
    "matmul": lambda t: torch.ones(4, 4) @ t,
    "linear": lambda t: functional.linear(torch.ones(2, 4), t, t[0]),
    "linear of bf16": lambda t: functional.linear(torch.ones(2, 4).bfloat16(), t.bfloat16()),
    "convolution": lambda t: functional.conv2d(torch.ones(1, 4, 2, 2), t[:, :, None, None]),
    "embedding": lambda t: functional.embedding(torch.tensor([0, 3]), t),
    "norm": lambda t: functional.layer_norm(torch.ones(2, 4), (4,), t[0], t[1]),
    "attention": lambda t: functional.scaled_dot_product_attention(t[None], t[None], t[None]),
    "foreach": lambda t: torch._foreach_add([t], 1.0),
    "numpy": lambda t: t.numpy(),
    "sort": torch.sort,
    "concatenation": lambda t: torch.cat([t, torch.ones(4, 4)]),
    "decomposition": torch.linalg.svd,
    "indexing": lambda t: t[torch.tensor([1, 2])],
    "address": lambda t: t.data_ptr(),
    "text": repr,
    "saving": lambda t: torch.save(t, "/dev/null"),
    "list": lambda t: t.tolist(),
}


@pytest.mark.parametrize("name", _OPERATIONS)
def test_no_operation_sees_a_value(name: str) -> None:
    tensor = absent(torch.float32, _CPU).expand(4, 4)
    with pytest.raises(RuntimeError, match=_REFUSED):
        _OPERATIONS[name](tensor)
    assert tensor.shape == (4, 4)
    assert tensor.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64, torch.bool])
def test_of_every_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match=_REFUSED):
        torch.equal(absent(dtype, _CPU).expand(3), torch.zeros(3, dtype=dtype))


def test_a_torch_that_cannot_do_it_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absence, "_switch_for_reading", lambda: None)
    assert absent(torch.float32, _CPU).isnan()


def test_other_tensors_are_as_before() -> None:
    absent(torch.float32, _CPU)
    assert torch.equal(torch.zeros(3) + 1, torch.ones(3))


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@pytest.fixture(scope="module")
def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(product)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    engine, *_ = infinity.initialize(model=module, config=everything_on_nvme(tmp_path))
    with engine:
        yield module


def test_compiled_functions_raise_instead_of_giving_nan(model: nn.Module, scripted: Any) -> None:
    weight = model.get_parameter("0.weight")
    x = torch.ones(2, 4)
    with infinity.GatheredParameters([weight]):
        expected = scripted(x, weight)
    assert not expected.isnan().any()
    with pytest.raises(RuntimeError, match=_REFUSED):
        scripted(x, weight)


def test_transforms_over_a_whole_call_raise_instead_of_giving_nan(model: nn.Module) -> None:
    weights = dict(model[0].named_parameters())  # type: ignore[index]

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.linear(torch.ones(2, 4), values["weight"], values["bias"]).sum()

    with pytest.raises(RuntimeError, match=_REFUSED):
        torch.func.grad(loss)(weights)
    with torch.no_grad(), infinity.GatheredParameters(weights.values()):
        found = torch.func.grad(loss)(weights)
    assert torch.equal(found["weight"], torch.full((4, 4), 2.0))


def test_a_parameter_without_elements_lacks_nothing(model: nn.Module, scripted: Any) -> None:
    assert scripted(torch.ones(2, 0), model.get_parameter("empty")).tolist() == [[0.0] * 4] * 2
