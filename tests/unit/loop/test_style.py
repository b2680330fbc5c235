"""Whose division a gradient has met."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from infinity.loop.style import LoopStyle


def _style(num_micro_batches: int) -> LoopStyle:
    counts: Any = SimpleNamespace(num_micro_batches=num_micro_batches)
    return LoopStyle(counts)


def test_an_engines_backward_in_another_thread_divides_nothing_here() -> None:
    runs, may_go = threading.Event(), threading.Event()

    def backward() -> None:
        with _style(1).running():
            runs.set()
            may_go.wait(60)

    other = threading.Thread(target=backward)
    other.start()
    try:
        assert runs.wait(60)
        style = _style(4)
        taken = style.take_own({"weight": torch.full((1,), 8.0)})
        assert taken["weight"].item() == 8 and style.divisor(is_engine_step=True) == 4
    finally:
        may_go.set()
        other.join()


def test_what_comes_in_a_backward_of_another_engine_on_this_thread_is_divided_by_that() -> None:
    style = _style(4)
    with _style(4).running():
        assert style.take_own({"weight": torch.full((1,), 8.0)})["weight"].item() == 8
    assert style.divisor(is_engine_step=True) == 1
