"""Trainings in a forked child that kills itself at its n-th tick, and what is compared of those that came to their end."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swapper.volumes.publish import mark
from tests.forked import forked
from tests.states import state_of

NEEDS_FORKS = pytest.mark.skipif(torch.cuda.is_available(), reason="a forked child cannot use CUDA")
"""For tests that let a library take the GPU where there is one."""


def run_killed(run: Callable[[Callable[[], None]], None], num_ticks: int | None) -> int | None:
    """Run in a child, with a function to call at each tick; the child is killed at number ``num_ticks`` (None: never).

    Returns:
        How many ticks it had, if it came to its end before that; else None.
    """
    readable, writable = os.pipe()

    def child() -> None:
        os.close(readable)
        counter, lock, last = itertools.count(1), threading.Lock(), [0]

        def tick() -> None:
            with lock:
                last[0] = next(counter)
                if last[0] == num_ticks:
                    os.kill(os.getpid(), signal.SIGKILL)

        run(tick)
        os.write(writable, str(last[0]).encode())

    pid = forked(child)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), "the child failed by itself: see its output"
    return int(told) if code == 0 else None


def left_by_a_killed_save(path: Path) -> Path:
    """Make a hidden directory as a save that was killed leaves it; returns its path."""
    path.mkdir(parents=True)
    os.close(mark(path))
    return path


def ticking(real: Callable[..., Any], tick: Callable[[], None]) -> Callable[..., Any]:
    """``real``, with a tick before each call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tick()
        return real(*args, **kwargs)

    return call


def fingerprint(engine: Any) -> str:
    """Counts, rates, and a hash of all weights, states and of torch's generator."""
    found = hashlib.sha256()
    for _, parameter in sorted(engine.module.named_parameters()):
        found.update(parameter.float().detach().numpy().tobytes())
        if parameter.requires_grad:
            for _, value in sorted(state_of(engine, parameter).items()):
                found.update(torch.as_tensor(value).float().numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    return f"{engine.global_steps} {engine.global_samples} {engine.get_lr()} {found.hexdigest()}"
