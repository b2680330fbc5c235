"""One call of a block: the bits of plain torch from its inputs once more, or a refusal of what cannot be repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinity.activations.boundary import Boundary
from infinity.activations.refusal import Refusal
from infinity.activations.spill_space import SpillSpace
from infinity.device.compute import ComputeDevice
from infinity.loop.pager import Pager
from infinity.metrics.clock import StepClock
from infinity.vertical.call import Block, BlockCall, _checksum
from tests.unit.stage import trainable_unit


class _Bench:
    """A module that is computed as a whole by one micro-batch."""

    def __init__(self, module: nn.Module, *, is_trial: bool = True) -> None:
        def no_volume(num_bytes: int) -> Any:
            raise AssertionError("nothing leaves memory")

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            return tensor.detach(), tensor._version

        pack.__module__ = Pager.__module__  # it stands for the pager's: hooks of a user are refused
        self.module = module
        self.boundary = Boundary(SpillSpace(no_volume), StepClock(), pack, lambda saved: saved[0], None)
        self.call = BlockCall(
            Block("unit", module, trainable_unit(0, [(3,)])),
            module.forward,
            0,
            self.boundary,
            ComputeDevice(),
            is_trial=is_trial,
        )

    def run(self, *args: Any) -> Any:
        pack, unpack = self.boundary.hooks_with(None)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.call.run(args, {}, lambda function: function())[0]

    def backward(self, *roots: Tensor, earlier: Tensor | None = None) -> list[Tensor]:
        self.call._is_forward_over = True
        torch.autograd.backward([root.sum() for root in roots])
        return [gradient for _, gradient in self.call.backward(contextlib.nullcontext, lambda _: earlier)]


def _input() -> Tensor:
    return torch.linspace(-1, 1, 12).view(4, 3).requires_grad_() * 1


class _Forward(nn.Module):
    """Computes what it is told to."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 3))
        self.function = function
        self.register_buffer("count", torch.zeros(3))
        self.list: list[Any] = []

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


@pytest.mark.parametrize("kind", ["linear", "dropout", "batch norm"])
def test_gradients_are_those_of_one_backward(kind: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        last = {"linear": nn.Tanh(), "dropout": nn.Dropout(0.5), "batch norm": nn.BatchNorm1d(5)}[kind]
        return nn.Sequential(nn.Linear(3, 5), last)

    plain, bench = make(), _Bench(make())
    x, y = _input(), _input()
    torch.manual_seed(2)
    expected = plain(x)
    (gradient,) = torch.autograd.grad(expected.exp().sum(), x, retain_graph=True)
    expected.exp().sum().backward()
    torch.manual_seed(2)
    result = bench.run(y)
    torch.rand(3)
    state = torch.get_rng_state()
    assert torch.equal(result, expected)
    (found,) = bench.backward(result.exp())
    assert torch.equal(found, gradient)
    assert torch.equal(torch.get_rng_state(), state), "what follows draws as if nothing had been computed again"
    for a, b in zip(plain.parameters(), bench.module.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    for a, b in zip(plain.buffers(), bench.module.buffers(), strict=True):
        assert torch.equal(a, b), "buffers are written once"
    assert bench.call.is_over and not bench.call.kept


def _writes_input(self: Any, x: Tensor) -> Tensor:
    return x.mul_(2) * self.weight


def _returns_views(self: Any, x: Tensor) -> Any:
    result = x * self.weight
    return result, result[0]


def _keeps_its_result(self: Any, x: Tensor) -> Tensor:
    self.list.append(x * self.weight)
    return self.list[-1] * 2


def _changes_a_list(self: Any, x: Tensor, items: list[Any]) -> Tensor:
    items.append(1)
    return x * self.weight


def _counts(self: Any, x: Tensor) -> Tensor:
    self.count.add_(1)
    return x * self.weight


@pytest.mark.parametrize(
    ("function", "more", "is_trial", "match"),
    [
        (_writes_input, (), True, "unit writes to its input"),
        (_returns_views, (), True, "returns views of one tensor"),
        (_keeps_its_result, (), True, "gives tensors away other than by returning them"),
        (_changes_a_list, ([],), True, "changes a container"),
        (_counts, (), False, "begins to write to its buffers"),
    ],
)
def test_what_cannot_be_repeated_is_refused(
    function: Callable[..., Any], more: tuple[Any, ...], is_trial: bool, match: str
) -> None:
    bench = _Bench(_Forward(function), is_trial=is_trial)
    with pytest.raises(Refusal, match=match):
        bench.run(_input(), *more)


def test_another_result_the_second_time_is_refused() -> None:
    factors = iter([1.0, 1.0 + 2**-20])
    bench = _Bench(_Forward(lambda self, x: x * self.weight * next(factors)))
    result = bench.run(_input())
    with pytest.raises(Refusal, match="gives another result when it is computed again"):
        bench.backward(result)


def test_results_without_gradient_and_inputs_that_come_back_are_themselves() -> None:
    x, mask = _input(), torch.ones(3)
    bench = _Bench(_Forward(lambda self, x, mask: (x, mask, self.weight, x * self.weight)))
    passed, same, weight, result = bench.run(x, mask)
    assert passed is x and same is mask and weight is bench.module.weight
    (found,) = bench.backward(result)
    assert torch.equal(found, bench.module.weight.detach().expand(4, 3))


def test_a_call_that_has_no_gradient_to_wait_for_is_over_at_once() -> None:
    bench = _Bench(_Forward(lambda self, x: x.detach() * 2))
    assert not bench.run(_input()).requires_grad
    assert bench.call.is_over and not bench.call.kept
    assert len(bench.call.take_edges()) == 1 and bench.call.take_edges() == []


def test_a_gradient_before_the_end_of_forward_or_after_the_backward_is_noticed() -> None:
    bench = _Bench(_Forward(lambda self, x: x * self.weight))
    result = bench.run(_input())
    with pytest.raises(Refusal, match="differentiates through its blocks itself"):
        torch.autograd.grad(result.sum(), bench.module.weight, retain_graph=True, allow_unused=True)
        result.sum().backward(retain_graph=True)
    with pytest.raises(Refusal, match="differentiates through its blocks itself"):
        bench.call.end_forward()
    bench.backward(result * 2)
    with pytest.raises(RuntimeError, match="came after its backward"):
        bench.call.receive([torch.ones(4, 3)])


class _UsesOften(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() * x.sin() + x.tanh()


def test_the_sum_for_an_input_begins_with_what_later_calls_have_given() -> None:
    """As in one single backward: the last bits are those of torch."""
    x, later = torch.randn(1000), torch.randn(1000)
    plain = x.clone().requires_grad_() * 1
    result = _UsesOften()(plain)
    (expected,) = torch.autograd.grad([result.sum(), (plain * later).sum()], plain)
    found = []
    for earlier in (later, None):
        bench = _Bench(_UsesOften())
        found += bench.backward(bench.run(x.clone().requires_grad_()), earlier=earlier)
    assert torch.equal(found[0], expected)
    assert not torch.equal(found[1] + later, expected), "another order has other bits"


def test_what_has_come_for_a_result_is_taken_once() -> None:
    bench = _Bench(_Forward(lambda self, x: (x * self.weight, x + self.weight)))
    bench.run(_input())
    bench.call.end_forward()
    assert not bench.call.has_gradient
    bench.call.receive([None, torch.ones(4, 3)])
    assert bench.call.has_gradient and bench.call.take(0) is None
    assert torch.equal(bench.call.take(1) + 0, torch.ones(4, 3))  # type: ignore[operator]
    assert bench.call.take(1) is None and not bench.call.has_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_a_checksum_shows_any_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(60).view(6, 10).to(dtype)
    assert torch.equal(_checksum(tensor), _checksum(tensor.t().contiguous().t()))
    for place in (0, 33, 59):
        other = tensor.clone()
        other.view(-1)[place : place + 1].view(torch.uint8)[0] ^= 1
        assert not torch.equal(_checksum(tensor), _checksum(other))
