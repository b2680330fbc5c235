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
    uncovered: dict[frozenset[tuple[str, Hashable]], None] = {}
    for partial in partials:
        for name, value in partial.items():
            if value not in axes[name]:
                raise ValueError(f"partial {dict(partial)!r} asks for {name}={value!r}, which is not on that axis")
        uncovered[frozenset(partial.items())] = None

    rows: list[dict[str, Hashable]] = []
    uses: Counter[tuple[str, Hashable]] = Counter()
    while uncovered:
        starts = itertools.islice(uncovered, _NUM_CANDIDATES)
        candidates = (_grow(dict(start), axes, uncovered, uses) for start in starts)
        row = max(candidates, key=lambda row: sum(partial <= row.items() for partial in uncovered))
        for partial in [partial for partial in uncovered if partial <= row.items()]:
            del uncovered[partial]
        uses.update(row.items())
        rows.append({name: row[name] for name in axes})
    return rows


def _grow(
    row: dict[str, Hashable],
    axes: Axes,
    uncovered: Iterable[frozenset[tuple[str, Hashable]]],
    uses: Counter[tuple[str, Hashable]],
) -> dict[str, Hashable]:
    """Fill the axes ``row`` leaves open.

    Each gets the value that completes most partials, then the one that keeps most of them possible, then the one that
    earlier rows used least: what no partial asks for should vary too.
    """
    compatible = [partial for partial in uncovered if all(row.get(name, value) == value for name, value in partial)]
    for name in axes:
        if name in row:
            continue
        scores = {}
        for value in axes[name]:
            trial = {**row, name: value}
            alive = [partial for partial in compatible if all(trial.get(n, v) == v for n, v in partial)]
            scores[value] = (sum(partial <= trial.items() for partial in alive), len(alive), -uses[name, value])
        best = max(axes[name], key=lambda value: scores[value])
        row[name] = best
        compatible = [partial for partial in compatible if all(row.get(n, v) == v for n, v in partial)]
    return row
