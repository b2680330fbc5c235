"""Weights and gradients on which an optimizer is tried: of the kinds at which a rule may begin to mix elements.

Pure data; must not know optimizers.

[Note: rules that seldom apply]
A rule that looks at a whole tensor now and then (clipping above a norm, a trust ratio within bounds, a reset every so many
steps, a guard against infinities) shows only where it applies, or where it applies to the whole and not to a piece. So the
trials contain tensors in which two elements are far larger than all others, at every magnitude: whatever the threshold is, some
whole tensor lies above it, and all of its pieces but one below. Step counts are moved on to numbers around which periods and
warm-ups end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Draw = Callable[[tuple[int, ...], int], Tensor]
"""Shape, number of the step from 0 -> float32 values on the CPU."""

LATE_COUNTS = (49, 99, 249, 719, 999, 4095, 5039, 9999, 65_535, 99_999, 999_999)
"""Step counts that a trial continues from: many periods end in the two steps after each."""
NUM_CONSECUTIVE = 12
"""Steps before that."""
_MAGNITUDES = (1e-30, 1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e12)


@dataclass(frozen=True)
class Trial:
    """Some steps from fresh states.

    Attributes:
        what: for messages: "steps <what>".
        weight: before the first step.
        gradient: of each step.
        num_steps: how many.
    """

    what: str
    weight: Draw
    gradient: Draw
    num_steps: int


def normal(generator: torch.Generator, scale: float = 1.0) -> Draw:
    """Normal numbers. Explicit dtype and device: users set others as defaults to build their models with."""
    return lambda shape, step: torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * scale


def seldom_trials(generator: torch.Generator) -> Iterator[Trial]:
    """Those besides ordinary numbers, each of a few steps."""
    usual = normal(generator)
    yield Trial("with gradients of zeros", usual, _zeros, 3)
    yield Trial("with weights of zeros", _zeros, usual, 2)
    for scale in (1e-8, 1e4, 1e15):
        yield Trial(f"with gradients around {scale:g}", usual, normal(generator, scale), 2)
    for scale in (1e-8, 1e4):
        yield Trial(f"with weights around {scale:g}", normal(generator, scale), usual, 2)
    for magnitude in _MAGNITUDES:
        yield Trial(f"with gradients of {magnitude:g} among zeros", usual, _spikes(magnitude), 2)
        yield Trial(f"with weights of {magnitude:g} among zeros", _spikes(magnitude), usual, 2)
    for magnitude in (float("inf"), float("nan")):
        yield Trial(f"with one gradient of {magnitude} among others", usual, _once(usual, magnitude), 2)


def _zeros(shape: tuple[int, ...], step: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _spikes(magnitude: float) -> Draw:
    def draw(shape: tuple[int, ...], step: int) -> Tensor:
        values = _zeros(shape, step)
        values.view(-1)[0] = magnitude / 7  # in another piece: the norm of the whole is that of no piece
        values.view(-1)[-1] = magnitude
        return values

    return draw


def _once(others: Draw, value: float) -> Draw:
    def draw(shape: tuple[int, ...], step: int) -> Tensor:
        values = others(shape, step)
        if step == 0:
            values.view(-1)[-1] = value
        return values

    return draw
