"""The grid's rows cover what they promise, and are what they are said to be."""

from __future__ import annotations

from dataclasses import asdict

from tests.exactness.grid import CI_ROWS, Row, covered_partials


def test_ci_rows_cover_what_they_promise() -> None:
    rows = [asdict(row) for row in CI_ROWS]
    for partial in covered_partials():
        assert any(partial.items() <= row.items() for row in rows), partial
    assert len(rows) <= 24


def test_numerics_join_rows_that_must_agree_and_no_others() -> None:
    base = Row(offload_param="none", page="small", budget="tight", prefetch=False, loop="plain")
    assert base.numerics == Row().numerics
    for other in (Row(dtype="bf16"), Row(clipping=True), Row(optimizer="groups"), Row(checkpointing="reentrant")):
        assert other.numerics != Row().numerics
    # The loops divide the loss differently as soon as there is something to divide by.
    assert Row(accumulation=3).numerics != Row(accumulation=3, loop="plain").numerics
