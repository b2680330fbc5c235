"""A unit's gradients are delivered when they are whole: as early as that is certain, and never before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import StepError
from infinity.gradients.collector import GradientCollector
from infinity.units.layout import Slot, UnitLayout
from infinity.units.parameter import plain_grad
from infinity.units.unit import Unit, spec_of


class _Bench:
    """A model of ordinary parameters, one unit per module, and what was delivered.

    Attributes:
        deliveries: (unit, gradients by slot index, whether backward was still running).
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.units: list[Unit] = []
        for index, module in enumerate(modules):
            named = dict(module.named_parameters())
            specs = [spec_of(f"{index}.{fqn}", parameter, torch.float32) for fqn, parameter in named.items()]
            self.units.append(Unit(index, f"unit {index}", list(named.values()), UnitLayout(specs)))
        owners: dict[tuple[int, int], int] = {}
        for index, module in enumerate(modules):
            for child in module.modules():
                for parameter in child.parameters(recurse=False):
                    slot = next(i for i, p in enumerate(self.units[index].parameters) if p is parameter)
                    owners[index, slot] = owners.get((index, slot), 0) + 1
        self.deliveries: list[tuple[int, dict[int, torch.Tensor], bool]] = []
        self._in_backward = False
        self.num_noticed = 0
        live: Any = SimpleNamespace(add_with_graph=lambda *_: None)
        self.collector = GradientCollector(
            self.units,
            owners,
            deliver=self._deliver,
            keep=self._deliver,
            notice=self._notice,
            step=lambda: 7,
            live=live,
        )
        self.collector.watch([])
        for index, module in enumerate(modules):
            for child in module.modules():
                child.register_forward_pre_hook(self._note(index))

    def _note(self, index: int) -> Callable[[nn.Module, Any], None]:
        def before(module: nn.Module, args: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                own = {id(parameter) for parameter in module.parameters(recurse=False)}
                unit = self.units[index]
                slots = [s for s, p in zip(unit.layout.slots, unit.parameters, strict=True) if id(p) in own]
                self.collector.note_call(unit, slots)

        return before

    def _notice(self) -> None:
        self.num_noticed += 1

    def _deliver(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> None:
        found = {slot.index: gradient.clone() for slot, gradient in gradients.items()}
        self.deliveries.append((unit.index, found, self._in_backward))

    def backward(self, loss: torch.Tensor) -> list[tuple[int, dict[int, torch.Tensor], bool]]:
        """Run one micro-batch's backward; returns its deliveries."""
        self.deliveries = []
        self._in_backward = True
        loss.backward()
        self._in_backward = False
        self.collector.finish()
        return self.deliveries


def _linear(seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(3, 3)


def _expected(make_loss: Callable[[], torch.Tensor], parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(make_loss(), parameters, allow_unused=True))


def _accumulated(make_loss: Callable[[], torch.Tensor], *modules: nn.Module) -> list[torch.Tensor]:
    """The gradients that autograd accumulates in the first module."""
    make_loss().backward()
    found = [parameter.grad for parameter in modules[0].parameters() if parameter.grad is not None]
    for module in modules:
        module.zero_grad()
    return found


_X = torch.linspace(-1, 1, 6).view(2, 3)


def test_after_one_recorded_backward_units_are_delivered_inside_it_last_first() -> None:
    first, second = _linear(1), _linear(2)

    def loss() -> torch.Tensor:
        return second(first(_X)).square().sum()

    parameters = [*first.parameters(), *second.parameters()]
    expected = _expected(loss, parameters)
    bench = _Bench(first, second)
    for number in range(3):
        deliveries = bench.backward(loss())
        found = {(unit, slot): g for unit, gradients, _ in deliveries for slot, g in gradients.items()}
        for place, (unit, slot) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
            assert torch.equal(found[unit, slot], expected[place])
        if number:
            assert [(unit, early) for unit, _, early in deliveries] == [(1, True), (0, True)]
        assert all(plain_grad(parameter) is None for parameter in parameters), "they belong to the receiver"


def test_gradients_that_hooks_from_before_hand_in_are_noticed_and_make_a_history() -> None:
    module = _linear(1)
    for index, parameter in enumerate(module.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: bench.collector.hand_in(bench.units[0], bench.units[0].layout.slots[index])
        )
    bench = _Bench(module)
    for number in range(1, 3):
        deliveries = bench.backward(module(_X).sum())
        assert sorted(slot for _, gradients, _ in deliveries for slot in gradients) == [0, 1], "each once"
        assert bench.num_noticed == 2 * number
        assert bench.collector.has_history


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_parameter_that_was_not_expected_comes_too(order: tuple[int, int]) -> None:
    module = nn.ModuleList([_linear(1), _linear(2)])

    def loss() -> torch.Tensor:
        return module[order[0]](module[order[1]](_X)).square().sum()

    expected = _expected(loss, list(module.parameters()))
    bench = _Bench(module)
    bench.backward(module[0](_X).sum())
    bench.backward(module[0](_X).sum())
    found = [item for _, gradients, _ in bench.backward(loss()) for item in gradients.items()]
    assert sorted(slot for slot, _ in found) == [0, 1, 2, 3], "each once"
    assert all(torch.equal(gradient, expected[slot]) for slot, gradient in found)


@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_reentrant_checkpoints_deliver_once_and_whole(num_calls: int) -> None:
    """Each checkpoint fires the hooks again; only the last firing completes the sum, with autograd's rounding."""
    module, before = _linear(), _linear(5)

    def loss() -> torch.Tensor:
        x = before(_X)
        for _ in range(num_calls):
            x = checkpoint(module, x, use_reentrant=True)
        return x.square().sum()

    expected = _accumulated(loss, module, before)
    bench = _Bench(module, before)
    for number in range(3):
        deliveries = [d for d in bench.backward(loss()) if d[0] == 0]
        assert len(deliveries) == 1
        if number or num_calls > 1:
            assert deliveries[0][2] == (num_calls == 1)
        for slot, gradient in deliveries[0][1].items():
            assert torch.equal(gradient, expected[slot])


def test_a_weight_used_in_and_outside_a_reentrant_checkpoint_is_never_early() -> None:
    """Its module is called once and owned once, yet it fires twice."""
    module, before = _linear(), _linear(5)

    def loss() -> torch.Tensor:
        x = checkpoint(module, before(_X), use_reentrant=True)
        return (x + torch.nn.functional.linear(_X, module.weight)).square().sum()

    expected = _accumulated(loss, module, before)[0]
    bench = _Bench(module, before)
    for _ in range(3):
        bench.collector.note_call(bench.units[0], bench.units[0].layout.slots[:1])  # the fault notes the foreign read
        deliveries = [d for d in bench.backward(loss()) if d[0] == 0]
        weights = [(gradients[0], early) for _, gradients, early in deliveries if 0 in gradients]
        assert len(weights) == 1
        assert torch.equal(weights[0][0], expected)
        assert not weights[0][1]


def test_a_gradient_after_its_delivery_is_an_error_and_never_happens_again() -> None:
    module, before = _linear(), _linear(5)
    bench = _Bench(module, before)
    bench.backward(checkpoint(module, before(_X), use_reentrant=True).sum())
    bench.backward(checkpoint(module, before(_X), use_reentrant=True).sum())
    # The module is called once, as before, but somebody else reads its weight, in a graph that runs later.
    foreign = torch.nn.functional.linear(before(_X), module.weight)
    once = checkpoint(module, before(_X) + foreign, use_reentrant=True)
    with pytest.raises(StepError, match=r"'0\.weight'.*'unit 0' began in step 7"):
        bench.backward(once.sum())
    bench.collector.drop()
    foreign = torch.nn.functional.linear(before(_X), module.weight)
    once = checkpoint(module, before(_X) + foreign, use_reentrant=True)
    deliveries = bench.backward(once.sum())
    assert [(unit, early) for unit, _, early in deliveries if unit == 0] == [(0, False)]


def test_a_use_after_completion_delays_the_unit_from_then_on() -> None:
    module = _linear()
    bench = _Bench(module)
    (unit,) = bench.units

    def deliver_and_recompute(unit: Unit, gradients: dict[Slot, torch.Tensor]) -> None:
        bench.deliveries.append((unit.index, {}, torch._C._current_graph_task_id() != -1))
        if bench.deliveries[-1][2]:
            bench.collector.note_use(unit, is_saved=False, is_updated=False)

    bench.collector.deliver = deliver_and_recompute
    bench.backward(module(_X).sum())
    bench.backward(module(_X).sum())
    assert not bench.backward(module(_X).sum())[0][2]
    with pytest.raises(StepError, match="unit 0"):
        bench.collector.note_use(unit, is_saved=True, is_updated=True)
