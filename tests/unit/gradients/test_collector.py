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
        live: Any = SimpleNamespace(add_with_graph=lambda *_: None, is_present=lambda *_: False)
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
                self.collector.on_module_call(unit, slots)

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


@pytest.mark.parametrize("num_calls", [1, 2])
def test_reentrant_checkpoints_deliver_once_and_whole(num_calls: int) -> None:
    """Each checkpoint fires the hooks again; only the last firing completes the sum."""
    module, before = _linear(), _linear(5)

    def loss() -> torch.Tensor:
        x = before(_X)
        for _ in range(num_calls):
            x = checkpoint(module, x, use_reentrant=True)
        return x.square().sum()

    loss().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    bench = _Bench(module, before)
    for number in range(3):
        ((_, gradients, early),) = (delivery for delivery in bench.backward(loss()) if delivery[0] == 0)
        assert early == (num_calls == 1) or number == 0
        assert all(torch.equal(gradient, expected[slot]) for slot, gradient in gradients.items())


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
