"""The error of a budget for weights names a budget that is larger."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from infinity.optim.groups import EXPERTS
from infinity.paging.weights_budget import WeightsBudget


@dataclass(eq=False)
class _Unit:
    name: str
    flat: Any = None
    num_bytes: int = 40
    num_active: int = 0


def test_experts_of_several_layers_that_are_kept_need_more_than_the_present_budget() -> None:
    kept = SimpleNamespace(has_views=True)
    units: list[Any] = [_Unit(f"{layer}.up{EXPERTS}.{number}") for layer in ("0", "1") for number in (0, 1)]
    units[0].flat = units[2].flat = kept
    budget = WeightsBudget(key="key", total_bytes=110, weights_bytes=100)
    error = budget.no_room(units[3], units, used_bytes=80, moving_bytes=100)
    assert error.minimum_bytes > 110
