"""Trains one case under one row twice, in plain torch and paged, and demands the same bits."""

from __future__ import annotations

import os
from pathlib import Path

from tests.exactness.case import Case
from tests.exactness.driver import reference_record, reference_trainer, train
from tests.exactness.grid import Row
from tests.exactness.paged import paged_trainer
from tests.exactness.record import require_equal


def require_exact_training(case: Case, row: Row, directory: Path, *, uses_cache: bool = True) -> None:
    """Raise :class:`tests.exactness.record.Difference` with the first difference, if there is one.

    Args:
        directory: empty; for scratch files, of which none may be left.
        uses_cache: whether a reference from an earlier row may be used again.
    """
    settings = {"dtype": row.compute_dtype, "accumulation": row.accumulation}
    expected = reference_record(case, row.numerics) if uses_cache else None
    if expected is None:
        expected = train(reference_trainer(case, row), case.batch, **settings)
    trainer = paged_trainer(case, row, directory)
    try:
        actual = train(trainer, case.batch, **settings)
    finally:
        trainer.close()
    require_equal(expected, actual, context=f"{case.name} with {row}")
    if left := os.listdir(directory):
        raise AssertionError(f"{left} left in the directory for scratch files after close")
