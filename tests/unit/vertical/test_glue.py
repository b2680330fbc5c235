"""The graph between units, backward stretch by stretch: the same bits as in one go, each node once, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from infinity.activations.refusal import Refusal
from infinity.vertical.call import Edge, Returned, edge_of
from infinity.vertical.glue import Glue

Function = Callable[..., tuple[torch.Tensor, ...]]


class _Batch:
    """A micro-batch whose calls are functions."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.glue = Glue(index)
        self.calls: list[_Call | None] = []

    def call(self, function: Function, *inputs: torch.Tensor) -> Any:
        self.glue.watch(inputs)
        self.glue.find_hooks()
        call = _Call(self, function, inputs)
        self.calls.append(call)
        results = Returned.apply(call, torch.zeros((), requires_grad=True), [own.detach() for own in call.own])
        self.glue.note_call([edge for edge in call.edges if edge is not None])
        self.glue.watch(results)
        return results if len(results) > 1 else results[0]

    def backward(self, loss: torch.Tensor) -> None:
        self.glue.find_hooks()
        self.glue.seal(loss)
        self.glue.run(len(self.calls) + 1)
        for position in range(len(self.calls), 0, -1):
            call = self.calls[position - 1]
            if call is not None:
                self.glue.deliver(call)
                for edge, gradient in call.backward():
                    self.glue.add(edge, gradient)
            self.glue.run(position)


class _Call:
    def __init__(self, owner: _Batch, function: Function, inputs: Sequence[torch.Tensor]) -> None:
        self.micro_batch = owner.index
        self.leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        self.edges = [edge_of(tensor) if tensor.requires_grad else None for tensor in inputs]
        self.own = function(*self.leaves)
        self.gradients: list[torch.Tensor | None] = [None] * len(self.own)
        self.num_received = 0

    def receive(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self.num_received += 1
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.gradients[index] = gradient

    def take(self, number: int) -> torch.Tensor | None:
        gradient, self.gradients[number] = self.gradients[number], None
        return gradient

    def backward(self) -> list[tuple[Edge, torch.Tensor]]:
        roots = [(own, g) for own, g in zip(self.own, self.gradients, strict=True) if g is not None]
        if roots:
            torch.autograd.backward([own for own, _ in roots], [gradient for _, gradient in roots])
        pairs = zip(self.edges, self.leaves, strict=True)
        return [(edge, leaf.grad) for edge, leaf in pairs if edge is not None and leaf.grad is not None]


class _Plain:
    """Calls that are just that."""

    def call(self, function: Function, *inputs: torch.Tensor) -> Any:
        results = function(*inputs)
        return results if len(results) > 1 else results[0]

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class _Weights:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.a, self.b, self.c = (torch.randn(5, 5, generator=generator).requires_grad_() for _ in range(4))

    def gradients(self) -> list[torch.Tensor | None]:
        return [self.x.grad, self.a.grad, self.b.grad, self.c.grad]

    def unit(self, weight: torch.Tensor) -> Function:
        return lambda x: ((x @ weight).tanh(),)

    def two(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ self.a).tanh(), (x * self.a).sin()


def _chain(w: _Weights, batch: Any) -> torch.Tensor:
    return batch.call(w.unit(w.b), batch.call(w.unit(w.a), w.x * 2).exp() * w.c).sum()


def _skips(w: _Weights, batch: Any) -> torch.Tensor:
    """Past one call, past both, and past none; all meet in one value and in one weight."""
    start = (w.x * w.c).sin()
    first = batch.call(w.unit(w.a), start) + start
    second = batch.call(w.unit(w.b), first) + first * start
    return (second * w.c + start / 3 + first.exp()).sum()


def _two_results(w: _Weights, batch: Any) -> torch.Tensor:
    one, other = batch.call(w.two, w.x)
    third = batch.call(w.unit(w.b), one)
    return (third * other + one + other.exp() + third).sum()


def _unused_result(w: _Weights, batch: Any) -> torch.Tensor:
    _, other = batch.call(w.two, w.x)
    batch.call(w.unit(w.b), other)
    return (other * w.c).sum()


def _one_function_again_and_again(w: _Weights, batch: Any) -> torch.Tensor:
    value = w.x * 1
    for _ in range(3):
        value = batch.call(w.unit(w.a), value * w.c) + value
    return (value * value).sum()


def _one_result_for_several(w: _Weights, batch: Any) -> torch.Tensor:
    first = batch.call(w.unit(w.a), w.x)
    parts = [batch.call(w.unit(weight), first) for weight in (w.b, w.c, w.b)]
    return (parts[0] * parts[1] + parts[2] + first).sum()


def _one_result_here_and_there(w: _Weights, batch: Any) -> torch.Tensor:
    """Three times in one stretch, and once behind a later call."""
    first = batch.call(w.unit(w.a), w.x)
    second = batch.call(w.unit(w.b), (first.exp() + first * w.c) + first.sin())
    return (second * 3 + first.cos() + (first * second)).sum()


def _constants(w: _Weights, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        constant = w.x.exp()
    return (batch.call(w.unit(w.a), constant) * constant).sum()


_PROGRAMS = [
    _chain,
    _skips,
    _two_results,
    _unused_result,
    _one_function_again_and_again,
    _one_result_for_several,
    _one_result_here_and_there,
    _constants,
]


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


@pytest.mark.parametrize("program", _PROGRAMS)
def test_gradients_are_those_of_one_backward(program: Callable[[_Weights, Any], torch.Tensor]) -> None:
    expected, found = _Weights(), _Weights()
    for weights, batch in ((expected, _Plain()), (found, _Batch())):
        batch.backward(program(weights, batch))
    assert all(map(_same, expected.gradients(), found.gradients()))


def test_a_call_without_gradient_has_its_place_too() -> None:
    weights, batch = _Weights(), _Batch()
    first = batch.call(weights.unit(weights.a), weights.x)
    batch.calls.append(None)
    batch.glue.note_call(None)
    batch.backward((batch.call(weights.unit(weights.b), first) + first).sum())
    expected = _Weights()
    first = expected.unit(expected.a)(expected.x)[0]
    (expected.unit(expected.b)(first)[0] + first).sum().backward()
    assert all(map(_same, expected.gradients(), weights.gradients()))


class _Counted(torch.autograd.Function):
    """Of a user's own: counts what comes."""

    gradients: list[torch.Tensor] = []  # noqa: RUF012 - a test's

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _Counted.gradients.append(gradients[0].clone())
        return gradients[0]


_counted: Any = _Counted.apply


def test_each_node_runs_once_with_the_whole_gradient_and_before_the_call_in_front_of_it() -> None:
    weights, batch = _Weights(), _Batch()
    _Counted.gradients.clear()
    first = batch.call(weights.unit(weights.a), weights.x)
    between = _counted(first)
    second = batch.call(weights.unit(weights.b), between)
    loss = (second + between).sum()
    batch.glue.seal(loss)
    batch.glue.run(3)
    assert not _Counted.gradients, "a part of its gradient comes from the call"
    call = batch.calls[1]
    assert call is not None
    batch.glue.deliver(call)
    ((edge, gradient),) = call.backward()
    batch.glue.add(edge, gradient)
    batch.glue.run(2)
    assert [torch.equal(g, gradient + 1) for g in _Counted.gradients] == [True]
    earlier = batch.calls[0]
    assert earlier is not None and earlier.gradients[0] is not None and torch.equal(earlier.gradients[0], gradient + 1)


def test_a_value_of_a_users_function_may_be_skipped_to_but_must_not_be_skipped_through() -> None:
    for function, is_refused in ((torch.sin, False), (_counted, True)):
        weights, batch = _Weights(), _Batch()
        start = weights.x * 2
        past = function(start)
        loss = (batch.call(weights.unit(weights.a), start) + start + past).sum()
        if is_refused:
            with pytest.raises(Refusal, match="a function of the user's own"):
                batch.backward(loss)
        else:
            batch.backward(loss)
            expected = _Weights()
            start = expected.x * 2
            past = torch.sin(start)
            (expected.unit(expected.a)(start)[0] + start + past).sum().backward()
            assert all(map(_same, expected.gradients(), weights.gradients()))


# ----------------------------------------------------------------------------------------------------------------- hooks


def test_a_hook_on_a_result_sees_the_gradient_once_and_whole() -> None:
    seen: list[list[torch.Tensor]] = []
    gradients = []
    for batch in (_Plain(), _Batch()):
        weights, found = _Weights(), []
        first: torch.Tensor = batch.call(weights.unit(weights.a), weights.x)  # type: ignore[attr-defined]
        first.register_hook(lambda gradient, found=found: found.append(gradient.clone()) or gradient * 2)
        batch.backward((first.exp() * weights.c + first).sum())  # type: ignore[attr-defined]
        seen.append(found)
        gradients.append(weights.gradients())
    assert len(seen[0]) == len(seen[1]) == 1
    assert torch.equal(seen[0][0], seen[1][0])
    assert all(map(_same, *gradients))


@pytest.mark.parametrize("is_told", [True, False])
def test_a_hook_on_what_several_blocks_use_is_refused(is_told: bool) -> None:
    """Whether the hook was seen when it was put there, or is found later on a tensor that is still alive."""
    weights, batch = _Weights(), _Batch()
    start = weights.x * 2
    first = batch.call(weights.unit(weights.a), start)
    start.register_hook(lambda gradient: gradient)
    if is_told:
        batch.glue.note_hook(start)
        batch.glue._watched.clear()
    with pytest.raises(Refusal, match="a tensor that several blocks use has a hook"):
        batch.backward((first + start).sum())


def test_a_hook_on_a_parameter_is_refused_only_where_its_gradient_comes_in_parts() -> None:
    for num_uses in (1, 2):
        weights, batch = _Weights(), _Batch()
        weights.c.register_hook(lambda gradient: gradient)
        first = batch.call(weights.unit(weights.a), weights.x)
        loss = (batch.call(weights.unit(weights.b), first * weights.c) * (weights.c if num_uses > 1 else 1)).sum()
        if num_uses == 1:
            batch.backward(loss)
            assert weights.c.grad is not None
        else:
            with pytest.raises(Refusal, match="a parameter that is used between blocks has a hook"):
                batch.backward(loss)


def test_micro_batches_that_use_each_others_results_are_refused() -> None:
    weights, one, other = _Weights(), _Batch(0), _Batch(1)
    result = one.call(weights.unit(weights.a), weights.x)
    loss = other.call(weights.unit(weights.b), result * 2).sum()
    with pytest.raises(Refusal, match="use each other's results"):
        other.backward(loss)
