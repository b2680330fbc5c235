"""The same training code run on a plain torch model and on one that an engine holds, then everything compared.

`require_same` runs a scenario, a function of a `Side` that is not told which one it has. `Twins` trains both step by step, for
tests that make a model and an optimizer of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from tests.exactness.case import Case, loss_of
from tests.exactness.lockstep import PLAIN, everything_on_nvme, make_batch
from tests.exactness.optimizers import torch_optimizer
from tests.exactness.paged import least_budget

MODES: dict[str, dict[str, Any]] = {
    "smallest": {"infinity": {"host_memory_budget": "least"}},
    "smallest deferred": {"infinity": {"host_memory_budget": "least", "update": "deferred"}},
    "smallest step": {"infinity": {"host_memory_budget": "least", "update": "step"}},
    "roomy": {},
    "resident": {"zero_optimization": {"offload_param": None, "offload_optimizer": None}},
}
"""Changes to a config that has everything on NVMe; "least" stands for the smallest budget that is accepted."""


def on_nvme(directory: Path, **changes: Any) -> dict[str, Any]:
    """A config that leaves to a library what it can; nothing stays in memory."""
    directory.mkdir(parents=True, exist_ok=True)
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    memory = {
        "host_memory_budget": "64MiB",
        "staging_buffer_bytes": 49152,
        "keep_in_memory": False,
        "main_weights": "fp32",
    }
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    return {"zero_optimization": zero, "infinity": memory, **changes}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Over what is trained."""
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)


class Twins:
    """A model that an engine holds and an equal one in plain torch, each with an optimizer that the user made.

    Attributes:
        sides: model and optimizer, of the engine first.
    """

    def __init__(
        self,
        directory: Path,
        model: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer] = adamw,
        *,
        is_tight: bool = False,
        plain: nn.Module | None = None,
        initialize: Callable[..., Any] = infinity.initialize,
        **changes: Any,
    ) -> None:
        """
        Args:
            make: the optimizer, from the model.
            is_tight: with the smallest budget, in which no unit stays where it is.
            plain: by default a copy of ``model``.
            initialize: `infinity.deepspeed.initialize` for DeepSpeed's names.
            changes: to `everything_on_nvme`.
        """
        directory.mkdir(exist_ok=True)
        self.plain: Any = copy.deepcopy(model) if plain is None else plain
        self.model: Any = model
        config = everything_on_nvme(directory, {"optimizer": None, **changes})
        if is_tight:
            config["infinity"].pop("staging_buffer_bytes", None)
            config["infinity"]["host_memory_budget"] = least_budget(model, config, optimizer=make(model))
        self.engine, self.optimizer, *_ = initialize(model=model, optimizer=make(model), config=config)
        self.expected = make(self.plain)
        self.sides = [(self.model, self.optimizer), (self.plain, self.expected)]

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def change(self, change: Callable[[Any, Any], Any]) -> None:
        """Do the same to both sides, with the same random numbers."""
        state = torch.get_rng_state()
        for model, optimizer in self.sides:
            torch.set_rng_state(state)
            change(model, optimizer)

    def step(self, *losses: Callable[[Any], torch.Tensor], by_hand: bool = False, max_norm: float = 0.0) -> None:
        """One step, of a micro-batch per function, which makes a loss of a model; losses must be equal.

        Args:
            by_hand: with `loss.backward` and the optimizer's step, not the engine's.
            max_norm: by which the plain side clips, as the config says.
        """
        state, wanted = torch.get_rng_state(), []
        for loss in losses:
            wanted.append(loss(self.plain))
            (wanted[-1] / len(losses)).backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm)
        self.expected.step()
        self.expected.zero_grad()
        torch.set_rng_state(state)
        for loss, expected in zip(losses, wanted, strict=True):
            found = loss(self.model if by_hand else self.engine)
            assert torch.equal(found, expected)
            if by_hand:
                (found / len(losses)).backward()
            else:
                self.engine.backward(found)
                self.engine.step()
        if by_hand:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def require_equal(self, *, has_states: bool = True) -> None:
        """Weights and buffers have to be equal, and the optimizers' states."""
        weights, expected = self.model.state_dict(), self.plain.state_dict()
        assert weights.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(weights[name], value)] == []
        if has_states:
            found, wanted = (each.state_dict()["state"] for each in (self.optimizer, self.expected))
            assert found.keys() == {key for key, entry in wanted.items() if entry}
            for key, entry in found.items():
                for name, value in wanted[key].items():
                    assert torch.equal(torch.as_tensor(entry[name]), torch.as_tensor(value)), (key, name)


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
    config = everything_on_nvme(directory, merged)
    if config["infinity"]["host_memory_budget"] == "least":
        config["infinity"]["host_memory_budget"] = least_budget(model, config)
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
