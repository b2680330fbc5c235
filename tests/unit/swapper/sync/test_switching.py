"""The interpreter's switch interval is short while a swapper is open, and the user's own at all other times."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from swapper import Swapper


@pytest.fixture(autouse=True)
def users_own() -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


def test_it_is_short_until_the_last_swapper_is_closed(users_own: float) -> None:
    first, second = Swapper.in_memory(4096), Swapper.in_memory(4096)
    assert sys.getswitchinterval() < 0.001
    first.close()
    first.close()
    assert sys.getswitchinterval() < 0.001
    second.close()
    assert sys.getswitchinterval() == users_own


@pytest.mark.parametrize("seconds", [0.01, 0.00001])
def test_what_the_user_sets_meanwhile_stays(seconds: float) -> None:
    with Swapper.in_memory(4096):
        sys.setswitchinterval(seconds)
        mine = sys.getswitchinterval()
        with Swapper.in_memory(4096):
            assert sys.getswitchinterval() == mine
    assert sys.getswitchinterval() == mine


def test_a_swapper_that_is_dropped_lets_go_of_it(users_own: float) -> None:
    swapper = Swapper.in_memory(4096)
    del swapper
    gc.collect()
    assert sys.getswitchinterval() == users_own
