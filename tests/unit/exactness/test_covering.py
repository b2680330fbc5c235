"""The covering generator covers, and the grid's rows are what they are said to be."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict

import pytest

from tests.exactness.covering import covering_rows, pairs
from tests.exactness.grid import (
    AXES,
    CI_ROWS,
    WORKERS,
    Row,
    covered_partials,
    full_rows,
)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3, 3), (2, 3, 4, 5), (2,) * 9, (1, 4, 1, 2)])
def test_rows_cover_all_pairs_and_are_few(sizes: tuple[int, ...]) -> None:
    axes = {f"axis{index}": tuple(range(size)) for index, size in enumerate(sizes)}

    rows = covering_rows(axes, pairs(axes))

    for first, second in itertools.combinations(axes, 2):
        seen = {(row[first], row[second]) for row in rows}
        assert seen == set(itertools.product(axes[first], axes[second])), (first, second)
    largest, next_largest = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * next_largest <= len(rows) <= max(2 * largest * next_largest, largest * next_largest + 3)
    assert len(rows) <= math.prod(sizes)


def test_ci_rows_cover_what_they_promise() -> None:
    rows = [asdict(row) for row in CI_ROWS]
    for partial in covered_partials():
        assert any(partial.items() <= row.items() for row in rows), partial
    assert len(rows) <= 24


def test_each_number_of_workers_meets_nearly_every_value() -> None:
    met = {(name, value, row.workers) for row in CI_ROWS for name, value in asdict(row).items() if name in AXES}
    assert len(met) >= 0.95 * len(WORKERS) * sum(len(values) for values in AXES.values())
    assert {row.workers for row in full_rows()} == {*WORKERS}


def test_numerics_join_rows_that_must_agree_and_no_others() -> None:
    base = Row(offload_param="none", page="small", budget="tight", prefetch=False, loop="plain")
    assert base.numerics == Row().numerics
    for other in (Row(dtype="bf16"), Row(clipping=True), Row(optimizer="groups"), Row(checkpointing="reentrant")):
        assert other.numerics != Row().numerics
    # The loops divide the loss differently as soon as there is something to divide by.
    assert Row(accumulation=3).numerics != Row(accumulation=3, loop="plain").numerics
