"""What gets past the class of a paged-out parameter and computes with it finds NaN or an error, and does not end the process."""

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
from infinity.units.parameter import placeholder
from tests.exactness.lockstep import everything_on_nvme

_CPU = torch.device("cpu")

_OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: t + 1,
    "clone": torch.clone,
    "copy to": lambda t: torch.zeros(4, 4).copy_(t),
    "sum": torch.sum,
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
    "sort": lambda t: torch.sort(t).values,
    "concatenation": lambda t: torch.cat([t, t]),
    "decomposition": torch.linalg.svd,
    "indexing": lambda t: t[torch.tensor([1, 2])],
    "list": lambda t: t.tolist(),
}


def _require_nothing(function: Callable[[], Any]) -> None:
    """It raises, or gives NaN alone."""
    try:
        found = function()
    except RuntimeError:
        return
    for tensor in found if isinstance(found, list | tuple) else [found]:
        assert torch.as_tensor(tensor).isnan().all()


@pytest.mark.parametrize("name", _OPERATIONS)
def test_no_operation_sees_a_value(name: str) -> None:
    tensor = placeholder(torch.float32, _CPU, torch.Size((4, 4)))
    _require_nothing(lambda: _OPERATIONS[name](tensor))
    assert tensor.shape == (4, 4) and tensor.dtype == torch.float32
    _require_nothing(lambda: placeholder(torch.float32, _CPU, torch.Size((1,))) + 0)  # nothing was written to it either


_WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: t.add_(1),
    "copy": lambda t: t.copy_(torch.ones_like(t)),
    "fill": lambda t: t.fill_(0),
    "one element": lambda t: t.view(-1)[0].fill_(0),
    "address": lambda t: t.data_ptr(),
    "fused": lambda t: torch._amp_foreach_non_finite_check_and_unscale_([t], torch.zeros(()), torch.ones(())),
}


@pytest.mark.parametrize("shape", [(), (1, 1), (64, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", _WRITES)
def test_nothing_writes_to_it(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        _WRITES[name](placeholder(dtype, _CPU, torch.Size(shape)))


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


def test_compiled_functions_see_no_values(model: nn.Module, scripted: Any) -> None:
    weight = model.get_parameter("0.weight")
    x = torch.ones(2, 4)
    with infinity.GatheredParameters([weight]):
        expected = scripted(x, weight)
    assert not expected.isnan().any()
    _require_nothing(lambda: scripted(x, weight))


def test_transforms_over_weights_see_no_values(model: nn.Module) -> None:
    weights = dict(model[0].named_parameters())  # type: ignore[index]

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.linear(torch.ones(2, 4), values["weight"], values["bias"]).sum()

    _require_nothing(lambda: torch.func.grad_and_value(loss)(weights)[1])
    with torch.no_grad(), infinity.GatheredParameters(weights.values()):
        found = torch.func.grad(loss)(weights)
    assert torch.equal(found["weight"], torch.full((4, 4), 2.0))
