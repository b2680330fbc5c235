"""Training on a device that is not the host, against plain torch on the same device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import BudgetTooSmallError
from tests.exactness.case import Case
from tests.exactness.driver import reference_of, train
from tests.exactness.grid import Row
from tests.exactness.paged import paged_trainer
from tests.exactness.record import Record, require_equal
from tests.exactness.reference import PlainTorch
from tests.internals import cost_model, placement


class OnTheDevice(PlainTorch):
    """Plain torch with the model on a device that is not the host, and the optimizer where the config puts it.

    Gradients are accumulated, and clipped, where an engine keeps them until the step: on the CPU, unless updates run on the
    device and it has room. The norm of each is taken where it became complete: on the device where a step has one
    micro-batch, else where they are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
        *,
        device: str,
        updates_on: str,
        gradients_on: str,
        **settings: Any,
    ) -> None:
        super().__init__(model, make_optimizer, device=device, main_device=updates_on, **settings)
        self._device = device
        self._gradients_on = gradients_on
        self._gradients: dict[str, torch.Tensor] = {}
        self._norms: dict[str, torch.Tensor] = {}

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.num_micro_batches).backward()
        for fqn, param in self.trainable.items():
            if param.grad is not None:
                gradient = param.grad.float()
                if fqn in self._gradients:
                    gradient = self._gradients[fqn] + gradient.to(self._gradients_on)
                if self._rounds_gradients:
                    gradient = gradient.bfloat16().float()
                self._norms[fqn] = torch.nn.utils.get_total_norm([gradient])
                self._gradients[fqn] = gradient.to(self._gradients_on)
                param.grad = None

    def step(self) -> torch.Tensor:
        norms = [self._norms[fqn] for fqn in self.main if fqn in self._norms]
        # Of parameters that had a gradient in one micro-batch alone.
        if any(norm.device.type != "cpu" for norm in norms):
            norms = [norm.to(self._device) for norm in norms]
        norm = torch.linalg.vector_norm(torch.stack(norms)).cpu()
        if self.max_norm > 0:
            coefficient = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
            self._gradients = {fqn: gradient * coefficient for fqn, gradient in self._gradients.items()}
        for fqn, gradient in self._gradients.items():
            self.main[fqn].grad = gradient.to(self.main[fqn].device)
        self._gradients, self._norms = {}, {}
        self.update()
        return norm


_UPLOAD_BUFFER_BYTES = 8192
"""Small enough to cut the units of small models."""


def _least_device_memory(units: Sequence[Any], request: Any) -> int:
    with pytest.raises(BudgetTooSmallError) as caught:
        placement.place(units, dataclasses.replace(request, device_budget_bytes=0))
    return caught.value.minimum_bytes


def give_least_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines get as little of the device's memory for weights as can be, and small pages for uploads."""

    best = cost_model.best_placement

    def place(units: Sequence[Any], request: Any, order: Sequence[int]) -> Any:
        if request.param_tier != "none":
            request = dataclasses.replace(request, device_budget_bytes=_least_device_memory(units, request))
        return best(units, request, order)

    monkeypatch.setattr(cost_model, "best_placement", place)
    monkeypatch.setattr(placement, "_UPLOAD_BUFFER_BYTES", _UPLOAD_BUFFER_BYTES)


def _without_norms(record: Record) -> Record:
    return Record([event for event in record.events if not event[0].startswith("norm")], record.final)


def require_exact_training_on(device: str, case: Case, row: Row, directory: Path) -> None:
    """As `tests.exactness.verification.require_exact_training`, against plain torch on the same device."""
    settings: dict[str, Any] = {"dtype": row.compute_dtype, "accumulation": row.accumulation, "device": device}
    trainer = paged_trainer(case, row, directory)
    keeps_them = trainer.engine.plan.placement.gradients_on_device
    updates_on = device if row.offload_optimizer == "none" else "cpu"
    places = {"device": device, "updates_on": updates_on, "gradients_on": device if keeps_them else "cpu"}
    reference = reference_of(OnTheDevice, case.make(row.checkpointing), row, **places)
    assert trainer.engine.device.type == device
    try:
        expected = train(reference, case.batch, **settings)
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
