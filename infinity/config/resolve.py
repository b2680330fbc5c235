"""A validated `RootBlock` to an `InfinityConfig`: every value decided, and who decided it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from infinity.config.batch import resolve_batch_sizes
from infinity.config.block import Block, Findings
from infinity.config.blocks import InfinityBlock, OptimizerBlock, RootBlock, SchedulerBlock
from infinity.config.offload_blocks import AioBlock, OffloadBlock
from infinity.config.quantities import parse_flag, parse_number
from infinity.config.resolved import (
    Decision,
    InfinityConfig,
    InfinitySection,
    IOSection,
    OffloadSection,
    OptimizerSection,
    SchedulerSection,
)
from infinity.config.storage import check_directories, resolve_directories
from infinity.errors import ConfigValueError, UnsupportedConfigError
from infinity.schedules import schedule_parameters

_ALIGNMENT = 4096  # of everything that goes past the page cache
_REQUEST_BYTES = 1 << 20
_NUM_THREADS = 4
_QUEUE_DEPTH = 8  # per thread, as DeepSpeed counts it


def resolve(root: RootBlock, findings: Findings, *, world_size: int, check_storage: bool) -> InfinityConfig:
    """Decide every value.

    Raises:
        ConfigError: values that are fine by themselves contradict each other, or a directory cannot be used.
    """
    book = _Book(root, findings)
    batch = resolve_batch_sizes(
        root.train_batch_size,
        root.train_micro_batch_size_per_gpu,
        root.gradient_accumulation_steps,
        auto=findings.auto,
        world_size=world_size,
    )
    book.decisions.extend(batch.decisions)
    book.note("gradient_clipping", root.gradient_clipping, default="default, as in DeepSpeed since 0.19")
    compute_dtype = torch.bfloat16 if root.bf16.enabled else torch.float32
    book.note("bf16.enabled", root.bf16.enabled)
    _check_data_types(root, compute_dtype)
    _check_update(root)
    stage = root.zero_optimization.stage
    if stage < 3:
        findings.note("zero_optimization.stage", f"stage {stage} runs as stage 3, with the same numbers")
    config = InfinityConfig(
        train_batch_size=batch.train,
        train_micro_batch_size_per_gpu=batch.micro,
        gradient_accumulation_steps=batch.accumulation,
        gradient_clipping=root.gradient_clipping,
        compute_dtype=compute_dtype,
        optimizer=_resolve_optimizer(root.optimizer),
        scheduler=_resolve_scheduler(root.scheduler, findings, book),
        offload_param=_resolve_offload("offload_param", root.zero_optimization.offload_param, book, check_storage),
        offload_optimizer=_resolve_offload(
            "offload_optimizer", root.zero_optimization.offload_optimizer, book, check_storage
        ),
        io=_resolve_io(root.aio, root.infinity, book),
        infinity=_resolve_infinity(root.infinity, book),
        steps_per_print=root.steps_per_print,
        wall_clock_breakdown=root.wall_clock_breakdown,
        dataloader_drop_last=root.dataloader_drop_last,
        notices=(),
        decisions=(),
    )
    book.note_other_autos()
    return replace(config, notices=findings.notices(), decisions=tuple(book.decisions))


class _Book:
    """Writes down decisions. Knows which keys were given and which were "auto"."""

    def __init__(self, root: RootBlock, findings: Findings) -> None:
        self._root = root
        self._auto = findings.auto
        self.decisions: list[Decision] = []

    def note(self, key: str, value: object, *, default: str = "default") -> None:
        """Record the value of `key`: from the config, or else from `default`."""
        undecided = f'"auto": {default}' if key in self._auto else default
        decided_by = "config" if self._is_given(key) else undecided
        self.decisions.append(Decision(key, value, decided_by))

    def note_other_autos(self) -> None:
        """Keys left to "auto" that nobody has written down yet. They have no value unless a block holds a default."""
        written = {decision.key for decision in self.decisions}
        for key in self._auto:
            if key not in written:
                value: Any = self._root
                for name in key.split("."):
                    value = getattr(value, name, None)
                shown = "its own default" if value is None or value == 0 else value
                self.decisions.append(Decision(key, shown, '"auto": default'))

    def _is_given(self, key: str) -> bool:
        block: object = self._root
        *path, name = key.split(".")
        for part in path:
            block = getattr(block, part)
        return isinstance(block, Block) and name in block.model_fields_set


def _check_data_types(root: RootBlock, compute_dtype: torch.dtype) -> None:
    name = "bf16" if compute_dtype is torch.bfloat16 else "fp32"
    for key in ("param_dtype", "buffer_dtype"):
        value = getattr(root.data_types, key)
        if value not in (None, name):
            reason = f"parameters and buffers get the compute dtype, which is {name}"
            cure = f'Set it to "{name}" or remove it; "bf16": {{"enabled": ...}} chooses the compute dtype'
            raise UnsupportedConfigError(f"data_types.{key}", value, reason, cure=cure)


def _check_update(root: RootBlock) -> None:
    if root.infinity.update == "in_backward" and root.gradient_clipping > 0:
        problem = f"gradient_clipping = {root.gradient_clipping} needs all gradients before the first update"
        cure = 'Set infinity.update to "auto", or gradient_clipping to 0'
        raise ConfigValueError("infinity.update", "in_backward", problem, cure=cure)


def _resolve_optimizer(block: OptimizerBlock | None) -> OptimizerSection | None:
    if block is None:
        return None
    params = {name: _plain(value) for name, value in (block.params or {}).items()}
    max_grad_norm = params.pop("max_grad_norm", None)
    if max_grad_norm:
        cure = f'Remove it and set "gradient_clipping": {max_grad_norm} at the top level'
        problem = "clipping is not the optimizer's business"
        raise ConfigValueError("optimizer.params.max_grad_norm", max_grad_norm, problem, cure=cure)
    if isinstance(params.get("betas"), list):
        params["betas"] = tuple(params["betas"])
    return OptimizerSection(block.type, params)


def _resolve_scheduler(block: SchedulerBlock | None, findings: Findings, book: _Book) -> SchedulerSection | None:
    if block is None:
        return None
    params = {name: _plain(value) for name, value in (block.params or {}).items()}
    known = schedule_parameters(block.type)
    if "scheduler.params.warmup_max_lr" in findings.auto:
        # "auto" is what Hugging Face's tools replace by the optimizer's rate.
        params["warmup_max_lr"] = None
        book.decisions.append(Decision("scheduler.params.warmup_max_lr", "the optimizer's lr", '"auto"'))
    for name in [name for name, is_required in known.items() if is_required]:
        key = f"scheduler.params.{name}"
        # Left to "auto" it is an error only where the schedule is built: the caller may bring a schedule along.
        if name not in params and key not in findings.auto:
            raise ConfigValueError(key, None, "it is missing", cure=f"{block.type} cannot do without it: add it")
    return SchedulerSection(block.type, params)


def _resolve_offload(name: str, block: OffloadBlock, book: _Book, check_storage: bool) -> OffloadSection:
    key = f"zero_optimization.{name}"
    book.note(f"{key}.device", block.device)
    if block.device != "nvme":
        return OffloadSection(block.device, ())
    paths = resolve_directories(block.nvme_path, key=f"{key}.nvme_path")
    if check_storage:
        check_directories(paths, key=f"{key}.nvme_path")
    book.note(f"{key}.nvme_path", ", ".join(map(str, paths)))
    return OffloadSection(block.device, paths)


def _resolve_io(aio: AioBlock, infinity: InfinityBlock, book: _Book) -> IOSection:
    request_bytes = -(-(aio.block_size or _REQUEST_BYTES) // _ALIGNMENT) * _ALIGNMENT
    # DeepSpeed's threads hand requests to the kernel and go on; ours wait in it, so that fewer than these leave a drive
    # idle. A file that says 1 repeats DeepSpeed's default.
    num_threads = max(_NUM_THREADS, aio.intra_op_parallelism or 0)
    max_inflight = (aio.queue_depth or _QUEUE_DEPTH) * num_threads
    book.note("aio.block_size", request_bytes)
    book.note("aio.intra_op_parallelism", num_threads)
    book.note("aio.queue_depth", f"{max_inflight} requests in flight")
    return IOSection(request_bytes, num_threads, max_inflight, infinity.io_deadline_seconds, infinity.direct_io)


def _resolve_infinity(block: InfinityBlock, book: _Book) -> InfinitySection:
    page_bytes = block.page_bytes
    if page_bytes is not None and page_bytes % _ALIGNMENT:
        nearest = -(-page_bytes // _ALIGNMENT) * _ALIGNMENT
        problem = f"must be a multiple of {_ALIGNMENT}, the unit in which drives are read"
        raise ConfigValueError("infinity.page_bytes", page_bytes, problem, cure=f"Take {nearest}")
    for name in ("host_memory_budget", "device_memory_budget", "page_bytes"):
        value = getattr(block, name)
        shown = "chosen at start" if value is None else value
        book.note(f"infinity.{name}", shown)
    book.note("infinity.update", block.update)
    book.note("infinity.schedule", block.schedule)
    return InfinitySection(
        host_memory_budget=block.host_memory_budget,
        device_memory_budget=block.device_memory_budget,
        page_bytes=page_bytes,
        prefetch=block.prefetch,
        units=block.units,
        strict=block.strict,
        update=block.update,
        schedule=block.schedule,
    )


def _plain(value: object) -> Any:
    """Numbers and flags that a YAML front end turned into text, as what they are."""
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
