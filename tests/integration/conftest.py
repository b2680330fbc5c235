"""Which rows of the grid the exactness tests run, and on how many threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.exactness.grid import rows_for


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``case`` and ``row`` to tests that take both, from the cases that their module names ``CASES``."""
    if not {"case", "row"} <= set(metafunc.fixturenames):
        return
    full = metafunc.config.getoption("--full-grid")
    combinations = []
    for index, case in enumerate(metafunc.module.CASES):
        rows = list(rows_for(full=full, has_checkpointing=case.has_checkpointing))
        if not full and len(metafunc.module.CASES) > 20:
            rows = rows[index % 2 :: 2]  # one half with every second case, for time
        combinations += [pytest.param(case, row, id=f"{case.name}-{row.name}") for row in rows]
    metafunc.parametrize(("case", "row"), combinations)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small spend ten times as long on waking threads as on computing; ``test_threads`` uses several."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
