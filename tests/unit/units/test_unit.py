"""A unit's state: who holds its memory, after any sequence of what may happen to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.device.compute import ComputeDevice, Fence, FlatBuffer
from infinity.units.parameter import PagedParameter, ResidentParameter, placeholder, unbind
from infinity.units.unit import UNIT_MOVES, Unit, UnitState
from tests.unit.stage import trainable_unit


class _Change:
    """Weights on their way, or an update of them."""

    accepts_buffer = False

    def wait(self) -> None: ...

    def promote(self) -> None: ...

    def done(self) -> bool:
        return True

    def attach(self, flat: FlatBuffer, after: Fence = None) -> bool:
        return False


def _flat(unit: Unit) -> FlatBuffer:
    return ComputeDevice().allocate_flat(unit.num_bytes)


def _unit() -> Unit:
    unit = trainable_unit(0, [(3, 5), (7,)])
    unbind(unit.parameters, [placeholder(p.dtype, p.device, p.shape) for p in unit.parameters])
    return unit


_METHODS: dict[str, Callable[[Unit], object]] = {
    "adopt": lambda unit: unit.adopt(_flat(unit)),
    "fetch_into": lambda unit: unit.fetch_into(_flat(unit), _Change()),
    "expect": lambda unit: unit.expect(_Change()),
    "on_arrival": lambda unit: unit.on_arrival(),
    "bind": lambda unit: unit.bind(),
    "unbind": lambda unit: unit.unbind(),
    "begin_update": lambda unit: unit.begin_update(_Change()),
    "end_update": lambda unit: unit.end_update(),
    "release": lambda unit: unit.release(),
}
_WITH_MEMORY = set(UnitState) - {UnitState.PAGED_OUT, UnitState.UPDATING_PAGED_OUT}


def _memory(unit: Unit) -> tuple[object, ...]:
    return unit.flat, unit.arrival, unit.update, unit.is_bound, unit.version


def _require_whole(unit: Unit) -> None:
    """The state tells who holds memory."""
    assert (unit.flat is not None) == (unit.state in _WITH_MEMORY)
    is_bound = unit.state in (UnitState.BOUND, UnitState.UPDATING_BOUND)
    assert {type(parameter) for parameter in unit.parameters} == {ResidentParameter if is_bound else PagedParameter}
    if unit.flat is not None:
        assert unit.flat.has_views == is_bound


@given(st.lists(st.sampled_from(sorted(UNIT_MOVES)), max_size=40))
def test_a_unit_moves_as_the_table_says_or_stays_as_it_was(names: list[str]) -> None:
    unit = _unit()
    for name in names:
        before, memory = unit.state, _memory(unit)
        if before in UNIT_MOVES[name]:
            _METHODS[name](unit)
            assert unit.state is UNIT_MOVES[name][before]
        else:
            with pytest.raises(RuntimeError, match=rf"Unit\.{name} of .* is {before.name}"):
                _METHODS[name](unit)
            assert _memory(unit) == memory
        _require_whole(unit)


@given(st.lists(st.sampled_from(["use", "hold", "end", "let go", "cut off"]), max_size=30))
def test_a_unit_is_in_use_as_long_as_anybody_is_inside_it_or_holds_it(actions: list[str]) -> None:
    unit = _unit()
    unit.adopt(_flat(unit))
    num_uses, release_parameters = 0, object()
    held: list[object] = []
    for action in actions:
        if action == "use":
            unit.begin_use()
            unit.bind()
            num_uses += 1
        elif action == "hold":
            held.append(object())
            unit.hold_gathered(held[-1])
            unit.bind()
        elif action == "end" and num_uses:
            unit.end_use()
            num_uses -= 1
        elif action == "let go":
            unit.release_gathered(release_parameters)  # once more than it was held: nobody else loses it
            if held:
                release_parameters = held.pop(0)
                unit.release_gathered(release_parameters)
        elif action == "cut off":
            unit.forget_uses(keeps_gathered=True)
            num_uses = 0
        assert unit.num_active == num_uses + len(held)
        assert unit.gathered == held
        unit.unbind_unused()
        assert unit.is_bound == (unit.num_active > 0)
