"""Packed frozen bases on two ranks: whole on each of them, with adapters that train together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.integration import test_packed_weights as one_process
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of PEFT


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("base_on", ["nvme", "none"])
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
@on_ranks(2)
def test_adapters_train_over_a_packed_base_on_each_rank(rank: int, stage: int, base_on: str, tmp_path: Path) -> None:
    """Both ranks have the same data, of which the mean gradient is each one's: so the bits are those of one process."""
    warnings: list[str] = []
    logger = logging.getLogger("infinity.engine.planned")
    logger.addHandler(handler := logging.Handler(logging.WARNING))
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    zero: dict[str, Any] = {"stage": stage, **({} if base_on == "nvme" else {"offload_param": None})}
    model = one_process._adapted()
    with one_process._twins(tmp_path, model, is_tight=False, zero_optimization=zero) as both:
        assert any(slot.spec.packed for unit in both.engine._parts.plan.units for slot in unit.layout.slots)
        assert ["each process keeps all weights" in warning for warning in warnings] == [True] * (stage == 3)
        one_process._train(both)
        both.require_equal()
