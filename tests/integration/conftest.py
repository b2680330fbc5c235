"""Which rows of the grid the exactness tests run, and on how many threads."""

from __future__ import annotations

import pytest

from tests.exactness.grid import rows_for


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``case`` and ``row`` to tests that take both, from the cases that their module names ``CASES``."""
    if not {"case", "row"} <= set(metafunc.fixturenames):
        return
    full = metafunc.config.getoption("--full-grid")
    combinations = []
    for index, case in enumerate(metafunc.module.CASES):
        rows = list(rows_for(full=full, has_checkpointing=case.has_checkpointing))
        turns = 8 if len(metafunc.module.CASES) > 20 else 5
        if not full:  # for time: a row meets every eighth shape, and every fifth family
            rows = rows[index % turns :: turns]
        for place, row in enumerate(rows):
            # The quick tier has one row per family and for each second shape, and each time another.
            quick = full or (place == index % len(rows) and (turns == 5 or index % 2 == 0))
            combinations.append(
                pytest.param(case, row, id=f"{case.name}-{row.name}", marks=() if quick else pytest.mark.deep)
            )
    metafunc.parametrize(("case", "row"), combinations)
