"""Training on a device that is not the host, against plain torch on the same device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.exactness.case import Case
from tests.exactness.driver import train
from tests.exactness.grid import Row
from tests.exactness.optimizers import MAX_NORM, torch_optimizer
from tests.exactness.paged import paged_trainer
from tests.exactness.record import Record, require_equal
from tests.exactness.reference import PlainTorch


class OnTheDevice(PlainTorch):
    """Plain torch with the model on a device that is not the host, and the optimizer where the config puts it.

    Gradients are accumulated, and clipped, on the CPU: that is where an engine keeps them until the step. The norm of each
    is taken where it became complete: on the device where a step has one micro-batch, else on the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
        *,
        device: str,
        updates_on: str,
        **settings: Any,
    ) -> None:
        super().__init__(model, make_optimizer, device=device, main_device=updates_on, **settings)
        self._gradients: dict[str, torch.Tensor] = {}
        self._norms: dict[str, torch.Tensor] = {}

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.num_micro_batches).backward()
        for fqn, param in self.trainable.items():
            if param.grad is not None:
                gradient = param.grad.float()
                if fqn in self._gradients:
                    gradient = self._gradients[fqn] + gradient.cpu()
                self._norms[fqn] = torch.nn.utils.get_total_norm([gradient])
                self._gradients[fqn] = gradient.cpu()
                param.grad = None

    def step(self) -> torch.Tensor:
        norm = torch.linalg.vector_norm(torch.stack([self._norms[fqn] for fqn in self.main if fqn in self._norms]))
        norm = norm.cpu()
        if self.max_norm > 0:
            coefficient = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
            self._gradients = {fqn: gradient * coefficient for fqn, gradient in self._gradients.items()}
        for fqn, gradient in self._gradients.items():
            self.main[fqn].grad = gradient.to(self.main[fqn].device)
        self._gradients, self._norms = {}, {}
        self.update()
        return norm


def _without_norms(record: Record) -> Record:
    return Record([event for event in record.events if not event[0].startswith("norm")], record.final)


def require_exact_training_on(device: str, case: Case, row: Row, directory: Path) -> None:
    """As `tests.exactness.verification.require_exact_training`, against plain torch on the same device."""
    settings: dict[str, Any] = {"dtype": row.compute_dtype, "accumulation": row.accumulation, "device": device}
    reference = OnTheDevice(
        case.make(row.checkpointing),
        lambda named: torch_optimizer(row.optimizer, named),
        device=device,
        updates_on=device if row.offload_optimizer == "none" else "cpu",
        compute_dtype=row.compute_dtype,
        num_micro_batches=row.accumulation if row.loop == "engine" else 1,
        max_norm=MAX_NORM if row.clipping else 0.0,
        rounds_half_up=row.rounds_half_up,
        rounds_gradients=row.rounds_gradients,
        state_dtype=row.state_dtype,
    )
    expected = train(reference, case.batch, **settings)
    trainer = paged_trainer(case, row, directory)
    assert trainer.engine.device.type == device
    try:
        actual = train(trainer, case.batch, **settings)
    finally:
        trainer.close()
    if not row.clipping:
        # Nothing depends on the norm then, and it is taken where the gradients are.
        for (what, wanted), (_, got) in zip(expected.events, actual.events, strict=True):
            if what.startswith("norm"):
                torch.testing.assert_close(got, wanted)
        expected, actual = _without_norms(expected), _without_norms(actual)
    require_equal(expected, actual, context=f"{case.name} with {row} on {device}")
