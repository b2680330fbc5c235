"""Every shape of model trains to the bits of plain torch, under every row of the grid."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness.case import Case
from tests.exactness.grid import Row
from tests.exactness.shapes import SHAPES
from tests.exactness.verification import require_exact_training

CASES = SHAPES


@pytest.mark.deep(but=10)
def test_shape_trains_to_the_same_bits(case: Case, row: Row, tmp_path: Path) -> None:
    require_exact_training(case, row, tmp_path)
