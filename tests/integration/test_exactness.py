"""Every shape of model, and real Hugging Face models, train to the bits of plain torch under every row of the grid.

So do they by ``engine.train_batch`` over several micro-batches, where plain torch goes in the same order; and with torch's own
number of threads: the suite's one-thread rule hides nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.exactness.case import Case
from tests.exactness.families import FAMILIES
from tests.exactness.grid import Row, rows_for
from tests.exactness.shapes import SHAPES
from tests.exactness.verification import require_exact_training
from tests.exactness.vertical_training import require_exact_vertical_training, rows_of

pytest.importorskip("transformers")

_CASES = {"test_shape_trains_to_the_same_bits": SHAPES, "test_family_trains_to_the_same_bits": FAMILIES}

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
    """Give ``case`` and ``row`` to tests that take both; the quick tier has some of them."""
    if not {"case", "row"} <= set(metafunc.fixturenames):
        return
    full = metafunc.config.getoption("--full-grid")
    cases = _CASES.get(metafunc.function.__name__)
    chosen: list[tuple[Case, Row, bool]] = []
    if cases is None:
        for index, case in enumerate((*SHAPES, *FAMILIES)):
            for place, row in enumerate((*rows_of(index, case, full=full), *_MORE_ROWS.get(case.name, ()))):
                chosen.append((case, row, place == 0 and (case in FAMILIES or index % 6 == 0)))
    for index, case in enumerate(cases or ()):
        rows = list(rows_for(full=full, has_checkpointing=case.has_checkpointing))
        turns = 8 if cases is SHAPES else 5
        if not full:  # for time: a row meets every eighth shape, and every fifth family
            rows = rows[index % turns :: turns]
        for place, row in enumerate(rows):
            # One row per family and for each second shape, and each time another.
            chosen.append((case, row, place == index % len(rows) and (cases is FAMILIES or index % 2 == 0)))
    deep = pytest.mark.deep
    combinations = [
        pytest.param(case, row, id=f"{case.name}-{row.name}", marks=() if full or is_quick else deep)
        for case, row, is_quick in chosen
    ]
    metafunc.parametrize(("case", "row"), combinations)


@pytest.mark.deep(but=10)
def test_shape_trains_to_the_same_bits(case: Case, row: Row, tmp_path: Path) -> None:
    require_exact_training(case, row, tmp_path)


def test_family_trains_to_the_same_bits(case: Case, row: Row, tmp_path: Path) -> None:
    require_exact_training(case, row, tmp_path)


@pytest.mark.deep(but=8)
def test_trains_to_the_bits_of_the_vertical_order(case: Case, row: Row, tmp_path: Path) -> None:
    require_exact_vertical_training(case, row, tmp_path)


_THREADED = [case for case in (*SHAPES, *FAMILIES) if case.name in {"plain", "convolutions", "big_embedding", "llama"}]


@pytest.mark.deep(but=1)
@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize(
    "setting",
    [Row(budget="tight", page="small"), Row(dtype="bf16", clipping=True, accumulation=3)],
    ids=lambda row: row.name,
)
@pytest.mark.parametrize("threaded", _THREADED, ids=lambda case: case.name)
def test_trains_to_the_same_bits_on_several_threads(threaded: Case, setting: Row, tmp_path: Path) -> None:
    require_exact_training(threaded, setting, tmp_path, uses_cache=False)
