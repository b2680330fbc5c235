"""The cases are what their names say, and hard enough: a shape that has lost its point would pass for nothing."""

from __future__ import annotations

import pytest
import torch

from tests.exactness.case import Case, Draw
from tests.exactness.driver import NUM_STEPS, reference_record, reference_trainer, train
from tests.exactness.families import FAMILIES
from tests.exactness.grid import Row
from tests.exactness.optimizers import MAX_NORM
from tests.exactness.record import require_equal
from tests.exactness.shapes import SHAPES

_CPU = torch.device("cpu")
_ALL = (*SHAPES, *FAMILIES)
_BY_NAME = {case.name: case for case in _ALL}


@pytest.mark.deep(but=6)
@pytest.mark.parametrize("case", _ALL, ids=lambda case: case.name)
def test_a_case_is_reproducible_trains_and_is_clipped(case: Case) -> None:
    row = Row(checkpointing="reentrant" if case.has_checkpointing else "none", dtype="bf16", clipping=True)
    record = reference_record(case, row.numerics)
    again = train(reference_trainer(case, row), case.batch, dtype=row.compute_dtype, accumulation=1)
    require_equal(record, again, context="the reference against itself")

    initial = dict(case.make("none").named_parameters())
    assert any(not torch.equal(record.final.main_weights[fqn], initial[fqn]) for fqn in record.final.main_weights)
    norms = [value.item() for what, value in record.events if what.startswith("norm")]
    assert len(norms) == NUM_STEPS
    assert min(norms) > MAX_NORM
    assert all(torch.isfinite(value).all() for _, value in record.tensors())


def _called(case: Case, step: int) -> set[str]:
    """FQNs of the modules that a forward calls."""
    model = case.make("none")
    called: set[str] = set()
    for fqn, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, fqn=fqn: called.add(fqn))
    model(**case.batch(Draw(step, 0, torch.float32, _CPU)))
    return called


def test_experts_are_really_skipped() -> None:
    experts = {f"blocks.0.experts.{index}" for index in range(4)}
    visited = [_called(_BY_NAME["experts"], step) & experts for step in range(NUM_STEPS)]
    assert all(calls < experts for calls in visited)
    assert set.union(*visited) > visited[0]
    case = _BY_NAME["mixtral_one_by_one"]
    counts = [len([fqn for fqn in _called(case, step) if fqn.endswith("gate_up")]) for step in range(NUM_STEPS)]
    assert max(counts) < 16


def test_blocks_are_really_skipped() -> None:
    assert "blocks.3" not in _called(_BY_NAME["skipped_blocks"], 0)
    assert "blocks.3" in _called(_BY_NAME["skipped_blocks"], 3)
