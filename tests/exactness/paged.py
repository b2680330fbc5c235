"""The trainers under test: the engine's own loop and the plain loop on the hooked module, set up as a row says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.errors import BudgetTooSmallError
from tests.exactness.case import Case, loss_of
from tests.exactness.grid import Row
from tests.exactness.optimizers import CONFIG_SECTION, MAX_NORM, parameter_groups, torch_optimizer
from tests.exactness.record import Snapshot
from tests.states import state_of

_PAGE_BYTES = {"small": 36864, "large": 131072, "auto": None}
_ROOMY_BYTES = 1 << 30
_STATE_BYTES = 8
"""Per parameter: two thirds of what weights and states take with bf16."""


def config_of(row: Row, directory: Path, *, budget_bytes: int) -> dict[str, Any]:
    """The JSON a user would write for ``row``."""
    zero: dict[str, Any] = {"stage": 3}
    for key, device in (("offload_param", row.offload_param), ("offload_optimizer", row.offload_optimizer)):
        zero[key] = {"device": device, **({"nvme_path": str(directory)} if device == "nvme" else {})}
    own: dict[str, Any] = {
        "host_memory_budget": budget_bytes,
        "prefetch": row.prefetch,
        "keep_in_memory": row.budget != "roomy",
        "update": row.update,
        "main_weights": row.main_weights,
        "gradient_dtype": row.gradient_dtype if row.dtype == "bf16" else "auto",
        "state_dtype": row.state_dtype,
        "update_workers": row.workers,
    }
    if (staging_buffer_bytes := _PAGE_BYTES[row.page]) is not None:
        own["staging_buffer_bytes"] = staging_buffer_bytes
    if row.loop == "plain" and row.budget in ("tight", "half") and row.update == "auto":
        # The smallest budget for updates in backward has no room for gradients that wait for optimizer.step().
        own["update"] = "deferred"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # Whoever writes the plain loop accumulates himself, and the config need not know.
        "gradient_accumulation_steps": row.accumulation if row.loop == "engine" else 1,
        "gradient_clipping": MAX_NORM if row.clipping else 0.0,
        "bf16": {"enabled": row.dtype == "bf16"},
        "zero_optimization": zero,
        "infinity": own,
    }
    if row.optimizer != "instance":
        config["optimizer"] = CONFIG_SECTION
    return config


class PagedTrainer:
    """Knows an engine made for one case and row; subclasses know a loop."""

    def __init__(self, case: Case, row: Row, directory: Path) -> None:
        self.model = case.make(row.checkpointing)
        self.directory = directory
        named = {fqn: param for fqn, param in self.model.named_parameters() if param.requires_grad}
        arguments: dict[str, Any] = {"model": self.model}
        if row.optimizer == "groups":
            arguments["model_parameters"] = parameter_groups(named)
        elif row.optimizer == "instance":
            arguments["optimizer"] = torch_optimizer("instance", named)
        budget_bytes = _ROOMY_BYTES
        if row.budget in ("tight", "half"):
            # The failure must leave model, groups and optimizer as they were: the same ones are used again.
            refused = config_of(row, directory, budget_bytes=1)
            self.configure(refused)
            budget_bytes = least_budget(**arguments, config=refused)
        if row.budget == "half":
            # Of what is left beyond the least, up to half may go into fetching ahead.
            budget_bytes += _STATE_BYTES * sum(param.numel() for param in self.model.parameters())
        config = config_of(row, directory, budget_bytes=budget_bytes)
        self.configure(config)
        self.engine, self.optimizer, _, _ = infinity.initialize(**arguments, config=config)

    def configure(self, config: dict[str, Any]) -> None:
        """Change what the row says."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def evaluate(self, batch: dict[str, Any]) -> torch.Tensor:
        self.engine.eval()
        with torch.no_grad():
            loss = loss_of(self.engine(**batch))
        self.engine.train()
        return loss

    def norm(self) -> torch.Tensor:
        return torch.as_tensor(self.engine.report.grad_norm, dtype=torch.float32)

    def snapshot(self) -> Snapshot:
        return paged_snapshot(self.engine, self.optimizer)

    def close(self) -> None:
        self.engine.close()


class EngineLoop(PagedTrainer):
    """``engine(...)``, ``engine.backward``, ``engine.step`` after every micro-batch."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return loss_of(self.engine(**batch))

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)
        self.engine.step()

    def step(self) -> torch.Tensor:
        return self.norm()


class PlainLoop(PagedTrainer):
    """``model(...)``, ``loss.backward``, and the optimizer's ``step`` and ``zero_grad`` after the last micro-batch."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return loss_of(self.model(**batch))

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> torch.Tensor:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.norm()


def paged_trainer(case: Case, row: Row, directory: Path) -> EngineLoop | PlainLoop:
    """The trainer for the row's loop."""
    return EngineLoop(case, row, directory) if row.loop == "engine" else PlainLoop(case, row, directory)


def least_budget(model: nn.Module, config: Mapping[str, Any], **arguments: Any) -> int:
    """The smallest host memory budget that ``infinity.initialize`` accepts with these arguments."""
    own = {**config.get("infinity", {}), "host_memory_budget": 1}
    try:
        engine, *_ = infinity.initialize(model=model, config={**config, "infinity": own}, **arguments)
    except BudgetTooSmallError as error:
        return error.minimum_bytes
    needs_none = engine.plan.placement.gradients_on_device  # and weights and states are there, too
    engine.close()
    assert needs_none, "a host budget of one byte was accepted"
    return 1


def paged_snapshot(engine: Any, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Everything that a paged model and its optimizer are."""
    model: nn.Module = engine.module
    params = dict(model.named_parameters())
    weights = {}
    for fqn, param in params.items():
        # One by one: a tight budget has no room for all of them.
        with infinity.GatheredParameters(param):
            weights[fqn] = param.detach().clone()
    trainable = {fqn: param for fqn, param in params.items() if param.requires_grad}
    return Snapshot.copied(
        weights=_joined(weights),
        buffers=dict(model.named_buffers()),
        main_weights=_joined({fqn: state_of(engine, param)["weight"] for fqn, param in trainable.items()}),
        state=_joined_states({fqn: dict(optimizer.state.get(param, {})) for fqn, param in trainable.items()}),
    )


def _joined(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts that are paged one by one, as the tensors that they are in the model."""
    parts: dict[str, list[torch.Tensor]] = {}
    for fqn, value in values.items():
        parts.setdefault(fqn.partition("_by_expert.")[0], []).append(value)
    return {fqn: torch.cat(each) if len(each) > 1 else each[0] for fqn, each in parts.items()}


def _joined_states(states: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    parts: dict[str, list[dict[str, Any]]] = {}
    for fqn, state in states.items():
        parts.setdefault(fqn.partition("_by_expert.")[0], []).append(state)
    return {
        fqn: {
            name: torch.cat([each[name] for each in found]) if len(found) > 1 and value.dim() else value
            for name, value in found[0].items()
        }
        for fqn, found in parts.items()
    }
