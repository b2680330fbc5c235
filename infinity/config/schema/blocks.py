"""The whole DeepSpeed config, and our own block `infinity`: models of the JSON.

Every key that DeepSpeed 0.19 knows is here, and those of earlier versions that are still found in files.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from infinity.config.schema.block import (
    Block,
    Count,
    Flag,
    NoEffect,
    NotNull,
    Number,
    Positive,
    Refused,
    Untyped,
    with_deepspeed_only_keys,
)
from infinity.config.schema.directories import parse_directories
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
    "no effect except on checkpointing.checkpoint after checkpointing.configure(None, config); to checkpoint the model's "
    "blocks, set infinity.activation_checkpointing, or call model.gradient_checkpointing_enable()"
)
_CHECKPOINTS = "no effect: it concerns checkpoints in DeepSpeed's format"

_EXACT_EXCHANGE = (
    "no effect: one process exchanges nothing. Several processes average gradients, and only communication_data_type "
    "rounds them; with several processes, another value is an error"
)
_OTHER_NAMES = {"fp32": ("float32", "float"), "fp16": ("float16", "half"), "bf16": ("bfloat16",)}
_FLOAT_TYPES = {name: kind for kind, others in _OTHER_NAMES.items() for name in (kind, *others)}


def _float_type(value: object) -> str:
    """Return "fp32", "fp16" or "bf16" for any of their names. Raises ValueError for other values."""
    # Accepts torch's own spelling as well, as in "torch.bfloat16".
    name = _FLOAT_TYPES.get(str(value).lower().removeprefix("torch."))
    if name is None:
        raise ValueError(f"must be one of {', '.join(_FLOAT_TYPES)}")
    return name


def _half_type(value: object) -> str:
    name = _float_type(value)
    if name == "fp32":
        raise ValueError("must be bfloat16 or float16")
    return name


@with_deepspeed_only_keys
class Fp16Block(Block):
    """`fp16`, with its loss scaling."""

    enabled: Flag = False
    """Train in fp16, with fp32 main weights. A step whose gradients are not finite is skipped."""
    loss_scale: Number = 0
    """A fixed loss scale. 0 means a dynamic one."""
    initial_scale_power: Number = 16
    """The dynamic loss scale starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """The scale is doubled after this many steps without overflow."""
    hysteresis: Count = 2
    """The scale is halved at this many overflows, and at each one after, until it grows again. In stage 0 it is halved at
    each overflow, as in DeepSpeed."""
    consecutive_hysteresis: Flag = False
    """A step without overflow resets the count of `hysteresis`."""
    min_loss_scale: Number = 1
    """Smallest loss scale. Gradients that overflow with it are an error, but not in stage 0."""
    auto_cast: Flag = False
    """Floating-point inputs of the model are cast to fp16."""


@with_deepspeed_only_keys
class Bf16Block(Block):
    """`bf16`. Also takes the loss scaling keys of `fp16`, which many files repeat here."""

    enabled: Flag = False
    """Train in bf16, with exact fp32 main weights and fp32 gradient accumulation."""
    check_grad_overflow: Flag | None = None
    """Skip a step whose gradients are not finite. `"auto"`: enabled with `gradient_clipping` in ZeRO stages 1 and 2, as
    in DeepSpeed. DeepSpeed's stage 3 never checks, and without clipping no update waits for all gradients."""
    auto_cast: Flag = False
    """Floating-point inputs of the model are cast to bf16."""


@with_deepspeed_only_keys
class AutocastBlock(Block):
    """`torch_autocast`."""

    enabled: Flag = False
    """Run the model under `torch.autocast`, with fp32 weights or weights of its own dtype. As in plain torch, the cast
    copies of all fp32 weights stay in memory until backward has used them, outside of the budget."""
    dtype: Annotated[Literal["fp16", "bf16"], BeforeValidator(_half_type)] = "bf16"
    """Dtype to which autocast casts. With fp16, the loss scale follows the keys of the block `fp16`, which stays
    disabled."""


class DataTypesBlock(Block):
    """`data_types`. What does not fit the compute dtype is refused when that is known."""

    grad_accum_dtype: Annotated[
        Literal["fp32", "fp16", "bf16"] | None,
        BeforeValidator(_float_type),
        NoEffect(
            'no effect: gradients are accumulated in fp32; "infinity": {"gradient_dtype": "bf16"} rounds their sums',
            silent=("fp32",),
        ),
    ] = None
    param_dtype: Annotated[str | None, BeforeValidator(_float_type)] = None
    """May repeat the compute dtype that `bf16` or `fp16` sets; another dtype is an error."""
    buffer_dtype: Annotated[str | None, BeforeValidator(_float_type)] = None
    """Cast floating-point buffers to this dtype. By default they keep their dtype, except buffers that torch requires
    in the dtype of the weights."""
    keep_in_fp32_modules: Annotated[
        tuple[str, ...],
        BeforeValidator(parse_names),
        Refused("all parameters get the compute dtype", "Remove it", allowed=((),)),
    ] = ()


@with_deepspeed_only_keys
class OffloadBlock(Block):
    """`offload_param` and `offload_optimizer`. Each takes the other's keys too: files in the wild mix them up."""

    device: Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(parse_choice)] = "none"
    """Where these states are stored: in the compute device's memory, in host memory, or on drives."""
    nvme_path: Annotated[tuple[Directory, ...], BeforeValidator(parse_directories)] = ()
    """A directory on the drive, or a list of directories, one per drive, over which data is striped. Each may be an
    object that limits how much is used: `{"path": "/mnt/nvme", "capacity": "400GB"}`. `~`, `$NAME` and `${NAME}` are
    expanded. A missing directory is made if its parent exists. Scratch files in it have no name, and vanish with the
    process."""

    # "none" is DeepSpeed's word for a block that is switched off.
    def is_active(self) -> bool:
        return self.device != "none"


@with_deepspeed_only_keys
class ZeroBlock(Block):
    """`zero_optimization`."""

    stage: Annotated[Count | None, Field(le=3)] = None
    """What several processes shard. Stages 1 and 2 shard main weights, optimizer states and their updates; stage 3 also
    shards model weights. The numbers are the same in all stages (but see `bf16.check_grad_overflow` and
    `fp16.hysteresis`). With one process,
    every stage runs as 3. If you leave it out, it is 3 if `offload_param` or `offload_optimizer` names a device, and 0
    otherwise, as in DeepSpeed."""
    # An empty block is the same as none: its device is "none".
    offload_param: OffloadBlock = OffloadBlock()
    offload_optimizer: OffloadBlock = OffloadBlock()

    zero_quantized_weights: Annotated[Flag, NoEffect(_EXACT_EXCHANGE, silent=(False,))] = False
    zero_quantized_gradients: Annotated[Flag, NoEffect(_EXACT_EXCHANGE, silent=(False,))] = False


@with_deepspeed_only_keys
class AioBlock(Block):
    """`aio`. Two of DeepSpeed's own tools write the number of threads under names that DeepSpeed does not read."""

    block_size: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """Largest single request in bytes, rounded up to a multiple of 4096; 1 MiB by default."""
    queue_depth: Positive | None = None
    """Requests in flight per thread; 8 by default."""
    intra_op_parallelism: Positive | None = None
    """Threads for each direction (read, write) and each drive; at least 4 are used."""


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


@with_deepspeed_only_keys
class OptimizerBlock(Block):
    """`optimizer`."""

    type: str
    """Name of the optimizer. If you pass an optimizer to `initialize`, this block is not needed."""
    params: Untyped = None
    """Arguments of the optimizer, with torch's names; a wrong name is an error. As in DeepSpeed, `"Adam"` is AdamW
    unless `"adam_w_mode": false`, and `weight_decay` is 0 unless given (with `"torch_adam": true`, torch's default)."""


class SchedulerBlock(Block):
    """`scheduler`."""

    type: str
    """Name of the learning rate schedule."""
    params: Untyped = None
    """Arguments of the schedule; a wrong name is an error. If `warmup_max_lr` is `"auto"`, the optimizer's learning
    rate is used."""


# The texts under the fields of the models are printed into docs/reference/keys.md and the JSON schema.
class InfinityBlock(Block):
    """`infinity`: what DeepSpeed has no key for."""

    host_memory_budget: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """Hard limit on the engine's host memory: staging buffers, states kept in RAM, main gradients and, on the CPU, the
    weights in use. Not included are Python and its libraries (about 0.4 GB with transformers), activations, and other
    tensors that autograd also holds in plain torch. `"auto"`: the free memory of the machine or of the process's memory
    cgroup, less a reserve of 25 % (10 % if a GPU holds the activations). The reserve is at least 2 GB, and at most half
    of the free memory. A budget that is too small is an error that names the minimum."""
    device_memory_budget: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """On a GPU, a limit on the device memory for weights. `"auto"`: 65 % of the memory that gradients and states leave
    free; the rest is for activations."""
    staging_buffer_bytes: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """Size of one staging buffer, a multiple of 4096 bytes. It is the largest single transfer of optimizer state.
    `"auto"`: computed from the model and the budget."""
    prefetch: Flag = True
    """Read ahead, in the order of the last step. `false` reads on demand only."""
    keep_in_memory: Flag = True
    """Keep weights and states in memory as far as the budgets allow. `false` leaves that memory unused."""
    progress_bars: Flag = True
    """If stderr is a terminal, show the progress of work that takes more than 2 seconds: building the engine, saving,
    loading, export."""
    durable: Flag = False
    """Commit every step to the drive. After a kill, a power cut or a full disk, the same script resumes from the last
    commit: see [Durable runs](../guides/checkpoints.md#durable-runs)."""
    durable_path: Annotated[tuple[Directory, ...] | None, BeforeValidator(parse_directories)] = None
    """Directory of the durable run, or a list with one directory for each drive. `"auto"`: `durable` below each
    `nvme_path`. A missing directory is made if its parent exists."""
    keep_last: Annotated[int, Field(ge=1)] = 1
    """How many commits `engine.rollback` can choose from. Each takes as much space as a step writes."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Keep `keep_last` more commits, of steps that are multiples of this number, so that `engine.rollback` reaches
    further back. 0 keeps none."""
    drive_tbw: Annotated[Number | None, Field(gt=0)] = None
    """Terabytes that all drives together are rated to write (TBW). The plan then shows how many steps that allows."""
    units: Annotated[tuple[str, ...], BeforeValidator(parse_names)] = ()
    """Modules that are each paged as one unit: class names, or patterns of module names. Empty: the engine finds
    repeated blocks."""
    tile_above: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """Cut linear layers and embeddings with a larger weight (in the compute dtype) into tiles of this size. Each tile
    is paged by itself, so a layer that is larger than the budget can be trained. Off by default.
    [Tiles](../guides/larger-than-ram.md#tiles) lists which last bits may differ."""
    experts: Literal["auto", "by_expert", "touched_only", "whole"] = "auto"
    """How experts are paged if a layer stores all of them in one tensor, as in transformers 5. `"by_expert"` reads only
    those that tokens go to, and updates all of them as torch does. `"touched_only"` updates only those that tokens went
    to. `"whole"` pages them with their layer. `"auto"` is `"by_expert"` for frozen experts with `offload_param` on NVMe,
    and `"whole"` for all others. In stage 3 on several processes, all of them gather the experts that any of them needs.
    See [mixtures of experts](../guides/mixtures-of-experts.md)."""
    strict: Annotated[Flag, BeforeValidator(_strictness)] = True
    """`false` turns unknown keys into a warning."""
    update: Literal["auto", "in_backward", "deferred", "step"] = "auto"
    """When the optimizer runs. `"in_backward"` updates a unit (a block of the model) as soon as its gradients are
    complete, `"deferred"` updates it just before the next forward needs it, and `"step"` updates everything in
    `engine.step()`. `"auto"` takes `"in_backward"`, or `"deferred"` if something needs all gradients first (clipping,
    fp16), or `"step"` on a CPU where everything stays in memory, because updates beside the model would only take its
    cores. Processes that divide states update a unit in backward if all of them have its gradients, and everything else
    in the step. The numbers are the same."""
    update_workers: Positive | None = None
    """Number of threads that run updates. Each uses one core; any number gives the same bits. `"auto"`: the cores that
    the model's computation does not use, from 1 to 8. On a CPU, these are the cores beyond `torch.get_num_threads()`;
    if updates run in the step, the number is `torch.get_num_threads()`. Beside a GPU, these are all cores but two, and
    at most one for each 5 GB/s of the drives, or 4 if their speed is not known. Your own optimizer classes, and updates
    on a GPU, use one thread."""
    main_weights: Literal["auto", "remainder", "fp32"] = "auto"
    """How fp32 main weights are kept beside bf16 weights: `"remainder"` stores the 16 bits that a bf16 weight lacks,
    `"fp32"` all 32. `"auto"`: `"remainder"` with bf16."""
    gradient_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of gradients that wait for their update. `"auto"` loses nothing. `"bf16"` rounds sums of several
    micro-batches, and is an error if several processes train together."""
    state_dtype: Literal["fp32", "bf16", "int8", "int8_dynamic"] = "fp32"
    """Dtype in which optimizer states are stored. `"bf16"` (rounded stochastically) and `"int8"` (one byte each, and a
    scale for every 256) are smaller, and change the numbers a little. `"int8_dynamic"` has the levels and the rounding
    of bitsandbytes' 8-bit optimizers. See [Smaller states](#smaller-states)."""
    frozen_dtype: Annotated[str | tuple[tuple[str, str], ...] | None, BeforeValidator(parse_frozen_dtype)] = None
    """How frozen weights are stored. `"nf4"`, `"int8"` and `"fp8_e4m3"` pack the weights of linear layers on drives and
    in RAM, and unpack them when they are read. `"bf16"` stores them in bf16 under fp32 training. An object chooses by
    patterns of names, and the first match decides: `{"lm_head": "bf16", "*": "nf4"}`. The model computes with the
    rounded weights: see [Packed weights](packed-weights.md)."""
    schedule: Literal["auto", "vertical", "ordinary"] = "auto"
    """Order of micro-batches in `engine.train_batch` and `InfinityTrainer`. `"vertical"` takes all micro-batches
    through one unit (a block of the model) before the next; `"ordinary"` runs one micro-batch after the other. `"auto"`
    takes the order that moves fewer bytes. Beside a GPU it takes `"vertical"`, which sums gradients on the GPU. In the
    Trainer, `"auto"` takes `"vertical"` only if all bits stay the same."""
    activation_checkpointing: Flag = False
    """Compute each block (each module that is paged as one unit) once more in backward instead of keeping its
    activations, like non-reentrant `torch.utils.checkpoint` around the blocks. It applies in training only, and leaves
    out blocks that the model checkpoints itself. The vertical schedule recomputes blocks anyway. As in DeepSpeed, the
    block `activation_checkpointing` alone enables nothing."""
    activations: Literal["memory", "cpu", "nvme"] = "memory"
    """Where tensors that autograd saves in the model's forward wait for backward. `"memory"` leaves them where they
    were made, outside of the budget. `"cpu"` keeps them in host memory, within a share of the budget; more than this
    share is an error that names the size. `"nvme"` also keeps them within a share of the budget, writes the rest to the
    drives, and reads it back in time. Together with `activation_checkpointing`, these tensors are the inputs of blocks.
    Tensors below 64 KiB, and losses that are computed outside of the model, are not included."""
    # 120 seconds trade late news of a dead drive against false alarms of a busy one. The number is not measured.
    io_deadline_seconds: Annotated[Number, Field(ge=LEAST_DEADLINE_SECONDS)] = 120.0
    """Seconds after which an unfinished read or write raises an error."""
    direct_io: Flag = True
    """Bypass the page cache (O_DIRECT) if the file system supports it."""
    io_backend: Annotated[BackendName, BeforeValidator(parse_choice)] = "auto"
    """How bytes are moved. `"auto"` chooses the fastest backend that works here: see [backends](swapper.md#backends).
    If neither this key nor `aio` is set, engines use the settings that `infinity profile` found best on these
    drives."""
    verify_checksums: Flag = False
    """Keep a crc32c of written bytes, and compare it when they are read. A difference is an error that names the
    parameter, the file and the offset."""
    timeline: Annotated[str | None, BeforeValidator(parse_path)] = None
    """File for a trace of computing, waiting and transfers. It is written when the engine is closed, and
    ui.perfetto.dev opens it."""
    run_log: Annotated[str | None, BeforeValidator(parse_path)] = None
    """Directory for the [log of the run](run-log.md): config, plan, every step and every event, as lines of JSON. A
    resumed run appends to its log."""


@with_deepspeed_only_keys
class ActivationCheckpointingBlock(Block):
    """`activation_checkpointing`: as in DeepSpeed, how `checkpointing.checkpoint` works once a script has called
    `checkpointing.configure(None, config)`. It switches nothing on; `infinity.activation_checkpointing` does."""

    cpu_checkpointing: Annotated[Flag, NoEffect(_TORCH_CHECKPOINT, silent=(False,))] = False
    """Inputs of checkpointed functions are kept in pinned host memory until backward. On a CPU they are there anyway."""


@with_deepspeed_only_keys
class TensorParallelSizeBlock(Block):
    """`tensor_parallel.tp`."""


@with_deepspeed_only_keys
class TensorParallelBlock(Block):
    """`tensor_parallel`."""

    tp: TensorParallelSizeBlock = TensorParallelSizeBlock()


@with_deepspeed_only_keys
class PipelineBlock(Block):
    """`pipeline`."""


@with_deepspeed_only_keys
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
    """In each `engine.step()`, write `Train/Samples/train_loss` and `lr`; with fp16 also `loss_scale`, and with
    `wall_clock_breakdown` also `elapsed_time_ms_forward`, `_backward` and `_step`. The values of
    `engine.monitor.write_events` are written too."""
    output_path: Annotated[str, BeforeValidator(_directory)] = ""
    """A directory. Empty: the directory in which the script was started."""
    job_name: Annotated[str, BeforeValidator(parse_path)] = "DeepSpeedJobName"
    """Name of the directory in `output_path` for this run."""


class CsvMonitorBlock(Block):
    """`csv_monitor`: as `tensorboard`, each curve in a file of its own with samples and values."""

    enabled: Flag = False
    """Append each curve to a file of its own: `Train_Samples_train_loss.csv` and so on."""
    output_path: Annotated[str, BeforeValidator(_directory)] = ""
    """A directory. Empty: the directory in which the script was started."""
    job_name: Annotated[str, BeforeValidator(parse_path)] = "DeepSpeedJobName"
    """Name of the directory in `output_path` for this run."""


class WandbBlock(Block):
    """`wandb`: as `tensorboard`, for Weights & Biases, into the script's own run if it has begun one. Needs the package
    `wandb`; with the environment variable `WANDB_MODE=offline` nothing is sent."""

    enabled: Flag = False
    """Write the same curves to Weights & Biases."""
    group: str | None = None
    """Name of the group of runs."""
    team: str | None = None
    """The entity to which the project belongs."""
    project: str = "deepspeed"
    """Name of the project in Weights & Biases."""


@with_deepspeed_only_keys
class RootBlock(Block):
    """The top level."""

    train_batch_size: Positive | None = None
    """Samples per optimizer step: the product of the next two keys and the number of processes. Any one of the three
    may be left out, or two of them."""
    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples per backward. With `"auto"` here and in `train_batch_size`, the data loader decides."""
    gradient_accumulation_steps: Positive | None = None
    """Backwards per optimizer step. By default it follows from the other two keys, and is 1 if they leave it open."""
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
    """Largest global 2-norm of the gradients. 1.0 if you leave it out, as in DeepSpeed since 0.19; 0 switches clipping
    off."""
    bf16: Bf16Block = Bf16Block()
    fp16: Fp16Block = Fp16Block()
    torch_autocast: AutocastBlock = AutocastBlock()
    data_types: DataTypesBlock = DataTypesBlock()
    managed_gradient_accumulation: Flag = True
    """`false` makes every `engine.step()` an update. Then nothing is updated in backward."""
    zero_optimization: ZeroBlock = ZeroBlock()
    aio: AioBlock = AioBlock()
    steps_per_print: Annotated[int | None, BeforeValidator(_steps_per_print)] = None
    """Number of steps after which a line is logged (level INFO)."""
    wall_clock_breakdown: Flag = False
    """For each step, log a line (level INFO) that shows where its time went."""
    dataloader_drop_last: Flag = False
    """The loader that `initialize` makes for `training_data` leaves out a last batch that is not full."""
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
        Refused(
            "the data is used in the order of the loader", "Sort the samples in the data set itself", is_by_parts=True
        ),
    ] = None

    # ---- speed, memory, logging

    activation_checkpointing: ActivationCheckpointingBlock = ActivationCheckpointingBlock()
    checkpoint: CheckpointBlock = CheckpointBlock()
    gradient_allreduce_op: Annotated[
        Literal["mean", "sum"], BeforeValidator(parse_choice), NoEffect(_EXACT_EXCHANGE, silent=("mean",))
    ] = "mean"
    communication_data_type: Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_float_type)] = "fp32"
    """Data type in which gradients are exchanged between processes. "fp16" and "bf16" halve the bytes. They round each
    process's part of the mean, and the mean; the parts are added in fp32."""
