"""The same small model in plain torch and paged, for tests that treat both alike step by step and then compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from tests.exactness.case import Case, Draw, loss_of
from tests.exactness.loss_scale import DeepSpeedScaler
from tests.exactness.optimizers import CONFIG_SECTION, torch_optimizer
from tests.exactness.paged import least_budget, paged_snapshot
from tests.exactness.record import Record, require_equal
from tests.exactness.reference import PlainTorch
from tests.exactness.shapes import SHAPES

SHAPES_BY_NAME = {case.name: case for case in SHAPES}
PLAIN = SHAPES_BY_NAME["plain"]
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
IN_MEMORY: dict[str, Any] = {
    "zero_optimization": {"offload_param": None, "offload_optimizer": None},
    "infinity": {"keep_in_memory": True},
}
"""Changes to a config: see `everything_on_nvme`."""


def everything_on_nvme(directory: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config with everything on NVMe and pages that cut parameters, merged with ``changes`` (None removes a key)."""
    directory.mkdir(parents=True, exist_ok=True)
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": CONFIG_SECTION,
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "infinity": {"host_memory_budget": "64MiB", "staging_buffer_bytes": 49152, "keep_in_memory": False},
    }
    return merged(config, changes or {})


def engine_on_nvme(directory: Path, model: Any, changes: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """An engine with the config of :func:`everything_on_nvme`, in which an ``optimizer`` takes the place of the config's.

    Args:
        arguments: more of ``infinity.initialize``.
    """
    own = {"optimizer": None} if "optimizer" in arguments else {}
    return infinity.initialize(
        model=model, config=everything_on_nvme(directory, own | dict(changes or {})), **arguments
    )[0]


def with_smallest_budget(directory: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` with the least memory that trains `PLAIN`: weights come and go."""
    least = least_budget(PLAIN.make("none"), everything_on_nvme(directory, changes))
    return merged(changes, {"infinity": {"host_memory_budget": least}})


def merged(config: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Blocks are merged key by key, but for the optimizer's; None in ``changes`` removes a key."""
    found = dict(config)
    for key, value in [item for each in changes for item in each.items()]:
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping) and key != "optimizer":
            value = merged(found[key], value)
        found[key] = value
        if value is None:
            del found[key]
    return found


def make_batch(
    step: int, micro_batch: int = 0, *, case: Case = PLAIN, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    return case.batch(Draw(step, micro_batch, dtype, torch.device("cpu")))


def take_steps(engine: Any, *steps: int, case: Case = PLAIN) -> None:
    """Whole steps of a model of ``case`` with the engine's calls, all of their micro-batches."""
    for step in steps:
        for micro_batch in range(engine.gradient_accumulation_steps()):
            engine.backward(
                loss_of(engine(**make_batch(step, micro_batch, case=case, dtype=engine.config.compute_dtype)))
            )
            engine.step()


def _scaler(block: Mapping[str, Any]) -> torch.amp.GradScaler:
    """What the config's ``fp16`` means, where its hysteresis is 1 or all gradients are finite."""
    scale = block.get("loss_scale", 0)
    window = 10**9 if scale else block["loss_scale_window"]
    return DeepSpeedScaler("cpu", init_scale=scale or 2.0 ** block["initial_scale_power"], growth_interval=window)


def _comparable(norm: torch.Tensor) -> torch.Tensor:
    """One value for all that is not finite: NaN is not equal to itself."""
    return norm if norm.isfinite() else torch.tensor(-1.0)


@dataclass
class Lockstep:
    """A reference and an engine that started from equal models.

    Attributes:
        record, paged_record: what is to be compared; :meth:`note` writes to both.
    """

    reference: PlainTorch
    model: nn.Module
    engine: Any
    optimizer: torch.optim.Optimizer
    loader: Any
    scheduler: Any
    case: Case
    dtype: torch.dtype
    record: Record = field(default_factory=Record)
    paged_record: Record = field(default_factory=Record)

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        case: Case = PLAIN,
        changes: Mapping[str, Any] | None = None,
        reference_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer] | None = None,
        optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer] | None = None,
        arguments: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
        loop: str = "engine",
        initialize: Callable[..., Any] = infinity.initialize,
    ) -> Lockstep:
        """
        Args:
            changes: to :func:`everything_on_nvme`.
            reference_optimizer: over the main weights by FQN; by default what the default config's AdamW means.
            optimizer: passed to ``infinity.initialize`` in place of the config's, and the reference's: from trainable
                parameters by FQN.
            arguments: more arguments of ``infinity.initialize``, from the model.
            loop: ``plain`` when the test divides no losses and calls no ``engine.backward``.
            initialize: ``infinity.deepspeed.initialize`` when the test uses DeepSpeed's names.
        """
        config = everything_on_nvme(directory, ({"optimizer": None} if optimizer else {}) | dict(changes or {}))
        is_half = config.get("fp16", {}).get("enabled")
        is_narrow = config.get("bf16", {}).get("enabled")
        dtype = torch.float16 if is_half else torch.bfloat16 if is_narrow else torch.float32
        model = case.make("none")
        own = config["infinity"]
        reference = PlainTorch(
            case.make("none"),
            reference_optimizer or optimizer or (lambda named: torch_optimizer("config", named)),
            compute_dtype=dtype,
            num_micro_batches=config["gradient_accumulation_steps"] if loop == "engine" else 1,
            max_norm=config["gradient_clipping"],
            rounds_half_up=dtype == torch.bfloat16 and own.get("main_weights", "auto") != "fp32",
            rounds_gradients=own.get("gradient_dtype") == "bf16",
            state_dtype=own.get("state_dtype", "fp32"),
            scaler=_scaler(config["fp16"])
            if is_half or config.get("torch_autocast", {}).get("dtype") == "fp16"
            else None,
        )
        more = arguments(model)
        if optimizer is not None:
            named = {fqn: parameter for fqn, parameter in model.named_parameters() if parameter.requires_grad}
            more["optimizer"] = optimizer(named)
        return cls(reference, model, *initialize(model=model, config=config, **more), case, dtype)

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def batch(self, step: int, micro_batch: int = 0) -> dict[str, Any]:
        return make_batch(step, micro_batch, case=self.case, dtype=self.dtype)

    def note(self, what: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
        """Two values that have to be equal in the end."""
        self.record.note(what, expected)
        self.paged_record.note(what, actual)

    def engine_step(self, step: int) -> None:
        """One whole step with the engine's calls."""
        for micro_batch in range(self.reference.num_micro_batches):
            batch = self.batch(step, micro_batch)
            random_state = torch.get_rng_state()
            expected = self.reference.forward(batch)
            self.reference.backward(expected)
            torch.set_rng_state(random_state)
            loss = loss_of(self.engine(**batch))
            self.engine.backward(loss)
            self.engine.step()
            self.note(f"loss {step}.{micro_batch}", expected, loss)
        self._end_step(step)

    def engine_steps(self, steps: Iterable[int]) -> None:
        """Whole steps with the engine's calls, and everything has to be equal behind them."""
        for step in steps:
            self.engine_step(step)
        self.require_equal()

    def batch_step(self, step: int) -> None:
        """One whole step with ``engine.train_batch``."""
        batches = [self.batch(step, micro_batch) for micro_batch in range(self.reference.num_micro_batches)]
        losses = []
        for batch in batches:
            losses.append(self.reference.forward(batch))
            self.reference.backward(losses[-1])
        loss = self.engine.train_batch(iter(batches))
        self.note(f"loss {step}", torch.stack([loss.detach().float() for loss in losses]).mean(), loss)
        self._end_step(step)

    def _end_step(self, step: int) -> None:
        norm = self.reference.step()
        found = torch.as_tensor(self.engine.report.grad_norm, dtype=torch.float32)
        self.note(f"norm {step}", _comparable(norm), _comparable(found))

    def plain_backward(self, step: int, micro_batch: int = 0) -> None:
        """Forward and ``loss.backward`` on the hooked module."""
        batch = self.batch(step, micro_batch)
        random_state = torch.get_rng_state()
        expected = self.reference.forward(batch)
        self.reference.backward(expected)
        torch.set_rng_state(random_state)
        loss = loss_of(self.model(**batch))
        loss.backward()
        self.note(f"loss {step}.{micro_batch}", expected, loss)

    def plain_step(self, step: int) -> None:
        """Forward, backward, ``optimizer.step`` and ``zero_grad``."""
        self.plain_backward(step)
        self.plain_update()

    def plain_update(self) -> None:
        """``optimizer.step`` and ``zero_grad``."""
        self.reference.step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def each_optimizer(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """The reference's optimizer and the engine's."""
        return self.reference.optimizer, self.optimizer

    def require_equal(self) -> None:
        """Compare all that was noted, and the weights and states as they are now."""
        self.record.final = self.reference.snapshot()
        self.paged_record.final = paged_snapshot(self.engine, self.optimizer)
        require_equal(self.record, self.paged_record)
