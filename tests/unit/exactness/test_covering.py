"""The covering generator covers, and the grid's rows are what they are said to be."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict

import pytest

from tests.exactness.covering import covering_rows, extended, pairs
from tests.exactness.grid import (
    AXES,
    CI_ROWS,
    COMPANION_AXES,
    IN_BACKWARD,
    MOVEMENT_AXES,
    WORKERS,
    Row,
    covered_partials,
    full_rows,
    rows_for,
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


def test_rows_name_every_axis_with_a_value_of_it() -> None:
    axes = {"a": ("x", "y"), "b": (None, True, 3)}
    for row in covering_rows(axes, [{"a": "y"}]):
        assert list(row) == list(axes)
        assert all(row[name] in axes[name] for name in axes)


def test_larger_partials_are_covered_whole() -> None:
    axes = {name: (0, 1, 2) for name in "abcdef"}
    wanted = {"a": 2, "c": 1, "d": 0, "f": 2}
    rows = covering_rows(axes, [*pairs(axes), wanted, *extended(wanted, axes)])
    covered = [row for row in rows if wanted.items() <= row.items()]
    assert {row["b"] for row in covered} == {0, 1, 2}
    assert {row["e"] for row in covered} == {0, 1, 2}


def test_no_partial_no_row() -> None:
    assert covering_rows({"a": (1, 2)}, []) == []


def test_a_partial_off_the_axes_is_refused() -> None:
    with pytest.raises(ValueError, match="a=3"):
        covering_rows({"a": (1, 2)}, [{"a": 3}])


def test_the_generator_is_deterministic() -> None:
    first = covering_rows(AXES, covered_partials())
    assert first == covering_rows(AXES, covered_partials())
    assert [{name: asdict(row)[name] for name in AXES} for row in CI_ROWS] == first


def test_ci_rows_cover_what_they_promise() -> None:
    rows = [asdict(row) for row in CI_ROWS]
    for partial in covered_partials():
        assert any(partial.items() <= row.items() for row in rows), partial
    assert len(rows) <= 24


def test_an_update_in_backward_meets_every_value() -> None:
    rows = [asdict(row) for row in CI_ROWS if IN_BACKWARD.items() <= asdict(row).items()]
    for name in AXES:
        if name not in IN_BACKWARD:
            assert {row[name] for row in rows} == set(AXES[name]), name


def test_full_rows_are_the_product_of_the_movement_axes() -> None:
    rows = list(full_rows())
    movements = {tuple(getattr(row, name) for name in MOVEMENT_AXES) for row in rows}
    assert len(rows) == len(movements) == math.prod(len(values) for values in MOVEMENT_AXES.values())


def test_full_rows_let_companions_meet_every_pair_of_movements() -> None:
    rows = [asdict(row) for row in full_rows()]
    for companion in COMPANION_AXES:
        for first, second in itertools.combinations(MOVEMENT_AXES, 2):
            seen = {(row[companion], row[first], row[second]) for row in rows}
            expected = set(itertools.product(AXES[companion], AXES[first], AXES[second]))
            assert seen == expected, (companion, first, second)


def test_axes_are_the_fields_of_a_row() -> None:
    assert {*AXES, "workers"} == set(asdict(Row()))


def test_each_number_of_workers_meets_nearly_every_value() -> None:
    met = {(name, value, row.workers) for row in CI_ROWS for name, value in asdict(row).items() if name in AXES}
    assert len(met) >= 0.95 * len(WORKERS) * sum(len(values) for values in AXES.values())
    assert {row.workers for row in full_rows()} == {*WORKERS}


def test_names_are_unique() -> None:
    rows = list(full_rows())
    assert len({row.name for row in rows}) == len(rows)


def test_rows_without_checkpointing() -> None:
    rows = rows_for(full=False, has_checkpointing=False)
    assert {row.checkpointing for row in rows} == {"none"}
    assert len(set(rows)) == len(rows)
    assert len(rows_for(full=True, has_checkpointing=False)) * 3 == len(rows_for(full=True, has_checkpointing=True))


def test_numerics_join_rows_that_must_agree_and_no_others() -> None:
    base = Row(offload_param="none", page="small", budget="tight", prefetch=False, loop="plain")
    assert base.numerics == Row().numerics
    for other in (Row(dtype="bf16"), Row(clipping=True), Row(optimizer="groups"), Row(checkpointing="reentrant")):
        assert other.numerics != Row().numerics
    # The loops divide the loss differently as soon as there is something to divide by.
    assert Row(accumulation=3).numerics != Row(accumulation=3, loop="plain").numerics
