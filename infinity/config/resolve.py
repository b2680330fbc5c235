"""Turns a validated `RootBlock` into an `InfinityConfig`: decides every value, and records who decided it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from infinity.config.batch import resolve_batch_sizes
from infinity.config.precision import DTYPES, resolve_autocast, resolve_precision, scales_loss
from infinity.config.ranks import check_ranks
from infinity.config.resolved import (
    Decision,
    DurableSection,
    GradientDtype,
    InfinityConfig,
    InfinitySection,
    IOSection,
    MainWeights,
    OffloadSection,
    OptimizerSection,
    SchedulerSection,
    UpdateMode,
)
from infinity.config.schema.block import Block, Findings
from infinity.config.schema.blocks import OffloadBlock, RootBlock, WandbBlock
from infinity.config.schema.directories import (
    check_capacities,
    check_directories,
    describe_directories,
    resolve_directories,
    resolve_file,
)
from infinity.config.schema.quantities import parse_flag, parse_number
from infinity.errors import ConfigError
from infinity.optim.lr_schedules import schedule_parameters

# O_DIRECT needs offsets, lengths and addresses in multiples of the drive's logical block, of 512 or 4096 bytes.
_ALIGNMENT = 4096
# Defaults of `aio`. `infinity profile` measures better ones for a drive, and engines use those
# (machine/bandwidth_cache.py).
_REQUEST_BYTES = 1 << 20
_NUM_THREADS = 4
_QUEUE_DEPTH = 8  # per thread, as DeepSpeed counts it
# "auto" that transformers, accelerate and InfinityTrainer replace. `initialize` refuses it where nothing has replaced it.
_OF_LIBRARIES = {"optimizer.params.lr", *(f"scheduler.params.{name}_num_steps" for name in ("warmup", "total"))}


def resolve(
    root: RootBlock, findings: Findings, *, world_size: int, check_storage: bool, source: Mapping[str, Any]
) -> InfinityConfig:
    """Decide every value. ``source``: the JSON as it was given.

    Raises:
        ConfigError: values that are fine by themselves contradict each other, or a directory cannot be used.
    """
    decisions = _Decisions(root, findings, world_size)
    train, micro, accumulation, found = resolve_batch_sizes(root, auto=findings.auto, world_size=world_size)
    decisions.made.extend(found)
    decisions.record("gradient_clipping", root.gradient_clipping, default="default, as in DeepSpeed since 0.19")
    compute_dtype, loss_scaling = resolve_precision(root)
    decisions.record("bf16.enabled", root.bf16.enabled)
    if _checks_as_deepspeed(root):
        decisions.decide("bf16.check_grad_overflow", True, "with clipping in stages 1 and 2, as in DeepSpeed")
    decisions.record("fp16.enabled", root.fp16.enabled)
    # Checks before tiers: `_resolve_tiers` looks at directories, and an error in the JSON should not wait for a drive.
    check_ranks(root, world_size)
    _check_update(decisions)
    tiers = _resolve_tiers(decisions, check_storage)
    buffer_type = root.data_types.buffer_dtype
    decided: dict[str, Any] = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "compute_dtype": compute_dtype,
        "buffer_dtype": None if buffer_type is None else DTYPES[buffer_type],
        "loss_scaling": loss_scaling,
        "checks_overflow": _checks_overflow(root),
        "optimizer": _resolve_optimizer(decisions),
        "scheduler": _resolve_scheduler(decisions),
        **tiers,
        "io": _resolve_io(decisions),
        "infinity": _resolve_infinity(
            decisions,
            compute_dtype,
            # Without the engine's counting, a script may call backward as often as it likes before a step: plan for
            # sums.
            max(accumulation, 1 if root.managed_gradient_accumulation else 2),
            _resolve_durable(decisions, tiers, check_storage),
        ),
        "monitors": _resolve_monitors(root),
        "zero_stage": zero_stage(root),
        "autocast_dtype": resolve_autocast(root),
        "communication_dtype": DTYPES[root.communication_data_type],
        "casts_inputs": (root.fp16.enabled and root.fp16.auto_cast) or (root.bf16.enabled and root.bf16.auto_cast),
    }
    # Last: it adds the keys that nothing above has recorded.
    decisions.record_other_autos()
    return InfinityConfig(
        **_as_written(root, InfinityConfig) | decided,
        world_size=world_size,
        source=source,
        notices=findings.notices(),
        decisions=tuple(decisions.made),
    )


def _as_written(block: Block, section: type[Any]) -> dict[str, Any]:
    """Return the fields of a section that a block has under the same name, with the block's values."""
    return {each.name: getattr(block, each.name) for each in fields(section) if each.name in type(block).model_fields}


def _resolve_tiers(decisions: _Decisions, check_storage: bool) -> dict[str, OffloadSection]:
    """Decide where parameters and optimizer states are stored; returns a section for each offload block."""
    root, zero = decisions.root, decisions.root.zero_optimization
    tiers = {name: _resolve_offload(name, decisions, check_storage) for name in ("offload_param", "offload_optimizer")}
    directories = [tier.nvme_directories for tier in tiers.values()]
    check_capacities(*directories, key="zero_optimization.offload_optimizer.nvme_path")
    # A config without the block gets no line about its stage.
    if "zero_optimization" in root.model_fields_set and zero.stage is None:
        offloads = "" if zero_stage(root) else "nothing is offloaded, as in DeepSpeed"
        decisions.decide("zero_optimization.stage", zero_stage(root), offloads or "something is offloaded")
    # The stages differ in what ranks divide among them. One rank has nothing to divide.
    if zero.stage in (0, 1, 2) and decisions.world_size == 1:
        reason = f"stage {zero.stage} runs as stage 3, with the same numbers"
        decisions.findings.record("zero_optimization.stage", reason)
    if root.infinity.activations == "nvme" and not any(tier.nvme_paths for tier in tiers.values()):
        cure = "Set zero_optimization.offload_optimizer (or offload_param) to a directory on a drive"
        raise ConfigError.value("infinity.activations", "nvme", "there is no NVMe tier", cure=cure)
    return tiers


class _Decisions:
    """Collects, for each key, the value that was decided and why, in the order in which they are printed."""

    def __init__(self, root: RootBlock, findings: Findings, world_size: int) -> None:
        self.root = root
        self.findings = findings
        self.world_size = world_size
        self.made: list[Decision] = []

    def record(self, key: str, value: object, *, default: str = "default") -> None:
        """Record the value of `key`: from the config, or else from `default`."""
        undecided = f'"auto": {default}' if key in self.findings.auto else default
        decided_by = "config" if self._is_given(key) else undecided
        self.made.append(Decision(key, value, decided_by))

    def decide(self, key: str, value: object, reason: str) -> None:
        """Record a value that follows from others."""
        self.made.append(Decision(key, value, f'"auto": {reason}' if key in self.findings.auto else reason))

    def record_other_autos(self) -> None:
        """Record the keys left to "auto" that have no decision yet."""
        written = {decision.key for decision in self.made}
        for key in self.findings.auto:
            if key not in written:
                value: Any = self.root
                for name in key.split("."):
                    # None inside a block without a model (`optimizer.params.lr`): its default is the optimizer's own.
                    value = getattr(value, name, None)
                shown = "its own default" if value is None or value == 0 else value
                if key in _OF_LIBRARIES:
                    shown = "a number that the script's library sets; otherwise an error"
                self.made.append(Decision(key, shown, '"auto"' if key in _OF_LIBRARIES else '"auto": default'))

    def autos_below(self, path: str) -> frozenset[str]:
        """Return the keys left to "auto" that begin with `path`, without it."""
        return frozenset(key.removeprefix(path) for key in self.findings.auto if key.startswith(path))

    def _is_given(self, key: str) -> bool:
        block: object = self.root
        *path, name = key.split(".")
        for part in path:
            block = getattr(block, part)
        # pydantic fills in defaults. `model_fields_set` has only the keys that the file had.
        return isinstance(block, Block) and name in block.model_fields_set


def _checks_overflow(root: RootBlock) -> bool:
    """Whether a step whose gradients are not finite is skipped."""
    is_asked = root.bf16.enabled and bool(root.bf16.check_grad_overflow)
    return scales_loss(root) or is_asked or _checks_as_deepspeed(root)


def _checks_as_deepspeed(root: RootBlock) -> bool:
    """Whether to check bf16 gradients because DeepSpeed does so by default in this stage."""
    # Only with clipping: the norm needs all gradients before the first update, so the check costs no waiting.
    is_left_out = root.bf16.enabled and root.bf16.check_grad_overflow is None
    return is_left_out and zero_stage(root) in (1, 2) and root.gradient_clipping > 0


def _needs_all_gradients(decisions: _Decisions) -> tuple[str, str] | None:
    """Return which key needs all gradients before the first update, and how to change it; None if none does.

    Then no unit can be updated in backward.
    """
    root, world_size = decisions.root, decisions.world_size
    if root.gradient_clipping > 0:
        return f"gradient_clipping = {root.gradient_clipping}", "gradient_clipping to 0"
    # A single overflow anywhere skips the whole step, so no unit may be updated before the last gradient is known.
    if scales_loss(root):
        return "the overflow check of fp16", "take bf16 instead of fp16"
    if _checks_overflow(root):
        return "bf16.check_grad_overflow", "that to false"
    # In stage 0 every rank updates every parameter, from the mean over all ranks.
    if world_size > 1 and zero_stage(root) == 0:
        return f"the mean over {world_size} processes in stage 0", "zero_optimization.stage to 1, or start one process"
    if not root.managed_gradient_accumulation:
        return "managed_gradient_accumulation = false, where the last gradient is only known in the step,", "it to true"
    return None


def _check_update(decisions: _Decisions) -> None:
    found = _needs_all_gradients(decisions)
    if decisions.root.infinity.update == "in_backward" and found is not None:
        problem = f"{found[0]} needs all gradients before the first update"
        cure = f'Set infinity.update to "auto", or {found[1]}'
        raise ConfigError.value("infinity.update", "in_backward", problem, cure=cure)


def _resolve_optimizer(decisions: _Decisions) -> OptimizerSection | None:
    if (block := decisions.root.optimizer) is None:
        return None
    params = {name: _plain(value) for name, value in (block.params or {}).items()}
    # DeepSpeed refuses it as well, with the same advice.
    max_grad_norm = params.pop("max_grad_norm", None)
    if max_grad_norm:
        cure = f'Remove it and set "gradient_clipping": {max_grad_norm} at the top level'
        problem = "the engine clips, not the optimizer"
        raise ConfigError.value("optimizer.params.max_grad_norm", max_grad_norm, problem, cure=cure)
    if isinstance(params.get("betas"), list):
        # JSON has no tuples.
        params["betas"] = tuple(params["betas"])
    return OptimizerSection(block.type, params, decisions.autos_below("optimizer.params."))


def _resolve_scheduler(decisions: _Decisions) -> SchedulerSection | None:
    if (block := decisions.root.scheduler) is None:
        return None
    params = {name: _plain(value) for name, value in (block.params or {}).items()}
    known = schedule_parameters(block.type)
    autos = decisions.autos_below("scheduler.params.")
    if "warmup_max_lr" in autos:
        # "auto" is what Hugging Face's tools replace by the optimizer's rate.
        params["warmup_max_lr"] = None
        decisions.made.append(Decision("scheduler.params.warmup_max_lr", "the optimizer's lr", '"auto"'))
    for name in [name for name, is_required in known.items() if is_required]:
        # Left to "auto" it is an error only where the schedule is built: the caller may bring a schedule along.
        if name not in params and name not in autos:
            key = f"scheduler.params.{name}"
            raise ConfigError.value(key, None, "it is missing", cure=f"{block.type} requires it: add it")
    return SchedulerSection(block.type, params, autos)


def _resolve_offload(name: str, decisions: _Decisions, check_storage: bool) -> OffloadSection:
    key = f"zero_optimization.{name}"
    block: OffloadBlock = getattr(decisions.root.zero_optimization, name)
    decisions.record(f"{key}.device", block.device)
    # `nvme_path` of another device is ignored: files keep it when they switch the device.
    if block.device != "nvme":
        return OffloadSection(block.device, ())
    section = OffloadSection(block.device, resolve_directories(block.nvme_path, key=f"{key}.nvme_path"))
    if check_storage:
        check_directories(section.nvme_paths, key=f"{key}.nvme_path")
    decisions.record(f"{key}.nvme_path", describe_directories(section.nvme_directories))
    return section


def _resolve_io(decisions: _Decisions) -> IOSection:
    aio, infinity = decisions.root.aio, decisions.root.infinity
    wanted_bytes = aio.block_size or _REQUEST_BYTES
    # -(-a // b) is division rounded up.
    request_bytes = -(-wanted_bytes // _ALIGNMENT) * _ALIGNMENT
    # DeepSpeed's threads submit requests to the kernel and go on. Ours block in the call, so fewer threads than these
    # leave a drive idle. A file with 1 only repeats DeepSpeed's default.
    num_threads = max(_NUM_THREADS, aio.intra_op_parallelism or 0)
    max_inflight = (aio.queue_depth or _QUEUE_DEPTH) * num_threads
    rounded = "" if wanted_bytes == request_bytes else f" ({wanted_bytes} rounded up to a multiple of {_ALIGNMENT})"
    # `infinity config show` prints these: where the engine deviates from the file, it says why.
    decisions.record("aio.block_size", f"{request_bytes}{rounded}" if rounded else request_bytes)
    wanted_threads = aio.intra_op_parallelism or num_threads
    raised = f"{num_threads} ({wanted_threads} raised to the fewest that keep a drive busy)"
    decisions.record("aio.intra_op_parallelism", num_threads if wanted_threads == num_threads else raised)
    decisions.record("aio.queue_depth", f"{max_inflight} requests in flight")
    decisions.record("infinity.io_backend", infinity.io_backend)
    decisions.record("infinity.verify_checksums", infinity.verify_checksums)
    sizes = (aio.block_size, aio.intra_op_parallelism, aio.queue_depth)
    return IOSection(
        request_bytes,
        num_threads,
        max_inflight,
        infinity.io_deadline_seconds,
        infinity.direct_io,
        backend=infinity.io_backend,
        is_from_config=infinity.io_backend != "auto" or any(size is not None for size in sizes),
        verify_checksums=infinity.verify_checksums,
    )


def _resolve_infinity(
    decisions: _Decisions, compute_dtype: torch.dtype, num_micro_batches: int, durable: DurableSection | None
) -> InfinitySection:
    block = decisions.root.infinity
    staging_buffer_bytes = block.staging_buffer_bytes
    # Chunks of optimizer state are read with O_DIRECT into whole staging buffers, so their size has to be aligned.
    if staging_buffer_bytes is not None and staging_buffer_bytes % _ALIGNMENT:
        nearest = -(-staging_buffer_bytes // _ALIGNMENT) * _ALIGNMENT
        problem = f"must be a multiple of {_ALIGNMENT}, the unit in which drives are read"
        raise ConfigError.value("infinity.staging_buffer_bytes", staging_buffer_bytes, problem, cure=f"Take {nearest}")
    for name in ("host_memory_budget", "device_memory_budget", "staging_buffer_bytes", "update_workers"):
        value = getattr(block, name)
        shown = "chosen at start" if value is None else value
        decisions.record(f"infinity.{name}", shown)
    gradient_dtype, rounds_gradients = _resolve_gradient_dtype(decisions, compute_dtype, num_micro_batches)
    decisions.record("infinity.schedule", block.schedule)
    decisions.record("infinity.state_dtype", block.state_dtype)
    if block.frozen_dtype is not None:
        decisions.record("infinity.frozen_dtype", block.frozen_dtype)
    update = _resolve_update(decisions)
    decided: dict[str, Any] = {
        # A commit of a durable run covers files only: what stays in memory would be lost in a crash.
        "keep_in_memory": block.keep_in_memory and durable is None,
        "update": update,
        # The plan may still choose "step" later, when it knows whether all fits in a CPU's memory (plan/inputs.py).
        "update_is_open": block.update == "auto" and update != "step",
        "main_weights": _resolve_main_weights(decisions, compute_dtype),
        "gradient_dtype": gradient_dtype,
        "rounds_gradients": rounds_gradients,
        "timeline": resolve_file(block.timeline, key="infinity.timeline") if block.timeline is not None else None,
        "run_log": resolve_file(block.run_log, key="infinity.run_log") if block.run_log is not None else None,
        "durable": durable,
    }
    return InfinitySection(**_as_written(block, InfinitySection) | decided)


def _resolve_monitors(root: RootBlock) -> dict[str, Path | WandbBlock]:
    found: dict[str, Path | WandbBlock] = {}
    for key in ("csv_monitor", "tensorboard"):
        if (block := getattr(root, key)).enabled:
            # As DeepSpeed: OUTPUT_PATH/JOB_NAME.
            found[key] = resolve_file(block.output_path or ".", key=f"{key}.output_path") / block.job_name
    if root.wandb.enabled:
        found["wandb"] = root.wandb
    return found


def _resolve_durable(
    decisions: _Decisions, tiers: Mapping[str, OffloadSection], check_storage: bool
) -> DurableSection | None:
    block = decisions.root.infinity
    if not block.durable:
        return None
    for name, section in tiers.items():
        if section.device != "nvme":
            key = f"zero_optimization.{name}.device"
            cure = 'Set it to "nvme", or infinity.durable to false'
            raise ConfigError.value(key, section.device, "a durable run has everything on drives", cure=cure)
    if "keep_in_memory" not in block.model_fields_set:
        decisions.decide("infinity.keep_in_memory", False, "a durable run keeps nothing off the drives")
    elif block.keep_in_memory:
        cure = "Leave it out, or set infinity.durable to false"
        raise ConfigError.value("infinity.keep_in_memory", True, "a durable run has everything on drives", cure=cure)
    if block.durable_path is not None:
        found = resolve_directories(block.durable_path, key="infinity.durable_path")
        if check_storage:
            check_directories([each.path for each in found], key="infinity.durable_path")
    else:
        found = tuple(replace(each, path=each.path / "durable") for each in tiers["offload_optimizer"].nvme_directories)
    # Equal speeds give all drives equal stripes. Measured speeds vary from start to start, and would lay out the files
    # of the last commit differently.
    directories = tuple(replace(each, bytes_per_second=1.0) for each in found)
    durable = DurableSection(directories, block.keep_last, block.keep_every)
    decisions.record("infinity.durable_path", describe_directories(durable.directories))
    decisions.record("infinity.keep_last", durable.keep_last)
    decisions.record("infinity.keep_every", durable.keep_every)
    return durable


def zero_stage(root: RootBlock) -> int:
    """Return the stage of the config; without one, 3 if a block offloads and 0 if none does, as in DeepSpeed."""
    zero = root.zero_optimization
    if zero.stage is not None:
        return zero.stage
    return 3 if zero.offload_param.is_active() or zero.offload_optimizer.is_active() else 0


def _resolve_update(decisions: _Decisions) -> UpdateMode:
    block, found = decisions.root.infinity, _needs_all_gradients(decisions)
    update, is_early = block.update, block.update != "deferred" and not block.durable and found is None
    # All ranks have to reach an exchange together. They do in the step; a deferred update runs when its rank needs it.
    if decisions.world_size > 1 and zero_stage(decisions.root) > 0 and update != "step" and not is_early:
        reason = f"{decisions.world_size} processes exchange what each has updated, in the step"
        decisions.decide("infinity.update", "step", reason)
        return "step"
    # "in_backward" has passed `_check_update` by now, so it contradicts nothing.
    if update != "auto":
        decisions.record("infinity.update", update)
        return update
    unless = 'before the first update; "step" on a CPU whose memory holds everything'
    if found is not None:
        decisions.decide("infinity.update", "deferred", f"{found[0]} needs all gradients {unless}")
        return "deferred"
    decisions.decide("infinity.update", "in_backward", f"nothing needs all gradients {unless}")
    return "in_backward"


def _resolve_main_weights(decisions: _Decisions, compute_dtype: torch.dtype) -> MainWeights:
    block = decisions.root.infinity
    if compute_dtype == torch.float32:
        decisions.decide("infinity.main_weights", "fp32", "the model weights are fp32, and are the main weights")
        return "fp32"
    # bf16 has the exponent of fp32 (8 bits): a bf16 weight and 16 bits of remainder determine the fp32 main weight.
    # fp16 has 5 bits of exponent, so 16 more bits do not reach all of fp32.
    if compute_dtype == torch.float16:
        if block.main_weights == "remainder":
            problem = "fp16 has a shorter exponent than fp32, so an fp16 weight and 16 more bits do not make an fp32 main weight"
            raise ConfigError.value("infinity.main_weights", "remainder", problem, cure="Remove it, or take bf16")
        decisions.decide("infinity.main_weights", "fp32", "the only way with fp16")
        return "fp32"
    if block.main_weights != "auto":
        decisions.record("infinity.main_weights", block.main_weights)
        return block.main_weights
    decisions.decide("infinity.main_weights", "remainder", "the default with bf16")
    return "remainder"


def _resolve_gradient_dtype(
    decisions: _Decisions, compute_dtype: torch.dtype, num_micro_batches: int
) -> tuple[GradientDtype, bool]:
    """Return the dtype of gradients that wait for their update, and whether it may round their sums."""
    key, chosen = "infinity.gradient_dtype", decisions.root.infinity.gradient_dtype
    # Worked cases of "auto", with bf16 weights on NVMe:
    #   1 process, 1 micro-batch:   "bf16": autograd's gradient is bf16 already, nothing is rounded
    #   1 process, 4 micro-batches: "fp32": a sum of four bf16 numbers needs more bits than bf16 has
    #   2 processes:                "fp32": the mean of two bf16 numbers does not, either
    if chosen == "bf16" and compute_dtype != torch.bfloat16:
        problem = "gradients have more bits than bf16, and would be rounded"
        raise ConfigError.value(key, chosen, problem, cure='Remove it, or switch on "bf16": {"enabled": true}')
    if chosen != "auto":
        decisions.record(key, chosen)
        return chosen, chosen == "bf16"
    zero = decisions.root.zero_optimization
    if compute_dtype != torch.bfloat16:
        decisions.decide(key, "fp32", "gradients come with more bits than bf16 has")
    elif decisions.world_size > 1:
        decisions.decide(key, "fp32", "the mean over several processes would be rounded")
    elif num_micro_batches > 1:
        decisions.decide(key, "fp32", "sums of several micro-batches would be rounded")
    elif "nvme" not in (zero.offload_param.device, zero.offload_optimizer.device):
        decisions.decide(key, "fp32", "there is no NVMe tier for sums that find no room")
    else:
        decisions.decide(key, "bf16", "loses nothing with one micro-batch; a sum of several would be kept as fp32")
        # False: if a script does sum gradients after all, they are widened to fp32 instead of rounded.
        return "bf16", False
    return "fp32", False


def _plain(value: object) -> Any:
    """Convert texts such as "1e-4" and "true" to numbers and flags; other values are returned as they are."""
    # YAML 1.1 reads 1e-4, without a dot, as a text, and accelerate and others build configs from YAML.
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, str):
        return value
    for parse in (parse_number, parse_flag):
        try:
            return parse(value)
        except ValueError:
            continue
    return value
