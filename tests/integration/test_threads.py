"""The suite's one-thread rule hides nothing: with torch's own number of threads the bits are plain torch's as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness.case import Case
from tests.exactness.families import FAMILIES
from tests.exactness.grid import Row
from tests.exactness.shapes import SHAPES
from tests.exactness.verification import require_exact_training

_CASES = [case for case in (*SHAPES, *FAMILIES) if case.name in {"plain", "convolutions", "big_embedding", "llama"}]
_ROWS = [Row(budget="tight", page="small"), Row(dtype="bf16", clipping=True, accumulation=3)]


@pytest.mark.deep(but=1)
@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("setting", _ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("threaded", _CASES, ids=lambda case: case.name)
def test_trains_to_the_same_bits_on_several_threads(threaded: Case, setting: Row, tmp_path: Path) -> None:
    require_exact_training(threaded, setting, tmp_path, uses_cache=False)
