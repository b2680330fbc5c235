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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_a_checksum_shows_any_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(60).view(6, 10).to(dtype)
    assert torch.equal(_checksum(tensor), _checksum(tensor.t().contiguous().t()))
    for place in (0, 33, 59):
        other = tensor.clone()
        other.view(-1)[place : place + 1].view(torch.uint8)[0] ^= 1
        assert not torch.equal(_checksum(tensor), _checksum(other))


def test_a_block_that_begins_to_write_to_its_buffers_is_refused() -> None:
    def counts(self: Any, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.weight

    with pytest.raises(Refusal, match="begins to write to its buffers"):
        _Bench(_Forward(counts), is_trial=False).run(_input())
