"""Gradients of weights that two modules share: their parts, kept until a micro-batch has both.

Knows gradients and where they wait; must not know who uses the weights.

[Note: parts] An embedding that is the head as well gets a gradient h from its use in the head, and e from the other. One
micro-batch after the other, that is (h0 + e0) + (h1 + e1): in the weight's dtype inside of the brackets, in fp32 outside. Here
all h come before all e. So each h waits with what waits for backward (`Boundary`), on the drive if need be, and sums are
those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from infinity.activations.boundary import Boundary, Kept

Key = tuple[int, int]
"""A parameter: index of its unit, and of its slot there."""


class TiedParts:
    """The parts of one step."""

    def __init__(self, boundary: Boundary, tied: Collection[Key]) -> None:
        """``tied``: parameters that two modules have."""
        self._boundary = boundary
        self.tied = frozenset(tied)
        self._waiting: dict[tuple[int, Key], Kept] = {}

    def join(self, batch: int, key: Key, gradient: torch.Tensor | None, *, is_last: bool) -> torch.Tensor | None:
        """A part has come.

        Args:
            batch: the number of the micro-batch.
            key: the parameter.
            gradient: the part; it belongs to this object now. None: there is no more of this micro-batch.
            is_last: whether no other part is to come.

        Returns:
            The whole gradient, if it is the last part.
        """
        kept = self._waiting.pop((batch, key), None)
        if kept is not None:
            before = self._boundary.load(kept)
            gradient = before if gradient is None else before + gradient
            self._boundary.release(kept)
        if is_last or gradient is None:
            return gradient
        self._waiting[batch, key] = self._boundary.keep(gradient)
        return None

    def waiting_of(self, batch: int) -> list[Key]:
        """The parameters of which a part of this micro-batch waits."""
        return [key for number, key in self._waiting if number == batch]

    @property
    def kept(self) -> Iterator[Kept]:
        """What waits, in the order in which it came."""
        return iter(list(self._waiting.values()))
