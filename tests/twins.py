"""The same training code run on a plain torch model and on one that an engine holds, then everything compared.

For what users do with gradients and optimizers between backward and step: a scenario is a function of a `Side` and is not told
which one it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.errors import BudgetTooSmallError
from tests.exactness.case import Case, loss_of
from tests.exactness.lockstep import PLAIN, everything_on_nvme, make_batch
from tests.exactness.optimizers import torch_optimizer

MODES: dict[str, dict[str, Any]] = {
    "smallest": {"infinity": {"host_memory_budget": "least"}},
    "smallest deferred": {"infinity": {"host_memory_budget": "least", "update": "deferred"}},
    "smallest step": {"infinity": {"host_memory_budget": "least", "update": "step"}},
    "roomy": {},
    "resident": {"zero_optimization": {"offload_param": None, "offload_optimizer": None}},
}
"""Changes to a config that has everything on NVMe; "least" stands for the smallest budget that is accepted."""


class Side:
    """A model with its optimizer, and what a scenario saw of it."""

    def __init__(self, model: nn.Module, optimizer: Any, case: Case, engine: Any = None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.engine = engine
        self.seen: list[torch.Tensor | None] = []
        self._case = case

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def named(self, fqn: str) -> nn.Parameter:
        return self.model.get_parameter(fqn)

    def batch(self, number: int) -> dict[str, Any]:
        return make_batch(number, case=self._case)

    def loss(self, number: int = 0) -> torch.Tensor:
        """Forward on one of any number of batches."""
        return loss_of(self.model(**self.batch(number)))

    def note(self, *values: torch.Tensor | None) -> None:
        """Values that have to be the same on both sides."""
        self.seen += [None if value is None else value.detach().clone() for value in values]

    def note_gradients(self) -> None:
        self.note(*(parameter.grad for parameter in self.parameters))

    def step(self, number: int = 0) -> None:
        """An ordinary one."""
        self.loss(number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """With the engine's calls, where there is an engine."""
        loss.backward() if self.engine is None else self.engine.backward(loss)

    def engine_step(self) -> None:
        if self.engine is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.engine.step()


def config_for(
    directory: Path, mode: str, model: nn.Module, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The mode's config, with the smallest budget looked up if it wants that."""
    merged = {**MODES[mode], **(changes or {})}
    for key in MODES[mode].keys() & (changes or {}).keys():
        if isinstance(merged[key], dict):
            merged[key] = {**MODES[mode][key], **merged[key]}
    is_least = merged.get("infinity", {}).get("host_memory_budget") == "least"
    if is_least:
        merged["infinity"] = {**merged["infinity"], "host_memory_budget": 1}
    config = everything_on_nvme(directory, merged)
    if is_least:
        try:
            infinity.initialize(model=model, config=config)
        except BudgetTooSmallError as error:
            config["infinity"]["host_memory_budget"] = error.minimum_bytes
    return config


def require_same(
    scenario: Callable[[Side], None],
    directory: Path,
    mode: str,
    *,
    case: Case = PLAIN,
    changes: Mapping[str, Any] | None = None,
    optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> None:
    """Run ``scenario`` on both sides; what it noted, and the weights in the end, must be equal."""
    make = optimizer or (lambda named: torch_optimizer("config", dict(named)))
    reference_model = case.make("none")
    reference = Side(reference_model, make(dict(reference_model.named_parameters())), case)
    scenario(reference)

    model = case.make("none")
    config = config_for(directory, mode, model, changes)
    arguments = {} if optimizer is None else {"optimizer": optimizer(dict(model.named_parameters()))}
    engine, paged, *_ = infinity.initialize(model=model, config=config, **arguments)
    with engine:
        side = Side(model, paged, case, engine)
        scenario(side)
        assert len(side.seen) == len(reference.seen)
        for number, (expected, found) in enumerate(zip(reference.seen, side.seen, strict=True)):
            assert (expected is None) == (found is None), f"value {number}"
            assert expected is None or torch.equal(found, expected), f"value {number}"
        for fqn, parameter in model.named_parameters():
            with infinity.GatheredParameters(parameter):
                assert torch.equal(parameter, reference_model.get_parameter(fqn)), fqn
