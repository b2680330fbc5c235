"""The config as other packages see it: small frozen sections with every value decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from infinity.config.schema.blocks import WandbBlock
from swapper.config import SwapperConfig
from swapper.volumes.directory import Directory

OffloadDevice = Literal["none", "cpu", "nvme"]
UpdateMode = Literal["in_backward", "deferred", "step"]
MainWeights = Literal["remainder", "fp32"]
GradientDtype = Literal["fp32", "bf16"]


class Decision(NamedTuple):
    """One value and who decided it, for printing."""

    key: str
    value: object
    decided_by: str


@dataclass(frozen=True)
class OptimizerSection:
    """`optimizer`: `type` as written; `params` without those left to "auto". Do not change `params`: it is shared."""

    type: str
    params: dict[str, Any]
    autos: frozenset[str] = frozenset()
    """Names of those left to "auto"."""


class SchedulerSection(OptimizerSection):
    """`scheduler`, in the same form."""


LARGEST_LOSS_SCALE = 2.0**96
"""A scaled gradient of 1 is then finite in fp32, whose largest number is about 2^128."""


@dataclass(frozen=True)
class LossScaling:
    """`fp16`: the factor that lifts gradients out of what fp16 rounds to zero.

    Attributes:
        initial: the factor of the first step.
        is_dynamic: whether it is halved and doubled; otherwise it stays as it is.
        window: it is doubled after so many steps in a row whose gradients were finite.
        hysteresis: it is halved from the so-many-th step on whose gradients were not.
        refills_hysteresis: whether these are counted anew after every finite step, and not only after doubling.
        minimum: it is never smaller.
    """

    initial: float
    is_dynamic: bool
    window: int
    hysteresis: int
    refills_hysteresis: bool
    minimum: float


@dataclass(frozen=True)
class OffloadSection:
    """Where parameters, or optimizer states, are stored. Paths are absolute, and empty unless `device` is "nvme"."""

    device: OffloadDevice
    nvme_directories: tuple[Directory, ...]

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The paths of the directories."""
        return tuple(directory.path for directory in self.nvme_directories)


@dataclass(frozen=True)
class IOSection(SwapperConfig):
    """How files are read and written: the settings of each swapper."""

    is_from_config: bool = False
    """Whether the config names a request size, threads, queue depth or backend. Measured settings do not replace those."""


@dataclass(frozen=True)
class DurableSection:
    """`infinity.durable`.

    Attributes:
        directories: of the run, one for each drive; commits are written to the first. Absolute.
        keep_last: how many commits are kept.
        keep_every: so many are kept besides of steps that are multiples of this; 0 for none.
    """

    directories: tuple[Directory, ...]
    keep_last: int
    keep_every: int = 0

    @property
    def most_kept(self) -> int:
        """The largest number of commits that are kept at a time."""
        # With `keep_every`, `keep_last` commits of its multiples are kept besides the last `keep_last` ones.
        return self.keep_last * (2 if self.keep_every else 1)

    def of_rank(self, index: int, num: int) -> DurableSection:
        """Return the section for rank ``index`` of ``num``, with folders of its own."""
        if num == 1:
            return self
        directories = tuple(replace(each, path=each.path / f"rank{index}") for each in self.directories)
        # A crash may hit some ranks before their commit of a step and some after it. Those after it have to go back to
        # the commit before, see [Note: commits of ranks] in engine/durable_run.py.
        return replace(self, directories=directories, keep_last=max(self.keep_last, 2))


@dataclass(frozen=True)
class InfinitySection:
    """`infinity`. Budgets and sizes are None if the engine chooses them.

    Attributes:
        host_memory_budget: bytes of host memory for parameters, states and buffers.
        device_memory_budget: bytes of device memory for resident units.
        staging_buffer_bytes: size of a buffer of the staging pool.
        prefetch: whether units are read ahead of need.
        keep_in_memory: whether what the budgets leave keeps weights and states off the drives.
        progress_bars: whether what takes seconds shows on a terminal how far it is.
        drive_tbw: terabytes that all NVMe drives together are rated to take; None if nobody said.
        frozen_dtype: how frozen weights are stored: a format for all, or pairs of a pattern and a format; None: as they are.
        units: class names or FQN patterns of what is paged together; empty when the engine finds it.
        tile_above: bytes of the largest weight of a linear layer or embedding that is used whole; None: all are.
        experts: how experts are paged that are in one tensor.
        strict: whether unknown config keys are errors.
        update: when the optimizer runs.
        update_is_open: whether the plan may choose "step" instead of ``update``, where all stays in a CPU's memory.
        main_weights: whether an fp32 main weight is stored beside a bf16 model weight, or only what that lacks.
        gradient_dtype: of gradients that wait for their update.
        rounds_gradients: whether sums of gradients may be rounded to `gradient_dtype`. Without, they are kept as fp32
            as soon as there is more than one.
        update_workers: threads that run updates; None when the engine is to choose.
        state_dtype: how the optimizer's element-wise states are stored; they are fp32 while they are worked on.
        timeline: absolute path of the trace of who was busy when, written when the engine is closed; None for none.
        run_log: absolute path of the directory of the run's log; None for none.
        schedule: in which order `Engine.train_batch` goes through units and micro-batches.
        activation_checkpointing: whether blocks are computed once more in backward.
        activations: where what autograd saves waits for backward.
        durable: where each step is committed; None if none is.
    """

    host_memory_budget: int | None
    device_memory_budget: int | None
    staging_buffer_bytes: int | None
    prefetch: bool
    keep_in_memory: bool
    drive_tbw: float | None
    units: tuple[str, ...]
    strict: bool
    update: UpdateMode
    main_weights: MainWeights
    gradient_dtype: GradientDtype
    rounds_gradients: bool
    schedule: Literal["auto", "vertical", "ordinary"]
    state_dtype: Literal["fp32", "bf16", "int8", "int8_dynamic"] = "fp32"
    timeline: Path | None = None
    run_log: Path | None = None
    activation_checkpointing: bool = False
    activations: Literal["memory", "cpu", "nvme"] = "memory"
    durable: DurableSection | None = None
    tile_above: int | None = None
    experts: Literal["auto", "by_expert", "touched_only", "whole"] = "auto"
    update_workers: int | None = None
    update_is_open: bool = False
    progress_bars: bool = True
    frozen_dtype: str | tuple[tuple[str, str], ...] | None = None


@dataclass(frozen=True)
class InfinityConfig(Mapping[str, Any]):
    """A whole config, validated and decided. Made by `load_config`.

    As a mapping it holds the JSON as it was written (``config["zero_optimization"]["stage"]``), as DeepSpeed's does.

    Attributes:
        train_batch_size: samples per step over all processes; None with `train_micro_batch_size_per_gpu`.
        train_micro_batch_size_per_gpu: samples per backward; None when it is the data loader's.
        gradient_accumulation_steps: backwards per step.
        gradient_clipping: largest global norm of the gradients; 0 switches clipping off.
        compute_dtype: dtype of the model weights.
        buffer_dtype: of all floating-point buffers; None: each keeps its own, as far as torch can compute with that.
        loss_scaling: with fp16, how losses are scaled; else None.
        checks_overflow: whether a step whose gradients are not finite is skipped.
        optimizer: None when the config names none.
        scheduler: None when the config names none.
        offload_param: where parameters rest.
        offload_optimizer: where main weights and optimizer state rest.
        io: how files are read and written.
        infinity: what DeepSpeed has no key for.
        steps_per_print: a progress line every so many steps; None for none.
        monitors: where curves are written, for each block that is enabled: an absolute directory of this run, or the
            block `wandb`.
        wall_clock_breakdown: whether to report where the time of each step went.
        dataloader_drop_last: whether a loader made from `training_data` drops the last, smaller batch.
        zero_stage: as written, else 3 with an offload and 0 without. It says what several processes divide.
        managed_gradient_accumulation: whether the engine counts micro-batches; else every `Engine.step` is an update.
        autocast_dtype: of ``torch.autocast`` around the model's forward; None for none.
        communication_dtype: data type in which gradients are exchanged between processes.
        casts_inputs: whether floating-point tensors among the model's arguments are cast to the compute dtype.
        world_size: number of processes that train together.
        source: the JSON as it was given, with overrides. The config is a mapping of it.
        notices: one sentence per reason for which accepted keys have no effect.
        decisions: the values above that somebody may wonder about, and who decided them.
    """

    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int
    gradient_clipping: float
    compute_dtype: torch.dtype
    loss_scaling: LossScaling | None
    checks_overflow: bool
    optimizer: OptimizerSection | None
    scheduler: SchedulerSection | None
    offload_param: OffloadSection
    offload_optimizer: OffloadSection
    io: IOSection
    infinity: InfinitySection
    steps_per_print: int | None
    wall_clock_breakdown: bool
    monitors: Mapping[str, Path | WandbBlock]
    dataloader_drop_last: bool
    zero_stage: int
    managed_gradient_accumulation: bool
    autocast_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    communication_dtype: torch.dtype
    casts_inputs: bool
    world_size: int
    source: Mapping[str, Any] = field(repr=False, compare=False)
    notices: tuple[str, ...]
    decisions: tuple[Decision, ...]

    def __getitem__(self, key: str) -> Any:
        return self.source[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """All directories for scratch files, each once."""
        return tuple(dict.fromkeys((*self.offload_param.nvme_paths, *self.offload_optimizer.nvme_paths)))

    @property
    def most_micro_batches(self) -> int:
        """The most micro-batches that a step may sum; the plan reserves gradient memory for these."""
        # 2 means "a sum": without managed accumulation only the script knows how many there are.
        return max(self.gradient_accumulation_steps, 1 if self.managed_gradient_accumulation else 2)

    def describe(self) -> str:
        """The decisions as a table in plain text."""
        width = max((len(decision.key) for decision in self.decisions), default=0)
        return "\n".join(f"{key:<{width}}  {value}  ({decided_by})" for key, value, decided_by in self.decisions)
