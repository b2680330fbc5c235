"""One call at a time is inside an engine; the threads that work for it belong to it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.errors import EngineBusyError
from infinity.threads.engine_lock import EngineLock, is_inside


@pytest.fixture
def other() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls a function in another thread."""
    with ThreadPoolExecutor(1, "other") as pool:
        yield lambda function: pool.submit(function).result()


def _use(lock: EngineLock) -> bool:
    with lock.held("reading"):
        return is_inside() and lock.is_mine


def test_another_thread_is_told_at_once_while_a_call_is_inside(other: Any) -> None:
    lock = EngineLock()
    with lock.held("step"), lock.held("a call inside it"):
        with pytest.raises(EngineBusyError, match=r"reading .*MainThread.*\(step\).*engine.reset"):
            other(lambda: _use(lock))
        with pytest.raises(EngineBusyError, match="forward"):
            other(lambda: lock.check("forward"))
        lock.check("forward")
        assert not other(lambda: lock.is_mine or is_inside())
    assert other(lambda: _use(lock))
    assert not is_inside() and not lock.is_mine


def test_a_call_that_was_cut_off_ends_by_its_thread_or_is_broken_off(other: Any) -> None:
    lock = EngineLock()
    lock.acquire("forward")
    lock.acquire("a module of it")  # an interrupt comes: neither ends
    with lock.held("reset"):
        lock.be_outermost()
    assert other(lambda: _use(lock))
    other(lambda: lock.acquire("forward"))
    with pytest.raises(EngineBusyError):
        _use(lock)
    lock.break_off()
    assert _use(lock)
    assert not other(is_inside)


def test_a_lock_that_is_dropped_while_it_is_held_leaves_its_thread_outside() -> None:
    lock = EngineLock()
    lock.acquire("forward")
    assert is_inside()
    del lock
    assert not is_inside()


class _Watched(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.function()
        return grads[0], None


def _deep_backward(function: Callable[[], None], depth: int) -> None:
    """Backward inside backward: from 60 on torch takes threads of a pool of its own."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        _Watched.apply(x, function if not depth else lambda: _deep_backward(function, depth - 1)).sum().backward()


def _pool_belongs_to_the_backward() -> bool:
    lock = EngineLock()
    seen: list[bool] = []
    threads: list[int] = []

    def look() -> None:
        threads.append(threading.get_ident())
        seen.append(_in_lock(lock))

    with lock.held("backward"):
        _deep_backward(look, 70)
    return seen == [True] and threads != [threading.get_ident()] and not lock.is_mine


def _in_lock(lock: EngineLock) -> bool:
    lock.acquire("a recomputation")
    lock.release()
    return lock.is_mine


def test_another_threads_backward_is_none_of_the_call(other: Any) -> None:
    lock = EngineLock()
    with lock.held("backward"), pytest.raises(EngineBusyError):
        other(lambda: _deep_backward(lambda: lock.check("backward"), 0))


@pytest.mark.deep
def test_autograds_pool_for_deep_backwards_belongs_to_the_backward() -> None:
    """In a process of its own: one that has that pool can start no rank by a fork."""
    script = f"import {__name__} as test; assert test._pool_belongs_to_the_backward() and test._pool_holds_the_lock()"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3])


def _pool_holds_the_lock() -> bool:
    """As on a GPU, whose thread runs the backward of a plain ``loss.backward()``."""
    lock = EngineLock()
    states: list[bool] = []

    def hold() -> None:
        lock.acquire("backward")
        states.append(lock.is_mine)

    _deep_backward(hold, 70)  # and nothing releases it: an exception has cut it off
    return states == [True] and lock.owner is not None
