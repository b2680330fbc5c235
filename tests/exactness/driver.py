"""One way through a training run for every trainer, so that only the trainers can differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from tests.exactness.case import Case, Draw, PlannedFailure
from tests.exactness.grid import Row
from tests.exactness.optimizers import MAX_NORM, decay_learning_rates, torch_optimizer
from tests.exactness.record import Record, Snapshot
from tests.exactness.reference import PlainTorch

_Reference = TypeVar("_Reference", bound=PlainTorch)
NUM_STEPS = 4
# An evaluation here comes between two training steps, off the recorded path, and one follows the last.
_EVALUATE_AFTER = (2, NUM_STEPS)
_EVALUATION_BATCH = 99


class Trainer(Protocol):
    """What the driver needs of a training loop."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of one micro-batch, undivided."""

    def backward(self, loss: torch.Tensor) -> None:
        """All that is done per micro-batch after its forward."""

    def step(self) -> torch.Tensor:
        """All that is done after the last micro-batch of a step; returns the norm before clipping."""

    def evaluate(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss in eval mode without grad; leaves train mode on."""

    def snapshot(self) -> Snapshot: ...

    def close(self) -> None: ...


def train(
    trainer: Trainer,
    make_batch: Callable[[Draw], dict[str, Any]],
    *,
    dtype: torch.dtype,
    accumulation: int,
    num_steps: int = NUM_STEPS,
    device: torch.device | str = "cpu",
) -> Record:
    """Train and write down everything that has to be equal.

    A micro-batch whose forward fails as planned is trained on again without its failure.
    """
    record = Record()
    device = torch.device(device)
    torch.manual_seed(4)
    for step in range(num_steps):
        for micro_batch in range(accumulation):
            batch = make_batch(Draw(step, micro_batch, dtype, device))
            try:
                loss = trainer.forward(batch)
            except PlannedFailure:
                loss = trainer.forward({**batch, "fail": False})
            record.note(f"loss of step {step} micro-batch {micro_batch}", loss)
            trainer.backward(loss)
            del loss
        record.note(f"norm of step {step}", trainer.step())
        decay_learning_rates(trainer.param_groups)
        if step + 1 in _EVALUATE_AFTER:
            batch = {**make_batch(Draw(_EVALUATION_BATCH, 0, dtype, device))}
            if "fail" in batch:
                batch["fail"] = False
            record.note(f"evaluation after step {step}", trainer.evaluate(batch))
    # Equal only if nothing else drew from the global generator.
    record.note("next random number", torch.rand(1))
    record.final = trainer.snapshot()
    return record


def reference_of(kind: Callable[..., _Reference], model: nn.Module, row: Row, **more: Any) -> _Reference:
    """``kind`` of plain torch with the numerics of ``row``, and ``more`` that only it takes."""
    return kind(
        model,
        lambda named: torch_optimizer(row.optimizer, named),
        compute_dtype=row.compute_dtype,
        num_micro_batches=row.accumulation if row.loop == "engine" else 1,
        max_norm=MAX_NORM if row.clipping else 0.0,
        rounds_half_up=row.rounds_half_up,
        rounds_gradients=row.rounds_gradients,
        state_dtype=row.state_dtype,
        **more,
    )


def reference_trainer(case: Case, row: Row, device: torch.device | str = "cpu") -> PlainTorch:
    """Plain torch with the numerics of ``row``."""
    return reference_of(PlainTorch, case.make(row.checkpointing), row, device=device)


@lru_cache(maxsize=64)
def reference_record(case: Case, numerics: Row, device: str = "cpu") -> Record:
    """What plain torch gives; cached because many rows share it. Pass ``row.numerics``."""
    trainer = reference_trainer(case, numerics, device)
    return train(trainer, case.batch, dtype=numerics.compute_dtype, accumulation=numerics.accumulation, device=device)
