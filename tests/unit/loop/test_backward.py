"""Gradients go from autograd to the stepper with the right word on what may be updated, whichever way a backward ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import AccessError, StepError
from infinity.loop.backward import Backwards
from infinity.loop.phase import Phase, PhaseGuard
from infinity.loop.style import LoopStyle
from infinity.threads.engine_lock import EngineLock
from infinity.units.layout import Slot, UnitLayout
from infinity.units.parameter import plain_grad
from infinity.units.unit import Unit, spec_of

_INPUT = torch.tensor([1.0, -2.0, 3.0])


class _Live:
    """The user holds no gradients."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def add(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> None:
        self.noted.append(unit.index)


class _Stepper:
    """Notes what it is told."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.updated: set[int] = set()
        self.rules = SimpleNamespace(updates_in_backward=True)
        self.gradients = SimpleNamespace(
            has_any=False,
            slots_with_gradient=lambda unit: self.earlier,
            average=lambda step: None,
            expect_whole=lambda unit: None,
            offer=lambda unit: False,
            average_last=lambda step: None,
            average_postponed=lambda: None,
        )
        self.updates_all_in_backward = True
        self.earlier: list[Slot] = []
        self.scaler = SimpleNamespace(is_active=False, share_of=lambda loss, parts: loss.float() * 8 / parts)
        self.is_between_steps = False
        self.deliveries: list[tuple[int, dict[int, torch.Tensor], bool]] = []
        self.finished: list[bool] = []
        self.divisors: list[int] = []
        self.refuses = False
        self.used_up: set[tuple[int, int]] = set()

    def deliver(self, unit: Unit, gradients: dict[Slot, torch.Tensor], *, updates_now: bool) -> None:
        if self.refuses:
            raise OSError("no room")
        self.deliveries.append((unit.index, {slot.index: g.clone() for slot, g in gradients.items()}, updates_now))

    def finish_backward(self, *, updates_now: bool) -> None:
        self.finished.append(updates_now)

    def begin_last(self, step: int, *, updates_now: bool) -> None: ...

    def divide_by(self, divisor: int) -> None:
        self.divisors.append(divisor)


class _Residency:
    """Notes how backwards begin and end."""

    def __init__(self) -> None:
        self.computed: list[str] = []
        self.ended: list[tuple[bool, bool]] = []
        """Of each: whether it was complete, and whether the next units are fetched."""
        self.num_noticed = 0
        self.clock = SimpleNamespace(
            begin_compute=self.computed.append, end_compute=lambda: self.ended.append((False, False))
        )
        self.training_trace = SimpleNamespace(begin_backward=self._begin, commit=lambda: self._end(fetches=False))

    def _begin(self) -> None:
        self.num_noticed += 1

    def _end(self, *, fetches: bool) -> None:
        self.ended[-1] = (True, fetches)

    def close_unused(self) -> None: ...

    def pump(self) -> None:
        self._end(fetches=True)


class _Bench:
    """Two linear layers of ordinary parameters, a unit each, and a real collector, phase and style."""

    def __init__(self, num_micro_batches: int = 1) -> None:
        self.layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
        self.units: list[Unit] = []
        for index, layer in enumerate(self.layers):
            named = dict(layer.named_parameters())
            specs = [spec_of(f"{index}.{fqn}", parameter, torch.float32) for fqn, parameter in named.items()]
            self.units.append(Unit(index, f"unit {index}", list(named.values()), UnitLayout(specs)))
        self.stepper: Any = _Stepper(self.units)
        self.residency: Any = _Residency()
        self.counts: Any = SimpleNamespace(
            global_steps=7,
            num_micro_batches=num_micro_batches,
            is_boundary=lambda: self.is_boundary,
            is_in_no_sync=False,
        )
        self.guard = PhaseGuard(self.stepper, self.counts)
        self.style = LoopStyle(self.counts)
        self.live: Any = _Live()
        self.is_boundary = True
        parameter_map: Any = SimpleNamespace(
            units=self.units, num_owners=lambda: {(index, slot): 1 for index in (0, 1) for slot in (0, 1)}
        )
        self.backwards = Backwards(
            parameter_map,
            self.residency,
            EngineLock(),
            self.stepper,
            self.guard,
            self.live,
            self.style,
            self.counts,
        )
        self.backwards.collector.watch([])

    def loss(self, num_calls: int = 1) -> torch.Tensor:
        """Of units that are said to be called so often: with more than one call, they are complete at the end."""
        for unit in self.units * num_calls:
            self.backwards.collector.note_call(unit, unit.layout.slots)
        return torch.tanh(self.layers[1](torch.tanh(self.layers[0](_INPUT)))).sum()

    def run(self, *, retain_graph: bool = False) -> None:
        self.stepper.deliveries.clear()
        self.residency.ended.clear()
        self.stepper.finished.clear()
        self.backwards.run(self.loss(), retain_graph=retain_graph)

    def show_single_backward(self) -> None:
        """The loop has one backward per step, and what to expect of it is known."""
        self.style.note_backward()
        self.style.note_engine_step(is_boundary=True)
        self.run()

    @property
    def words(self) -> list[tuple[int, bool]]:
        return [(unit, updates_now) for unit, _, updates_now in self.stepper.deliveries]

    def gradients(self) -> dict[tuple[int, int], torch.Tensor]:
        """Those of one backward, by autograd alone."""
        parameters = [parameter for layer in self.layers for parameter in layer.parameters()]
        found = torch.autograd.grad(self.loss(), parameters)
        return {(index // 2, index % 2): gradient for index, gradient in enumerate(found)}

    def check_delivered(self, factor: float = 1) -> None:
        expected = self.gradients()
        for unit, gradients, _ in self.stepper.deliveries:
            for slot, gradient in gradients.items():
                assert torch.equal(gradient, expected.pop((unit, slot)) * factor)
        assert not expected


def test_a_backward_delivers_each_gradient_once_and_takes_it_from_autograd() -> None:
    bench = _Bench()
    bench.run()
    bench.check_delivered()
    assert sorted(bench.live.noted) == [0, 1] and bench.residency.num_noticed == 1
    assert all(plain_grad(p) is None for unit in bench.units for p in unit.parameters)
    assert bench.guard.phase is Phase.READY and bench.guard.has_backward
    assert set(bench.residency.computed) == {"backward"} and not LoopStyle.callers


def test_updates_wait_for_the_end_until_it_is_known_what_to_expect() -> None:
    bench = _Bench()
    bench.style.note_backward()
    bench.style.note_engine_step(is_boundary=True)
    bench.run()
    assert {word for _, word in bench.words} == {False} and bench.stepper.finished == [True]
    bench.run()
    assert bench.words == [(1, True), (0, True)] and bench.stepper.finished == [True]
    assert bench.stepper.divisors == [1, 1] and bench.residency.ended == [(True, True)]


@pytest.mark.parametrize("reason", ["rules", "style", "boundary", "hook", "retained"])
def test_nothing_is_updated_in_backward_where_more_may_come_or_somebody_looks(reason: str) -> None:
    bench = _Bench()
    if reason != "style":
        bench.show_single_backward()
    else:
        bench.run()
    bench.stepper.divisors.clear()
    bench.stepper.rules.updates_in_backward = reason != "rules"
    bench.is_boundary = reason != "boundary"
    if reason == "hook":
        bench.layers[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    bench.run(retain_graph=reason == "retained")
    assert {word for _, word in bench.words} == {False} and bench.stepper.finished == [False]
    assert not bench.stepper.divisors
    # A step follows that changes all weights, unless this was not the last micro-batch.
    assert bench.residency.ended == [(True, reason == "boundary")]


def test_a_unit_that_waits_for_a_gradient_of_an_earlier_micro_batch_is_updated_at_the_end() -> None:
    bench = _Bench()
    bench.show_single_backward()
    bench.stepper.earlier = list(bench.units[0].layout.slots)
    bench.run()
    assert bench.words == [(1, False), (0, True)]  # unit 1 gets none of unit 0's slots


def test_what_is_updated_in_backward_is_divided_as_the_step_would() -> None:
    bench = _Bench(num_micro_batches=4)
    bench.is_boundary = False
    bench.loss().backward()
    bench.backwards.collect()
    bench.is_boundary = True
    bench.show_single_backward()
    assert bench.stepper.divisors == [4]


def test_torch_gets_retain_graph_and_a_backward_in_an_engines_is_seen() -> None:
    bench, seen = _Bench(), []
    bench.layers[0].weight.register_hook(lambda gradient: seen.append(len(LoopStyle.callers)))
    loss = bench.loss()
    bench.backwards.run(loss, retain_graph=True)
    bench.backwards.run(loss)
    with pytest.raises(RuntimeError, match="second time"):
        bench.backwards.run(loss)
    assert seen == [1, 1] and not LoopStyle.callers


def test_a_backward_that_is_cut_off_leaves_nothing_but_the_phase() -> None:
    bench = _Bench()

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("mine")

    bench.layers[0].weight.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        bench.run()
    assert bench.guard.phase is Phase.BROKEN and not bench.stepper.finished
    assert bench.residency.ended == [(False, False)]
    assert all(plain_grad(p) is None for unit in bench.units for p in unit.parameters)
    assert not bench.backwards.collector.has_fired


def test_a_backward_of_the_users_own_is_taken_in_when_somebody_asks() -> None:
    bench = _Bench()
    bench.show_single_backward()
    bench.stepper.deliveries.clear()
    bench.residency.ended.clear()
    bench.guard.end_micro_batch()
    bench.loss().backward()
    bench.backwards.collect()
    bench.check_delivered()
    assert {word for _, word in bench.words} == {False}
    assert bench.residency.ended == [(True, False)] and bench.guard.has_backward and bench.guard.phase is Phase.READY
    bench.backwards.collect()
    assert len(bench.residency.ended) == 1


def test_gradients_of_the_users_own_backward_become_parts_beside_parts() -> None:
    bench = _Bench(num_micro_batches=2)
    bench.style.begin_backward(divides=True)
    bench.loss().backward()
    bench.backwards.collect()
    bench.check_delivered(0.5)
    bench.stepper.deliveries.clear()
    bench.style.begin_backward(divides=True)
    bench.run()
    bench.check_delivered()


def test_an_error_at_the_end_of_the_users_backward_is_raised_by_the_next_call_once() -> None:
    bench = _Bench()
    bench.stepper.refuses = True
    bench.loss(num_calls=2).backward()
    assert bench.guard.phase is Phase.BROKEN and bench.residency.ended == [(False, False)]
    with pytest.raises(OSError, match="no room"):
        bench.backwards.raise_deferred()
    bench.backwards.raise_deferred()


def test_only_between_calls_the_users_gradients_are_taken_in() -> None:
    bench = _Bench()
    bench.guard.move_to(Phase.STEPPING)
    bench.loss(num_calls=2).backward()
    bench.backwards.collect()
    assert not bench.residency.ended and not bench.stepper.deliveries
    bench.guard.move_to(Phase.READY)
    bench.backwards.collect()
    bench.check_delivered()


def test_with_a_loss_scale_only_a_scaled_loss_is_the_users_to_run() -> None:
    bench = _Bench()
    assert bench.backwards.scale(loss := bench.loss()) is loss
    bench.backwards.drop()
    bench.stepper.scaler.is_active = True
    with pytest.raises(StepError, match=r"in step 7: .*engine\.scale"):
        bench.loss().backward()
    bench.backwards.drop()
    bench.backwards.scale(bench.loss()).backward()
    bench.backwards.collect()
    bench.check_delivered(8)
    with pytest.raises(StepError):  # the word was for one backward
        bench.loss().backward()
    bench.backwards.drop()
    bench.backwards.scale(bench.loss())
    bench.backwards.drop()
    with pytest.raises(StepError):
        bench.loss().backward()
    bench.backwards.drop()
    bench.run()  # engine.backward has scaled it


def test_who_looks_at_a_gradient_has_it_taken_in_first() -> None:
    bench = _Bench()
    bench.loss().backward()
    unit = bench.units[0]
    bench.backwards.before_gradient_access(unit, unit.layout.slots[0])
    bench.check_delivered()
    bench.guard.end_micro_batch()
    bench.backwards.before_gradient_access(unit, unit.layout.slots[0])
    assert not bench.guard.has_backward
    bench.backwards.before_gradient_access(unit, unit.layout.slots[0], assigns=True)
    assert bench.guard.has_backward


@pytest.mark.parametrize("has_any", [False, True])
def test_a_look_before_the_step_puts_updates_after_it(has_any: bool) -> None:
    bench = _Bench()
    bench.style.begin_backward(divides=True)
    bench.style.note_backward()
    bench.stepper.gradients.has_any = has_any
    bench.backwards.before_gradient_access(bench.units[0], bench.units[0].layout.slots[0])
    bench.style.note_engine_step(is_boundary=True)
    assert bench.style.updates_in_backward is not has_any


def test_a_look_before_the_step_may_come_after_other_micro_batches() -> None:
    """Of several, the first does not show it: one who clips by himself looks at the end of a step alone."""
    counts: Any = SimpleNamespace(num_micro_batches=2)
    style = LoopStyle(counts)
    for is_boundary in (False, True):
        style.begin_backward(divides=True)
        style.note_backward()
        assert not style.updates_in_backward
        if is_boundary:
            style.note_look()
        style.note_engine_step(is_boundary=is_boundary)
    assert not style.updates_in_backward


def test_who_looks_inside_backward_gets_what_has_come_so_far() -> None:
    bench = _Bench()
    bench.show_single_backward()
    unit, found = bench.units[1], []

    def look(gradient: torch.Tensor) -> None:
        for slot in unit.layout.slots:
            bench.backwards.before_gradient_access(unit, slot)
        found.extend(bench.words)

    bench.layers[1].weight.register_hook(look)  # runs before the weight's gradient is there, and after the bias's
    bench.run()
    assert found == [(1, False)] and bench.words == [(1, False), (0, True), (1, True)]
    bench.check_delivered()
    assert bench.live.noted[-3:] == [1, 0, 1]


def test_where_gradients_are_handed_out_nobody_may_look_inside_backward() -> None:
    bench, errors = _Bench(), []
    unit = bench.units[0]

    def look(gradient: torch.Tensor) -> None:
        with pytest.raises(AccessError, match=r"'0\.weight'.*\"infinity\.schedule\": \"ordinary\"") as caught:
            bench.backwards.before_gradient_access(unit, unit.layout.slots[0])
        errors.append(caught.value)

    bench.backwards.collector.begin_handing_out()
    bench.guard.move_to(Phase.BACKWARD)
    bench.layers[0].weight.register_hook(look)
    bench.loss().backward()
    assert len(errors) == 1 and not bench.stepper.deliveries
    bench.backwards.drop()


def test_a_use_of_weights_that_are_updated_already_is_an_error() -> None:
    bench = _Bench()
    bench.backwards.note_use(bench.units[0], is_saved=True)
    bench.stepper.updated.add(0)
    bench.backwards.note_use(bench.units[1], is_saved=False)
    with pytest.raises(StepError, match="unit 0"):
        bench.backwards.note_use(bench.units[0], is_saved=False)


def test_what_ends_a_step_ends_it_for_the_divisor() -> None:
    bench = _Bench(num_micro_batches=4)

    def begin() -> None:
        bench.loss().backward()
        bench.backwards.collect()
        assert bench.style.divisor(is_engine_step=True) == 4

    begin()
    bench.style.end_step()
    assert bench.style.divisor(is_engine_step=True) == 1
    begin()
    bench.stepper.gradients.has_any = True
    bench.backwards.note_drop()  # of one of several
    assert bench.style.divisor(is_engine_step=True) == 4
    bench.stepper.gradients.has_any = False
    bench.backwards.note_drop()
    assert bench.style.divisor(is_engine_step=True) == 1
    begin()
    bench.backwards.drop()
    assert bench.style.divisor(is_engine_step=True) == 1


def test_gradients_are_dropped_but_for_those_kept_and_so_are_the_backwards_of_the_step() -> None:
    bench = _Bench()
    bench.style.note_backward()
    bench.guard.move_to(Phase.BACKWARD)  # so that its end is not the user's to notice
    bench.loss(num_calls=2).backward()
    bench.backwards.drop(kept={(1, 0)})
    bench.style.note_backward()  # the first again
    bench.style.note_engine_step(is_boundary=True)
    assert bench.style.updates_in_backward
    left = [(unit.index, i) for unit in bench.units for i, p in enumerate(unit.parameters) if plain_grad(p) is not None]
    assert left == [(1, 0)] and not bench.backwards.collector.has_fired


@pytest.mark.parametrize("num_calls", [1, 2], ids=["inside", "at the end"])
def test_a_backward_after_the_one_that_updated_cannot_add_to_what_is_used_up(num_calls: int) -> None:
    bench = _Bench()
    bench.run()
    bench.stepper.deliveries.clear()
    bench.stepper.used_up.add((1, 0))
    with pytest.raises(StepError, match=r"'1\.weight'.*'unit 1' began in step 7"):
        bench.loss(num_calls).backward()
        bench.backwards.raise_deferred()
    bench.backwards.close()
    assert all(unit != 1 for unit, _ in bench.words)
