"""Trains one case with ``engine.train_batch`` and demands the bits of plain torch in the same order.

Which order that is depends on the model, so each case says what it has to be.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.exactness.case import Case, Draw, PlannedFailure
from tests.exactness.covering import covering_rows, pairs
from tests.exactness.driver import reference_of
from tests.exactness.grid import MOVEMENT_AXES, WORKERS, Row
from tests.exactness.optimizers import decay_learning_rates
from tests.exactness.paged import PagedTrainer
from tests.exactness.record import Record, require_equal
from tests.exactness.vertical import VerticalTorch
from tests.internals import find_blocks

NUM_STEPS = 3
AXES: dict[str, tuple[Hashable, ...]] = {
    **MOVEMENT_AXES,
    "accumulation": (2, 3, 8),
    "optimizer": ("config", "groups", "instance"),
    "dtype": ("fp32", "bf16"),
    "main_weights": ("auto", "fp32"),
    "gradient_dtype": ("auto", "fp32", "bf16"),
    "state_dtype": ("fp32", "bf16", "int8"),
}
_PARTIALS = [
    *pairs(AXES),
    {"dtype": "bf16", "gradient_dtype": "bf16", "clipping": False, "update": "auto", "budget": "tight"},
    {"dtype": "bf16", "gradient_dtype": "bf16", "clipping": True, "offload_optimizer": "nvme", "budget": "tight"},
]
ROWS: tuple[Row, ...] = tuple(
    Row.of({**row, "workers": WORKERS[number % len(WORKERS)]})
    for number, row in enumerate(covering_rows(AXES, _PARTIALS))
)

# Why a case goes in the ordinary order; all others go vertically.
_NEVER = {
    "gradient_penalty": "in the graph",
    "alternating_loss": "micro-batches call different blocks",
    "shared_block": "the model has no repeated blocks",
    "skipped_blocks": "micro-batches call different blocks",
    "varying_length": "micro-batches call different blocks",
    "mixtral": "hands tensors out",
}
# Blocks of these are not recomputed by the model at all, or inside their own forward.
_INDIFFERENT_TO_REENTRANT = {
    *("bag", "detached_middle", "gpt2", "keyword_arguments", "kept_references", "llama", "bert"),
    *("mixtral_one_by_one", "odd_sizes", "qwen2", "structured_output", "vit"),
}


def expected_reason(case: Case, row: Row) -> str | None:
    """Why ``case`` goes in the ordinary order under ``row``; empty if it has to go vertically; None if that depends."""
    if row.budget in ("tight", "half") and "nvme" not in (row.offload_param, row.offload_optimizer):
        return None  # what waits for backward may find no room
    if case.name == "skipped_blocks" or (case.name == "mixtral" and row.checkpointing == "reentrant"):
        return None
    if case.name in _NEVER and (row.checkpointing != "reentrant" or case.name != "alternating_loss"):
        return _NEVER[case.name]
    if row.checkpointing == "reentrant" and case.name not in _INDIFFERENT_TO_REENTRANT:
        return "by itself" if case.name != "t5" else "views of one tensor"
    if row.checkpointing == "non_reentrant" and case.name in ("batch_norms", "parametrized"):
        return "under its own checkpointing"
    return ""


class VerticalLoop(PagedTrainer):
    """``engine.train_batch`` with ``"infinity.schedule": "vertical"``."""

    def configure(self, config: dict[str, Any]) -> None:
        config["infinity"]["schedule"] = "vertical"

    def train_step(self, batches: list[dict[str, Any]]) -> torch.Tensor:
        try:
            return self.engine.train_batch(iter(batches))
        except PlannedFailure:
            self.engine.reset()
            return self.engine.train_batch(iter([{**batch, "fail": False} for batch in batches]))


def require_exact_vertical_training(case: Case, row: Row, directory: Path) -> None:
    """Raise :class:`tests.exactness.record.Difference` with the first difference, if there is one.

    Args:
        directory: empty; for scratch files, of which none may be left.
    """
    reason = expected_reason(case, row)
    trainer = VerticalLoop(case, row, directory)
    # Under the reentrant kind, gradients reach parameters past the reference's copies of them.
    is_plain = reason == "" or case.name in _INDIFFERENT_TO_REENTRANT
    model = case.make("none" if is_plain else row.checkpointing)
    reference = reference_of(VerticalTorch, model, row, blocks=find_blocks(model))
    expected, actual = Record(), Record()
    torch.manual_seed(4)
    try:
        for step in range(NUM_STEPS):
            batches = _batches(case, row, step)
            before = torch.get_rng_state()
            actual.note(f"loss of step {step}", trainer.train_step(batches))
            report, after = trainer.engine.report, torch.get_rng_state()
            actual.note(f"norm of step {step}", trainer.norm())
            is_vertical = report.schedule == "vertical"
            if reason is not None and (reason not in report.schedule_reason or is_vertical != (not reason)):
                raise AssertionError(f"{case.name} with {row}: {report.schedule}, {report.schedule_reason!r}")
            torch.set_rng_state(before)
            whole = [{**batch, "fail": False} if "fail" in batch else batch for batch in batches]
            # What mixtral's own checkpointing does to gradients happens inside its blocks, in either order.
            as_vertical = is_vertical and not (case.name == "mixtral" and row.checkpointing == "reentrant")
            losses = reference.accumulate(whole) if as_vertical else _accumulate_in_order(reference, whole)
            expected.note(f"loss of step {step}", torch.stack([loss.float() for loss in losses]).mean())
            expected.note(f"norm of step {step}", reference.step())
            if not torch.equal(after, torch.get_rng_state()):
                raise AssertionError(f"{case.name} with {row}: other random numbers were drawn in step {step}")
            decay_learning_rates(trainer.param_groups)
            decay_learning_rates(reference.param_groups)
        actual.final, expected.final = trainer.snapshot(), reference.snapshot()
    finally:
        trainer.close()
    require_equal(expected, actual, context=f"{case.name} with {row}")
    if left := os.listdir(directory):
        raise AssertionError(f"{left} left in the directory for scratch files after close")


def _batches(case: Case, row: Row, step: int) -> list[dict[str, Any]]:
    device = torch.device("cpu")
    # Some cases know what to do in three micro-batches only.
    return [case.batch(Draw(step, index % 3, row.compute_dtype, device)) for index in range(row.accumulation)]


def _accumulate_in_order(reference: VerticalTorch, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        loss = reference.forward(batch)
        losses.append(loss.detach())
        reference.backward(loss)
    return losses


def rows_of(index: int, case: Case, *, full: bool) -> list[Row]:
    """The rows to run for the ``index``-th case: one for each, so that each of them meets several cases."""
    rows = ROWS if full else [ROWS[index % len(ROWS)]]
    if case.has_checkpointing:
        return list(rows)
    return list(dict.fromkeys(replace(row, checkpointing="none") for row in rows))
