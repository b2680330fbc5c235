"""``engine.train_batch`` over several micro-batches trains every model to the bits of plain torch in the same order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.exactness.case import Case
from tests.exactness.families import FAMILIES
from tests.exactness.grid import Row
from tests.exactness.shapes import SHAPES
from tests.exactness.vertical_training import require_exact_vertical_training, rows_of

pytest.importorskip("transformers")

# The last gradients of the embedding come long before the moment at which its sum is complete: all blocks run without
# gradient between the two. Nothing is in memory, so its sum is spilled.
_GRADIENTS_COME_EARLY = Row(
    offload_optimizer="cpu",
    page="auto",
    budget="tight",
    prefetch=False,
    accumulation=8,
    update="deferred",
    dtype="bf16",
    gradient_dtype="bf16",
)
_MORE_ROWS = {"no_grad_call": [_GRADIENTS_COME_EARLY, replace(_GRADIENTS_COME_EARLY, update="auto", clipping=True)]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full-grid")
    combinations = []
    for index, case in enumerate((*SHAPES, *FAMILIES)):
        for place, row in enumerate((*rows_of(index, case, full=full), *_MORE_ROWS.get(case.name, ()))):
            quick = full or (place == 0 and (case in FAMILIES or index % 6 == 0))
            marks = () if quick else pytest.mark.deep
            combinations.append(pytest.param(case, row, id=f"{case.name}-{row.name}", marks=marks))
    metafunc.parametrize(("vertical_case", "setting"), combinations)


@pytest.mark.deep(but=8)
def test_trains_to_the_bits_of_the_vertical_order(vertical_case: Case, setting: Row, tmp_path: Path) -> None:
    require_exact_vertical_training(vertical_case, setting, tmp_path)
