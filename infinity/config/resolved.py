"""What the rest of the package sees of a config: small frozen sections with every value decided."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

OffloadDevice = Literal["none", "cpu", "nvme"]
UpdateMode = Literal["auto", "in_backward", "step"]
ScheduleMode = Literal["auto", "vertical", "ordinary"]


class Decision(NamedTuple):
    """One value and who decided it, for printing."""

    key: str
    value: object
    decided_by: str


@dataclass(frozen=True)
class OptimizerSection:
    """`optimizer`: `type` as written; `params` without those left to "auto". The holder must not change `params`."""

    type: str
    params: dict[str, Any]


@dataclass(frozen=True)
class SchedulerSection:
    """`scheduler`: `type` as written; `params` without those left to "auto". The holder must not change `params`."""

    type: str
    params: dict[str, Any]


@dataclass(frozen=True)
class OffloadSection:
    """Where parameters, or optimizer states, rest. `nvme_paths` are absolute, and empty unless `device` is "nvme"."""

    device: OffloadDevice
    nvme_paths: tuple[Path, ...]


@dataclass(frozen=True)
class IOSection:
    """How files are read and written.

    Attributes:
        request_bytes: largest single transfer.
        num_threads: threads that wait in reads and writes.
        max_inflight: requests handed out at once.
        deadline_seconds: a request that takes longer is an error instead of a hang.
        direct: whether to go past the page cache.
    """

    request_bytes: int
    num_threads: int
    max_inflight: int
    deadline_seconds: float
    direct: bool


@dataclass(frozen=True)
class InfinitySection:
    """`infinity`. Budgets and sizes are None when the engine is to choose them.

    Attributes:
        host_memory_budget: bytes of host memory for parameters, states and buffers.
        device_memory_budget: bytes of device memory for resident units.
        page_bytes: size of a page of the staging arena.
        prefetch: whether units are read ahead of need.
        units: class names or FQN patterns of what is paged together; empty when the engine finds it.
        strict: whether unknown config keys are errors.
        update: when the optimizer runs.
        schedule: in which order `Engine.train_batch` goes through units and micro-batches.
    """

    host_memory_budget: int | None
    device_memory_budget: int | None
    page_bytes: int | None
    prefetch: bool
    units: tuple[str, ...]
    strict: bool
    update: UpdateMode
    schedule: ScheduleMode


@dataclass(frozen=True)
class InfinityConfig:
    """A whole config, validated and decided. Made by `load_config`.

    Attributes:
        train_batch_size: samples per step over all processes; None with `train_micro_batch_size_per_gpu`.
        train_micro_batch_size_per_gpu: samples per backward; None when it is the data loader's.
        gradient_accumulation_steps: backwards per step.
        gradient_clipping: largest global norm of the gradients; 0 switches clipping off.
        compute_dtype: dtype of the model weights.
        optimizer: None when the config names none.
        scheduler: None when the config names none.
        offload_param: where parameters rest.
        offload_optimizer: where main weights and optimizer state rest.
        io: how files are read and written.
        infinity: what DeepSpeed has no key for.
        steps_per_print: a progress line every so many steps; None for none.
        wall_clock_breakdown: whether to report where the time of each step went.
        dataloader_drop_last: whether a loader made from `training_data` drops the last, smaller batch.
        notices: one sentence per reason for which accepted keys have no effect.
        decisions: the values above that somebody may wonder about, and who decided them.
    """

    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int
    gradient_clipping: float
    compute_dtype: torch.dtype
    optimizer: OptimizerSection | None
    scheduler: SchedulerSection | None
    offload_param: OffloadSection
    offload_optimizer: OffloadSection
    io: IOSection
    infinity: InfinitySection
    steps_per_print: int | None
    wall_clock_breakdown: bool
    dataloader_drop_last: bool
    notices: tuple[str, ...]
    decisions: tuple[Decision, ...]

    def describe(self) -> str:
        """The decisions as a table in plain text."""
        width = max((len(decision.key) for decision in self.decisions), default=0)
        return "\n".join(f"{key:<{width}}  {value}  ({decided_by})" for key, value, decided_by in self.decisions)
