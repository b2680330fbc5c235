"""PEFT on two ranks: the life of adapters, as `tests/integration/test_adapters.py` has it at one process; and packed bases, whole
on each of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import RankError
from tests.integration import test_adapters as one_process
from tests.integration import test_packed_weights as packed
from tests.ranks import on_ranks, require_ranks

_LIVES: dict[str, Callable[[Path], Any]] = {
    "switched": partial(one_process.test_adapters_that_are_switched, one_process._everything),
    "added to a group": one_process.test_an_adapter_that_comes_into_a_group_when_it_is_switched_on,
    "merged, deleted": one_process.test_adapters_that_are_merged_and_deleted,
    "merged, unloaded": one_process.test_adapters_that_are_merged_and_unloaded,
    "loaded with the other one active": one_process.test_a_checkpoint_that_is_loaded_while_another_adapter_is_active,
    "load refused": one_process.test_states_of_an_adapter_in_no_group_are_not_dropped_by_a_load,
    "trained base": one_process.test_a_base_weight_that_was_trained_keeps_its_states_when_an_adapter_comes,
    "group refused": one_process.test_a_group_that_is_refused_leaves_everything_as_it_was,
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("life", _LIVES)
def test_the_life_of_adapters(life: str, tmp_path: Path) -> None:
    require_ranks(2, lambda _: _LIVES[life](tmp_path), tmp_path)


@pytest.mark.deep
@on_ranks(2)
def test_an_adapter_that_is_added_after_initialize_is_refused_before_the_step(rank: int, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="their gradients are not averaged"):
        one_process.test_an_adapter_that_is_added_after_initialize(tmp_path)


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
    model = packed._adapted()
    with packed._twins(tmp_path, model, is_tight=False, zero_optimization=zero) as both:
        assert any(slot.spec.packed for unit in both.engine._parts.plan.units for slot in unit.layout.slots)
        assert ["each process keeps all weights" in warning for warning in warnings] == [True] * (stage == 3)
        packed._train(both)
        both.require_equal()
