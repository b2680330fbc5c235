"""The whole DeepSpeed config, and our own block `infinity`: models of the JSON.

Every key that DeepSpeed 0.19 knows is here, and those of earlier versions that are still found in files.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from infinity.config.schema.block import Block, Count, Flag, NoEffect, NotNull, Number, Refused, Untyped
from infinity.config.schema.directories import parse_directories
from infinity.config.schema.inert import with_inert_keys
from infinity.config.schema.offload_blocks import EXACT_EXCHANGE, AioBlock, ZeroBlock
from infinity.config.schema.precision_blocks import AutocastBlock, Bf16Block, DataTypesBlock, Fp16Block, float_type
from infinity.config.schema.quantities import (
    parse_bytes,
    parse_choice,
    parse_count,
    parse_frozen_dtype,
    parse_names,
    parse_number,
    parse_path,
)
from swapper.config import LEAST_DEADLINE_SECONDS, BackendName
from swapper.volumes.directory import Directory

# A silent 0 would train differently than the same file under DeepSpeed.
DEFAULT_GRADIENT_CLIPPING = 1.0
"""What DeepSpeed does since 0.19 when the key is absent (it was 0 before)."""

_TORCH_CHECKPOINT = (
    "no effect but on checkpointing.checkpoint after checkpointing.configure(None, config); to checkpoint the model's "
    "blocks, set infinity.activation_checkpointing, or call model.gradient_checkpointing_enable()"
)
_CHECKPOINTS = "no effect: it concerns checkpoints in DeepSpeed's format"


def _steps_per_print(value: object) -> object:
    # accelerate writes Infinity to silence the line.
    if isinstance(value, float) and math.isinf(value):
        return None
    # 0 means "no line", too.
    return parse_count(value) or None


def _directory(value: object) -> str:
    # "" is the default of DeepSpeed's monitors: the directory of the script.
    return "" if value in ("", None) else parse_path(value)


def _strictness(value: object) -> object:
    # `infinity.strict` may say "warn": the same as false.
    return False if value == "warn" else value


@with_inert_keys
class OptimizerBlock(Block):
    """`optimizer`."""

    type: str
    """Name of the optimizer. With an optimizer passed to `initialize` the block is not needed."""
    params: Untyped = None
    """Its arguments, by the names that torch gives them; a wrong name is an error. As in DeepSpeed, `"Adam"` is AdamW unless
    `"adam_w_mode": false`, and its `weight_decay` is 0 unless given (`"torch_adam": true`: torch's default)."""


class SchedulerBlock(Block):
    """`scheduler`."""

    type: str
    """Name of the learning rate schedule."""
    params: Untyped = None
    """Its arguments; a wrong name is an error. Where `warmup_max_lr` is `"auto"`, it is the optimizer's rate."""


# The texts under the fields of the models are printed into docs/reference/keys.md and the JSON schema.
class InfinityBlock(Block):
    """`infinity`: what DeepSpeed has no key for."""

    host_memory_budget: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """Hard ceiling of the engine's host memory: staging buffers, states kept in RAM, main gradients and, on the CPU, the
    weights in use. Not in it: Python and its libraries (about 0.4 GB with transformers), activations, and what autograd
    holds in plain torch as well.
    `"auto"`: what the machine or the process's memory cgroup has free, less a reserve of 25 % (10 % where a GPU holds
    the activations) and of at least 2 GB, but not more than half. One that is too small is an error that names the
    minimum."""
    device_memory_budget: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """On a GPU, a ceiling on the device memory of resident weights. `"auto"`: 65 % of the free memory after gradients
    and states; the rest is for activations."""
    staging_buffer_bytes: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """Size of a buffer of the staging pool, a multiple of 4096: the largest single transfer of optimizer state. `"auto"`:
    from the model and the budget."""
    prefetch: Flag = True
    """Read ahead in the order of the last step; `false` reads on demand."""
    keep_in_memory: Flag = True
    """Keep weights and states off the drives as far as the budgets leave room; `false` leaves that room unused."""
    progress_bars: Flag = True
    """Show progress and the time left of work that takes more than 2 seconds (building the engine, saving, loading,
    export), if stderr is a terminal."""
    durable: Flag = False
    """Commit every step. After a kill, a power cut or a full disk, the same script resumes from the last commit, see [Durable
    runs](../guides/checkpoints.md#durable-runs)."""
    durable_path: Annotated[tuple[Directory, ...] | None, BeforeValidator(parse_directories)] = None
    """Directory of the durable run, or a list with one for each drive. `"auto"`: `durable` below each `nvme_path`. A
    missing directory is made if its parent exists."""
    keep_last: Annotated[int, Field(ge=1)] = 1
    """How many commits `engine.rollback` can choose from. Each takes as much space as a step writes."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Keep `keep_last` more commits, of steps that are multiples of this, so that `engine.rollback` reaches further back.
    0 keeps none."""
    drive_tbw: Annotated[Number | None, Field(gt=0)] = None
    """Terabytes that all drives together are rated to write (TBW). The plan then says how many steps they last."""
    units: Annotated[tuple[str, ...], BeforeValidator(parse_names)] = ()
    """Class names or name patterns of the modules that are paged as one; empty finds repeated blocks."""
    tile_above: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """Linear layers and embeddings whose weight is larger, in the compute dtype, are used in tiles of this size, of which
    each is paged by itself: so a layer that is larger than the budget can be trained. Off by default. What sums in which
    order is said in [tiles](../guides/larger-than-ram.md#tiles)."""
    experts: Literal["auto", "by_expert", "touched_only", "whole"] = "auto"
    """How the experts of a layer are paged whose weights are one tensor, as in transformers 5: `"by_expert"` reads only those
    that tokens go to, and updates all of them as torch does; `"touched_only"` updates only those that tokens went to;
    `"whole"` pages them with their layer. `"auto"` is `"by_expert"` for frozen experts with `offload_param` on NVMe, and
    `"whole"` for all others. In stage 3 on several processes, all of them gather the experts that any of them needs. See
    [mixtures of experts](../guides/mixtures-of-experts.md)."""
    strict: Annotated[Flag, BeforeValidator(_strictness)] = True
    """`false` turns unknown keys into a warning."""
    update: Literal["auto", "in_backward", "deferred", "step"] = "auto"
    """When the optimizer runs: `"in_backward"` updates a unit as soon as its gradients are complete, `"deferred"` just
    before the next forward needs it, `"step"` all of it in `engine.step()`; `"auto"` takes `"in_backward"`, or
    `"deferred"` where something needs all gradients first (clipping, fp16), or `"step"` on a CPU where everything stays in
    memory: then nothing waits for a drive, and updates beside the model would only take its cores. Several processes
    that divide states update in backward what all have gradients for, and all else in the step. The numbers are the
    same."""
    update_workers: Annotated[Count | None, Field(ge=1)] = None
    """Threads that run updates, each with one core and a chunk of its own; any number gives the same bits. `"auto"`: the
    cores that computing leaves over, at least one and at most 8: on a CPU those beyond `torch.get_num_threads()`, or as many
    as that where updates run in the step; beside a GPU all but two, and no more than drives with a known speed can keep busy
    (one for each 5 GB/s), or 4 where their speed is not known. Optimizers of your own, and updates on a GPU, have one."""
    main_weights: Literal["auto", "remainder", "fp32"] = "auto"
    """How fp32 main weights are kept beside bf16 weights: `"remainder"` stores the 16 bits that a bf16 weight lacks,
    `"fp32"` all 32. `"auto"`: `"remainder"` with bf16."""
    gradient_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of gradients that wait for their update. `"auto"` loses nothing; `"bf16"` rounds sums of several micro-batches,
    and is an error where several processes train together."""
    state_dtype: Literal["fp32", "bf16", "int8", "int8_dynamic"] = "fp32"
    """Of the optimizer's states where they are stored: `"bf16"` (rounded stochastically) and `"int8"` (a byte each, and a
    scale for every 256) are smaller and change the numbers a little; `"int8_dynamic"` has the levels and the rounding of
    bitsandbytes' 8-bit optimizers. See [Smaller states](#smaller-states)."""
    frozen_dtype: Annotated[str | tuple[tuple[str, str], ...] | None, BeforeValidator(parse_frozen_dtype)] = None
    """How frozen weights are stored: `"nf4"`, `"int8"` or `"fp8_e4m3"` packs those of linear layers on drives and in RAM, and
    unpacks them when they are fetched; `"bf16"` stores them so under fp32. An object chooses by patterns of names, the first
    that matches: `{"lm_head": "bf16", "*": "nf4"}`. The model computes with the rounded weights, see [Packed
    weights](packed-weights.md)."""
    schedule: Literal["auto", "vertical", "ordinary"] = "auto"
    """Order of `engine.train_batch`, and of `InfinityTrainer`: `"vertical"` takes all micro-batches through a unit before
    the next, `"ordinary"` one micro-batch after the other; `"auto"` takes the one that moves fewer bytes, beside a GPU the
    vertical one, which sums gradients there, and in the Trainer keeps all bits."""
    activation_checkpointing: Flag = False
    """Compute each block (each module that is paged as one) once more in backward instead of keeping its activations, as
    `torch.utils.checkpoint` around the blocks does, non-reentrant. Only in training; blocks that the model checkpoints by
    itself are left to it, and the vertical schedule does so anyway. The block `activation_checkpointing` alone switches
    nothing on, as in DeepSpeed."""
    activations: Literal["memory", "cpu", "nvme"] = "memory"
    """Where that waits for backward which autograd saves in the model's forward: `"memory"` where it was made, beside the
    budget; `"cpu"` in host memory, within the budget, and more than its share is an error that says how much; `"nvme"`
    keeps it in memory within the budget, writes what exceeds that to the drives and reads it back in time. Together with
    `activation_checkpointing` that is the inputs of blocks. Not in it: what is smaller than 64 KiB, and losses that are
    computed outside of the model."""
    # 120 seconds trade late news of a dead drive against false alarms of a busy one. The number is not measured.
    io_deadline_seconds: Annotated[Number, Field(ge=LEAST_DEADLINE_SECONDS)] = 120.0
    """A read or write that takes longer than this raises an error."""
    direct_io: Flag = True
    """Bypass the page cache (O_DIRECT) if the file system supports it."""
    io_backend: Annotated[BackendName, BeforeValidator(parse_choice)] = "auto"
    """How bytes are moved; `"auto"` chooses the fastest backend that works here, see [the engine for
    I/O](swapper.md#backends). If neither this key nor `aio` is set, engines use the
    settings that `infinity profile` found best on these drives."""
    verify_checksums: Flag = False
    """Keep a crc32c of written bytes, and compare it when they are read. A difference raises an error with parameter,
    file and offset."""
    timeline: Annotated[str | None, BeforeValidator(parse_path)] = None
    """A file for a trace of computing, waiting and transfers, which ui.perfetto.dev opens. It is written when the engine
    is closed."""
    run_log: Annotated[str | None, BeforeValidator(parse_path)] = None
    """A directory for the [log of the run](run-log.md): config, plan, every step and every event, as lines of JSON.
    A resumed run appends to its log."""


@with_inert_keys
class ActivationCheckpointingBlock(Block):
    """`activation_checkpointing`: as in DeepSpeed, how `checkpointing.checkpoint` works once a script has called
    `checkpointing.configure(None, config)`. It switches nothing on; `infinity.activation_checkpointing` does."""

    cpu_checkpointing: Annotated[Flag, NoEffect(_TORCH_CHECKPOINT, silent=(False,))] = False
    """Inputs of checkpointed functions are kept in pinned host memory until backward. On a CPU they are there anyway."""


@with_inert_keys
class TensorParallelSizeBlock(Block):
    """`tensor_parallel.tp`."""


@with_inert_keys
class TensorParallelBlock(Block):
    """`tensor_parallel`."""

    tp: TensorParallelSizeBlock = TensorParallelSizeBlock()


@with_inert_keys
class PipelineBlock(Block):
    """`pipeline`."""


@with_inert_keys
class CheckpointBlock(Block):
    """`checkpoint`: how DeepSpeed writes its own checkpoints."""

    tag_validation: Annotated[
        Literal["ignore", "warn", "fail"],
        BeforeValidator(parse_choice),
        NoEffect(_CHECKPOINTS, silent=("warn", "ignore")),
    ] = "warn"


class TensorBoardBlock(Block):
    """`tensorboard`: DeepSpeed's curves, by samples, for TensorBoard. Needs the package `tensorboard`."""

    enabled: Flag = False
    """Write `Train/Samples/train_loss`, `lr`, with fp16 `loss_scale`, with `wall_clock_breakdown` `elapsed_time_ms_forward`,
    `_backward` and `_step` in each `engine.step()`, and what `engine.monitor.write_events` is given."""
    output_path: Annotated[str, BeforeValidator(_directory)] = ""
    """A directory; empty for the one in which the script was started."""
    job_name: Annotated[str, BeforeValidator(parse_path)] = "DeepSpeedJobName"
    """Of the directory in it for this run."""


class CsvMonitorBlock(Block):
    """`csv_monitor`: as `tensorboard`, each curve in a file of its own with samples and values."""

    enabled: Flag = False
    """Append to `Train_Samples_train_loss.csv` and so on."""
    output_path: Annotated[str, BeforeValidator(_directory)] = ""
    """A directory; empty for the one in which the script was started."""
    job_name: Annotated[str, BeforeValidator(parse_path)] = "DeepSpeedJobName"
    """Of the directory in it for this run."""


class WandbBlock(Block):
    """`wandb`: as `tensorboard`, for Weights & Biases, into the script's own run if it has begun one. Needs the package
    `wandb`; with the environment variable `WANDB_MODE=offline` nothing is sent."""

    enabled: Flag = False
    """Write there."""
    group: str | None = None
    """Of runs."""
    team: str | None = None
    """The entity to which the project belongs."""
    project: str = "deepspeed"
    """Name of the project."""


@with_inert_keys
class RootBlock(Block):
    """The top level."""

    train_batch_size: Annotated[Count | None, Field(gt=0)] = None
    """Samples per optimizer step: the product of the next two. One of the three may be left out, or two."""
    train_micro_batch_size_per_gpu: Annotated[Count | None, Field(gt=0)] = None
    """Samples per backward. `"auto"`, also for `train_batch_size`: as the data loader gives them."""
    gradient_accumulation_steps: Annotated[Count | None, Field(gt=0)] = None
    """Backwards per optimizer step. It follows from the other two, and is 1 where they leave it open."""
    optimizer: OptimizerBlock | None = None
    scheduler: SchedulerBlock | None = None
    gradient_clipping: Annotated[
        float,
        BeforeValidator(parse_number),
        Field(ge=0),
        NotNull(
            "null does not say whether gradients are clipped", "Write 0 to switch clipping off, or the largest norm"
        ),
    ] = DEFAULT_GRADIENT_CLIPPING
    """Largest global 2-norm of the gradients. 1.0 when the key is absent, as in DeepSpeed since 0.19; 0 switches
    clipping off."""
    bf16: Bf16Block = Bf16Block()
    fp16: Fp16Block = Fp16Block()
    torch_autocast: AutocastBlock = AutocastBlock()
    data_types: DataTypesBlock = DataTypesBlock()
    managed_gradient_accumulation: Flag = True
    """`false` makes every `engine.step()` an update; nothing is updated in backward then."""
    zero_optimization: ZeroBlock = ZeroBlock()
    aio: AioBlock = AioBlock()
    steps_per_print: Annotated[int | None, BeforeValidator(_steps_per_print)] = None
    """Log a line (level INFO) every so many steps."""
    wall_clock_breakdown: Flag = False
    """Log a line (level INFO) for each step that says where its time went."""
    dataloader_drop_last: Flag = False
    """Of the loader that `initialize` makes of `training_data`: leave out a last batch that is not full."""
    tensorboard: TensorBoardBlock = TensorBoardBlock()
    csv_monitor: CsvMonitorBlock = CsvMonitorBlock()
    wandb: WandbBlock = WandbBlock()
    infinity: InfinityBlock = InfinityBlock()

    # "expert_parallel" and others that need no code of their own are in inert.toml.
    # ---- what would change the numbers

    tensor_parallel: TensorParallelBlock = TensorParallelBlock()
    pipeline: PipelineBlock = PipelineBlock()
    data_efficiency: Annotated[
        Untyped,
        Refused("the data comes as the loader gives it", "Order the data in the data set", is_by_parts=True),
    ] = None

    # ---- speed, memory, logging

    activation_checkpointing: ActivationCheckpointingBlock = ActivationCheckpointingBlock()
    checkpoint: CheckpointBlock = CheckpointBlock()
    gradient_allreduce_op: Annotated[
        Literal["mean", "sum"], BeforeValidator(parse_choice), NoEffect(EXACT_EXCHANGE, silent=("mean",))
    ] = "mean"
    communication_data_type: Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(float_type)] = "fp32"
    """Data type in which gradients are exchanged between processes: "fp16" and "bf16" halve those bytes, and round each
    process's part of the mean, and the mean. The parts are added in fp32."""
