"""Settings are checked once, in words."""

from __future__ import annotations

import dataclasses
import math

import pytest

from swapper import ALIGNMENT, ArgumentError, StagingPool, Swapper, SwapperConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("request_bytes", num_bytes) for num_bytes in (0, ALIGNMENT + 1)),
        *((name, 0) for name in ("num_threads", "max_inflight", "max_overtakes")),
        ("max_retries", -1),
        *(("deadline_seconds", seconds) for seconds in (0.0, 1e-9, -1.0, float("nan"))),
    ],
)
def test_what_cannot_work_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be .*{value}"):
        dataclasses.replace(SwapperConfig(), **{name: value})


@pytest.mark.parametrize("seconds", [1e10, 1e300, math.inf])
def test_a_deadline_that_is_as_good_as_none_works_everywhere(seconds: float) -> None:
    """What waits takes no time beyond some decades: the watchdog would die of it, and so would a close."""
    swapper = Swapper.in_memory(1 << 20, SwapperConfig(deadline_seconds=seconds))
    staging_pool = StagingPool(ALIGNMENT, 1, deadline_seconds=seconds)
    with swapper, staging_pool:
        extent = swapper.allocate(ALIGNMENT, "x")
        with staging_pool.lease(seconds) as staging_buffer:
            swapper.write(extent, staging_buffer.tensor).wait(seconds)
            swapper.read(extent, staging_buffer.tensor).wait()
        assert swapper._scheduler._watchdog.is_alive()


@pytest.mark.parametrize("priority", ["DEMAND", None, 1.0, True, 3, -1])
def test_a_priority_that_is_none_is_refused_at_once(priority: object) -> None:
    """It would end the thread that hands transfers over, or wait for ever."""
    with Swapper.in_memory(1 << 20) as swapper:
        extent = swapper.allocate(ALIGNMENT, "x")
        handle = swapper.write(extent, bytearray(ALIGNMENT), priority=2)  # type: ignore[arg-type]
        for refused in (swapper.read, swapper.write):
            with pytest.raises(ArgumentError, match=r"priority must be one of Priority\.DEMAND"):
                refused(extent, bytearray(ALIGNMENT), priority=priority)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"priority must be one of Priority\.DEMAND"):
            handle.promote(priority)  # type: ignore[arg-type]
        handle.wait()
        assert swapper.statistics().num_writes == 1
