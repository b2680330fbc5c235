"""The inputs of placement: sizes of the units, and what the config asks for. Pure arithmetic."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, PlainSerializer, PlainValidator
from torch import nn

from infinity.config import InfinityConfig
from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.numerics.state_format import StateFormat
from infinity.packed.stored_form import StoredForm
from infinity.plan.machine import Bandwidth
from infinity.units.partition import used_together
from infinity.units.shards import Shards
from infinity.units.unit import Unit
from swapper.wrappers.versions import VersionedBackend

FP32_BYTES = 4
# For plans that are read from a file: an unknown field comes from another version, and its meaning with it.
KNOWN_FIELDS_ONLY = ConfigDict(extra="forbid")
# fp32 tensors of a parameter's size that exist while an optimizer updates it whole: main weight, gradient, and update.
_TEMPORARIES = 3
_MOST_WORKERS = 8  # update workers, if the config does not say: so many saturate the memory of one socket
_WORKERS_FOR_UNKNOWN_DRIVES = 4
# Bytes that one worker reads and writes per second. Beside a GPU there are so many workers that a step's updates take
# half as long as its drives. More only make chunks smaller: 1B parameters in 2 GB beside an H100 took 3.0 s a step with
# 4 workers and 5.8 s with 8, at 8 GB/s.
_UPDATED_BYTES_PER_SECOND = 10e9
_THREADS_BESIDE_A_GPU = 2  # cores that stay free for the training thread and autograd's


@dataclass(frozen=True)
class UnitSize:
    """The size of a unit: bytes of its flat buffer, elements of its trainable segment (padding included)."""

    name: str
    weight_bytes: int
    trainable_numel: int
    num_states: int
    """Number of per-element optimizer states: 2 for AdamW."""
    is_all_trainable: bool
    layer: tuple[str, int] | None = None
    """Name and bytes of a matrix that is more than half of the unit; None if there is none."""
    shard_numel: int | None = None
    """Trainable elements whose main weights and states this process keeps; None: all."""
    weight_shard_bytes: int | None = None
    """Bytes of the weights that this process stores in stage 3; None: all."""
    is_routed: bool = False
    """Whether it is an expert that a step leaves alone if no token goes to it."""
    packed_bytes: int | None = None
    """Bytes of the weights as stored, if some of them are packed; otherwise None."""
    codes_bytes: int = 0
    """Those of `packed_bytes` that are codes and scales, not plain weights."""
    keeps_codes: bool = False
    """Whether these rest in GPU memory."""

    @property
    def stored_weight_bytes(self) -> int:
        """Bytes of the weights as this process stores them outside of a GPU, and reads them to fetch the unit."""
        if self.weight_shard_bytes is not None:
            return self.weight_shard_bytes
        return self.weight_bytes if self.packed_bytes is None else self.packed_bytes - self.codes_on_device

    @property
    def codes_on_device(self) -> int:
        """Bytes of packed weights that rest in GPU memory."""
        return self.codes_bytes if self.keeps_codes else 0

    @property
    def written_numel(self) -> int:
        """Elements of the trainable segment whose new weights this process writes in a step."""
        return self.trainable_numel if self.weight_shard_bytes is None else self.state_numel

    @property
    def state_numel(self) -> int:
        """Elements of the trainable segment whose main weights and states this process keeps."""
        return self.trainable_numel if self.shard_numel is None else self.shard_numel

    @classmethod
    def of(
        cls, unit: Unit, num_states: int, shards: Shards, *, divides_weights: bool = False, is_routed: bool = False
    ) -> UnitSize:
        """The size of ``unit``, with ``num_states`` per-element states."""
        layout, stored = unit.layout, StoredForm(unit.layout)
        # For `layer`, for which an error suggests tiles: only linear layers and embeddings can be tiled.
        matrices = [slot for slot in layout.slots if len(slot.spec.shape) == 2]
        largest = max(((s.numel * s.spec.dtype.itemsize, s.spec.fqn) for s in matrices), default=(0, ""))
        start, stop = shards.span(unit)
        of_weights = sum(stop - start for start, stop in shards.weight_spans(unit)) if divides_weights else None
        return cls(
            unit.name,
            layout.num_bytes,
            layout.trainable_numel,
            num_states,
            is_all_trainable=all(segment.is_trainable for segment in layout.segments),
            layer=(largest[1], largest[0]) if 2 * largest[0] > layout.num_bytes else None,
            shard_numel=stop - start,
            weight_shard_bytes=of_weights,
            is_routed=is_routed,
            packed_bytes=stored.num_bytes if stored.packed_bytes else None,
            codes_bytes=stored.packed_bytes,
        )


# How a ChunkFormat is written to a file: ["bfloat16", "REMAINDER", "fp32"].
def _plain_format(form: ChunkFormat) -> list[str]:
    return [str(form.weight_dtype).removeprefix("torch."), form.main.name, form.states.value]


def _format_of(plain: Any) -> ChunkFormat:
    dtype, main, states = plain
    if not isinstance(weight_dtype := getattr(torch, dtype), torch.dtype):  # the file could name anything in torch
        raise ValueError(f"no dtype: {dtype!r}")
    return ChunkFormat(weight_dtype, MainWeight[main], StateFormat(states))


@dataclass(frozen=True)
class Request:
    """What the config asks for."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    budget_bytes: int
    device_budget_bytes: int | None
    """None: free memory of the GPU decides; if that is unknown, there is no limit."""
    param_tier: str
    optimizer_tier: str
    record_format: Annotated[ChunkFormat, PlainValidator(_format_of), PlainSerializer(_plain_format)]
    uses_host_memory: bool
    """Whether the CPU computes, so that flat buffers are host memory. Otherwise a GPU does, in its own memory."""
    update: str
    """When units are updated: "in_backward", "deferred" or "step"."""
    num_micro_batches: int
    staging_buffer_bytes: int | None
    prefetches: bool
    can_spill: bool
    """Whether there is an NVMe tier for gradients."""
    gradient_itemsize: int = FP32_BYTES
    """Bytes per element of a single gradient that waits for the step."""
    rounds_gradients: bool = False
    """Whether sums of gradients have that size too; otherwise they are fp32."""
    used_together: tuple[frozenset[int], ...] = ()
    """For each block, the units of its parameters."""
    keeps_in_memory: bool = True
    """Whether spare memory keeps weights and states off the drives."""

    device_free_bytes: int | None = None
    """Free memory of a GPU before the engine uses any."""
    activations: str = "memory"
    """Where activations wait for backward: outside of the budget ("memory"), within it ("cpu"), or spilled ("nvme")."""
    update_workers: int = 1
    """Threads that run updates, each on a chunk of its own."""
    updates_whole_parameters: bool = False
    """Whether the optimizer needs whole parameters (LAMB, LARS, Muon): then a unit is one chunk."""
    is_alone: bool = True
    """Whether no other process averages gradients with this one."""
    num_versions: int = 0
    """Versions of the states for which a durable run has room; 0: the run is not durable."""

    @classmethod
    def of(
        cls,
        config: InfinityConfig,
        model: nn.Module,
        units: Sequence[Unit],
        *,
        budget_bytes: int,
        uses_host_memory: bool,
        device_free_bytes: int | None = None,
        runs_in_parallel: bool = True,
        updates_whole_parameters: bool = False,
        is_alone: bool = True,
        bandwidth: Bandwidth | None = None,
    ) -> Request:
        """The request of ``config``.

        ``runs_in_parallel``: whether the optimizer may update several slices at a time. For others see the fields.
        """
        tiers = (config.offload_param.device, config.offload_optimizer.device)
        unit_of = {id(parameter): unit.index for unit in units for parameter in unit.parameters}
        return cls(
            budget_bytes=budget_bytes,
            device_budget_bytes=config.infinity.device_memory_budget,
            device_free_bytes=device_free_bytes,
            param_tier=tiers[0],
            optimizer_tier=tiers[1],
            record_format=ChunkFormat.of(
                config.compute_dtype,
                has_remainder=config.infinity.main_weights == "remainder",
                states=StateFormat(config.infinity.state_dtype),
            ),
            uses_host_memory=uses_host_memory,
            update=config.infinity.update,
            num_micro_batches=config.most_micro_batches,
            staging_buffer_bytes=config.infinity.staging_buffer_bytes,
            prefetches=config.infinity.prefetch,
            can_spill="nvme" in tiers,
            gradient_itemsize=2 if config.infinity.gradient_dtype == "bf16" else FP32_BYTES,
            rounds_gradients=config.infinity.rounds_gradients,
            used_together=used_together(model, config.infinity.units, unit_of),
            keeps_in_memory=config.infinity.keep_in_memory,
            activations=config.infinity.activations,
            updates_whole_parameters=updates_whole_parameters,
            is_alone=is_alone,  # if no other process averages gradients, they may stay in GPU memory
            num_versions=0 if config.infinity.durable is None else 1 + config.infinity.durable.most_kept,
            update_workers=_update_workers(config, uses_host_memory, bandwidth) if runs_in_parallel else 1,
        )

    @property
    def updates_in_backward(self) -> bool:
        """Whether a unit is updated as soon as its gradients are complete."""
        return self.update == "in_backward"

    @property
    def scratch_itemsize(self) -> int:
        """Bytes per element of a sum of gradients, and of the scratch in which it is made."""
        return self.gradient_itemsize if self.rounds_gradients else FP32_BYTES

    @property
    def gradient_moves(self) -> int:
        """How often a step reads, and how often it writes, the gradients of a unit that are spilled."""
        # With 4 micro-batches and updates in the step: written after each, and read for the next sum or the update: 4.
        # With updates in backward, the last sum goes straight into the update: 3.
        return self.num_micro_batches - 1 if self.updates_in_backward else self.num_micro_batches

    @property
    def keeps_all_weights(self) -> bool:
        """Whether the config keeps all weights in memory: on the GPU ("none") or in host memory ("cpu")."""
        return self.param_tier != "nvme"

    @property
    def keeps_all_records(self) -> bool:
        """Whether the config keeps all optimizer state in host memory."""
        return self.optimizer_tier == "cpu" or (self.optimizer_tier == "none" and self.uses_host_memory)

    @property
    def records_on_device(self) -> bool:
        """Whether optimizer state is stored on a GPU, and updated there."""
        return self.optimizer_tier == "none" and not self.uses_host_memory

    def record_bytes(self, unit: UnitSize) -> int:
        """Bytes of a unit's optimizer state as this process stores it."""
        return self.record_format.record_bytes(unit.state_numel, unit.num_states)

    def trainable_bytes(self, unit: UnitSize) -> int:
        """Bytes of a unit's weights that this process writes in a step."""
        return unit.written_numel * self.record_format.weight_dtype.itemsize

    def map_bytes(self, units: Iterable[UnitSize]) -> int:
        """Bytes of the map from blocks to their versions on the drives, of a durable run."""
        if not self.num_versions:
            return 0
        stored = sum(unit.stored_weight_bytes + self.record_bytes(unit) for unit in units)
        return VersionedBackend.memory_bytes(stored, stored * self.num_versions)

    def update_bytes(self, units: Iterable[UnitSize]) -> int:
        """Bytes of an optimizer's temporaries for a whole parameter; for a slice they are negligible."""
        largest = max((unit.trainable_numel for unit in units), default=0)
        return _TEMPORARIES * FP32_BYTES * largest if self.updates_whole_parameters else 0

    def shards_in_memory(self, units: Sequence[UnitSize]) -> int | None:
        """Bytes of this process's shards of the weights, if the CPU computes, and shards of all units stay in host
        memory.

        None if weights are not divided, or are on drives, or a GPU computes.
        """
        if not self.uses_host_memory or not self.keeps_all_weights or not divides_weights(units):
            return None
        return sum(unit.weight_shard_bytes or 0 for unit in units)

    def saved_by_weights(self, unit: UnitSize) -> int:
        """Bytes that a step does not move if the unit's weights stay in memory."""
        # Each micro-batch reads them in forward and in backward; the step writes them once. For 16 MiB of bf16 and one
        # micro-batch: 2 * 16 + 16 = 48 MiB.
        return 2 * self.num_micro_batches * unit.stored_weight_bytes + self.trainable_bytes(unit)


def _update_workers(config: InfinityConfig, uses_host_memory: bool, bandwidth: Bandwidth | None) -> int:
    tier = config.offload_optimizer.device
    if tier == "none" and not uses_host_memory:
        return 1  # updates run on the GPU, one chunk after the other
    if config.infinity.update_workers is not None:
        return config.infinity.update_workers
    num_cores = len(os.sched_getaffinity(0))
    if not uses_host_memory:
        most = _MOST_WORKERS
        if tier == "nvme":
            most = _WORKERS_FOR_UNKNOWN_DRIVES
            if bandwidth is not None:
                # Drives of 8 GB/s: 16 / 10 rounded up, 2 workers. Half of their time is then spent waiting.
                wanted = math.ceil(2 * bandwidth.mixed_bytes_per_second / _UPDATED_BYTES_PER_SECOND)
                most = min(wanted, _MOST_WORKERS)
        return min(max(num_cores - _THREADS_BESIDE_A_GPU, 1), most)
    # On a CPU the model's own threads come first. Workers get the cores that are left, at least one; in a step, where
    # the model computes nothing, they get all.
    num_computing = torch.get_num_threads()
    num_idle = num_computing if config.infinity.update == "step" else 1
    return min(max(num_cores - num_computing, num_idle), _MOST_WORKERS)


def guessed_order(num_units: int, *, is_trained: bool = True) -> list[int]:
    """The order of units until a micro-batch is recorded: forward in order of registration, then backward in
    reverse."""
    forward = list(range(num_units))
    return [*forward, *reversed(forward)] if is_trained else forward


def has_shards(units: Iterable[UnitSize]) -> bool:
    """Whether main weights and states are divided between processes (stage 1 and higher)."""
    return any(unit.state_numel < unit.trainable_numel for unit in units)


def divides_weights(units: Iterable[UnitSize]) -> bool:
    """Whether weights that are not resident are divided between processes (stage 3)."""
    return any(unit.weight_shard_bytes is not None for unit in units)


def needed_together(units: Sequence[UnitSize], request: Request, moving: Iterable[int]) -> int:
    """Bytes of flat buffers that the ``moving`` units need at once, at the least."""
    # Two units: one computes, and the next one is fetched. If a block has shared weights in other units, all of them
    # and the next unit: units of 100, 60 and 10, of which a block uses the last two, need max(100 + 60, 60 + 10 + 100)
    # = 170.
    moves = set(moving)
    largest_first = sorted(moves, key=lambda index: -units[index].weight_bytes)
    needed = sum(units[index].weight_bytes for index in largest_first[:2])
    for together in request.used_together:
        if len(inside := together & moves) > 1:
            other = next((units[index].weight_bytes for index in largest_first if index not in together), 0)
            needed = max(needed, sum(units[index].weight_bytes for index in inside) + other)
    return needed


@functools.lru_cache(maxsize=8)
def spread(count: int) -> Sequence[int]:
    """``range(count)`` in an order in which every prefix is spread evenly over the range."""
    # By reversed bits: 0..7 becomes 0 4 2 6 1 5 3 7. The first two are far apart, the first four are every second one.
    num_bits = max(count - 1, 1).bit_length()
    return tuple(sorted(range(count), key=lambda index: int(f"{index:0{num_bits}b}"[::-1], 2)))
