"""Packed frozen bases on two ranks: whole on each of them, with adapters that train together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import ConfigError
from tests.exactness.lockstep import everything_on_nvme
from tests.integration import test_packed_weights as one_process
from tests.ranks import require_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of PEFT


def _changes(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "offload_param": None}}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("stage", [2, 1, 0])
def test_adapters_train_over_a_packed_base_on_each_rank(stage: int, tmp_path: Path) -> None:
    """Both ranks have the same data, of which the mean gradient is each one's: so the bits are those of one process."""

    def train(_: int) -> None:
        model = one_process._adapted()
        with one_process._twins(tmp_path, model, is_tight=False, **_changes(stage)) as both:
            assert any(slot.spec.packed for unit in both.engine._parts.plan.units for slot in unit.layout.slots)
            one_process._train(both)
            both.require_equal()

    require_ranks(2, train, tmp_path)


@pytest.mark.deep
def test_stage_3_names_the_cure(tmp_path: Path) -> None:
    def begin(_: int) -> None:
        model = one_process._adapted()
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        config = everything_on_nvme(tmp_path, {"optimizer": None, "infinity": {"frozen_dtype": "nf4"}})
        with pytest.raises(ConfigError, match=r"stage 3 .*Set zero_optimization\.stage to 2"):
            infinity.initialize(model=model, optimizer=optimizer, config=config)

    require_ranks(2, begin, tmp_path)
