"""Settings are checked once, in words."""

from __future__ import annotations

import dataclasses

import pytest

from swapper import ALIGNMENT, ArgumentError, Priority, SwapperConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_bytes", 0),
        ("request_bytes", ALIGNMENT + 1),
        ("num_threads", 0),
        ("max_inflight", 0),
        ("max_retries", -1),
        ("max_overtakes", 0),
        ("deadline_seconds", 0.0),
        ("deadline_seconds", float("nan")),
    ],
)
def test_what_cannot_work_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be .*{value}"):
        dataclasses.replace(SwapperConfig(), **{name: value})


def test_demand_goes_first() -> None:
    assert sorted([Priority.WRITE_BACK, Priority.DEMAND, Priority.PREFETCH]) == [
        Priority.DEMAND,
        Priority.PREFETCH,
        Priority.WRITE_BACK,
    ]
