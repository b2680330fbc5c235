"""Small sets of rows of a grid in which every wanted combination of values occurs.

A *partial* is a choice of values for some axes, e.g. ``{"offload_param": "nvme", "prefetch": False}``. A row covers
a partial that it contains. Pairs are the usual choice: most faults need two settings to meet. Where a fault is known
to need three (an update in backward needs the engine's loop, one micro-batch and no clipping), the partial is asked
for by name.

The generator is greedy and draws no random numbers: the same axes give the same rows on every machine.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

Axes = Mapping[str, Sequence[Hashable]]
Partial = Mapping[str, Hashable]

# Rows are grown from this many uncovered partials and the one that covers most is kept. More of them give fewer rows.
_NUM_CANDIDATES = 48


def pairs(axes: Axes) -> list[dict[str, Hashable]]:
    """Every choice of values for every two axes."""
    return [
        {first: first_value, second: second_value}
        for first, second in itertools.combinations(axes, 2)
        for first_value in axes[first]
        for second_value in axes[second]
    ]


def extended(partial: Partial, axes: Axes) -> list[dict[str, Hashable]]:
    """``partial`` together with every single value of every other axis."""
    return [{**partial, name: value} for name in axes if name not in partial for value in axes[name]]


def covering_rows(axes: Axes, partials: Iterable[Partial]) -> list[dict[str, Hashable]]:
    """Rows over all ``axes`` that cover all ``partials``; few of them, though not provably the fewest."""
    wanted: dict[frozenset[tuple[str, Hashable]], Partial] = {}
    for partial in partials:
        for name, value in partial.items():
            if value not in axes[name]:
                raise ValueError(f"partial {dict(partial)!r} asks for {name}={value!r}, which is not on that axis")
        wanted.setdefault(frozenset(partial.items()), partial)
    return _Rows(axes, list(wanted.values())).grow()


class _Rows:
    """The rows so far. Every test process makes them, so sets of partials are integers: bit ``i`` is the ``i``-th."""

    def __init__(self, axes: Axes, partials: Sequence[Partial]) -> None:
        self._axes = axes
        self._partials = partials
        self._uncovered = (1 << len(partials)) - 1
        self._uses: Counter[tuple[str, Hashable]] = Counter()
        # Of the partials, those that name an axis, and those that ask for another value on it.
        self._named = {name: _bits(name in partial for partial in partials) for name in axes}
        self._refused = {
            (name, value): _bits(partial.get(name, value) != value for partial in partials)
            for name, values in axes.items()
            for value in values
        }

    def grow(self) -> list[dict[str, Hashable]]:
        rows = []
        while self._uncovered:
            uncovered = (partial for i, partial in enumerate(self._partials) if self._uncovered >> i & 1)
            candidates = [self._grown_from(partial) for partial in itertools.islice(uncovered, _NUM_CANDIDATES)]
            row, covered = max(candidates, key=lambda candidate: candidate[1].bit_count())
            self._uncovered &= ~covered
            self._uses.update(row.items())
            rows.append({name: row[name] for name in self._axes})
        return rows

    def _grown_from(self, partial: Partial) -> tuple[dict[str, Hashable], int]:
        """A row that contains ``partial``, and the uncovered partials that it covers.

        Each open axis gets the value that completes most partials, then the one that keeps most of them possible, then
        the one that earlier rows used least: what no partial asks for should vary too.
        """
        row = dict(partial)
        open_axes = [name for name in self._axes if name not in row]
        possible = self._uncovered
        for item in row.items():
            possible &= ~self._refused[item]
        for index, name in enumerate(open_axes):
            incomplete = 0
            for other in open_axes[index + 1 :]:
                incomplete |= self._named[other]
            choices = []
            for value in self._axes[name]:
                kept = possible & ~self._refused[name, value]
                score = ((kept & ~incomplete).bit_count(), kept.bit_count(), -self._uses[name, value])
                choices.append((score, value, kept))
            _, row[name], possible = max(choices, key=lambda choice: choice[0])
        return row, possible


def _bits(members: Iterable[bool]) -> int:
    return sum(1 << index for index, member in enumerate(members) if member)
