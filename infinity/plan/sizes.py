"""What placement has to know: the sizes of the units, and what the config asks for. Pure arithmetic."""

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
from infinity.units.shards import NUM_SERVED, Shards
from infinity.units.unit import Unit
from swapper.wrappers.versions import VersionedBackend

FP32_BYTES = 4
KNOWN_FIELDS_ONLY = ConfigDict(extra="forbid")
"""Of what is read from a file: a field that is not known comes from another version."""
_TEMPORARIES = 3
"""Tensors of a parameter's size in fp32, while that is updated: its main weight and its gradient joined, and its update."""
_MOST_WORKERS = 8
"""Unless more are asked for: so many saturate the memory of a socket."""
_WORKERS_FOR_UNKNOWN_DRIVES = 4
_UPDATED_BYTES_PER_SECOND = 10e9
"""Read and written by one worker. Beside a GPU there are enough that a step's updates take half as long as its drives: more
only make chunks smaller. 1B parameters in 2 GB beside an H100 took 3.0 s a step with 4 and 5.8 s with 8, at 8 GB/s."""
_THREADS_BESIDE_A_GPU = 2
"""The one that trains, and autograd's."""


@dataclass(frozen=True)
class UnitSize:
    """What placement has to know of a unit. Bytes of its flat buffer, elements of its trainable segment (padding included)."""

    name: str
    weight_bytes: int
    trainable_numel: int
    num_states: int
    """Per-element optimizer states."""
    is_all_trainable: bool
    layer: tuple[str, int] | None = None
    """Name and bytes of the matrix that is most of it; None if none is."""
    shard_numel: int | None = None
    """Of how many trainable elements this process keeps main weights and states; None: of all."""
    weight_shard_bytes: int | None = None
    """Of how many bytes of its weights this process has them where they do not stay in memory; None: of all."""
    is_routed: bool = False
    """Whether only some micro-batches need it, and nothing else: an expert whose weights no step changes without a token."""
    packed_bytes: int | None = None
    """Bytes of its weights where they do not stay in memory, if some of them are packed there."""

    @property
    def stored_weight_bytes(self) -> int:
        """Bytes of its weights where they do not stay in memory: what this process keeps, and reads to fetch the unit."""
        if self.weight_shard_bytes is not None:
            return self.weight_shard_bytes
        return self.weight_bytes if self.packed_bytes is None else self.packed_bytes

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
        """The size of a unit with so many per-element states, of which this process has its shard."""
        layout, stored = unit.layout, StoredForm(unit.layout)
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
        )


def _plain_format(form: ChunkFormat) -> list[str]:
    return [str(form.weight_dtype).removeprefix("torch."), form.main.name, form.states.value]


def _format_of(plain: Any) -> ChunkFormat:
    dtype, main, states = plain
    if not isinstance(weight_dtype := getattr(torch, dtype), torch.dtype):
        raise ValueError(f"no dtype: {dtype!r}")
    return ChunkFormat(weight_dtype, MainWeight[main], StateFormat(states))


@dataclass(frozen=True)
class Request:
    """What the config asks for."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    budget_bytes: int
    device_budget_bytes: int | None
    """None: what the device has free decides, and where that is not known nothing does."""
    param_tier: str
    optimizer_tier: str
    record_format: Annotated[ChunkFormat, PlainValidator(_format_of), PlainSerializer(_plain_format)]
    uses_host_memory: bool
    update: str
    """When units are updated: "in_backward", "deferred" or "step"."""
    num_micro_batches: int
    staging_buffer_bytes: int | None
    prefetches: bool
    can_spill: bool
    """Whether there is an NVMe tier that gradients could be spilled to."""
    gradient_itemsize: int = FP32_BYTES
    """Bytes per element of a gradient that waits."""
    rounds_gradients: bool = False
    """Whether sums of gradients keep that size; otherwise they are fp32."""
    used_together: tuple[frozenset[int], ...] = ()
    """For each block, the units in which its parameters lie."""
    keeps_in_memory: bool = True
    """Whether what the budgets leave is spent on keeping weights and states off the drives."""

    device_free_bytes: int | None = None
    """Free memory of a device that has its own, before anything of the engine's is there."""
    activations: str = "memory"
    """Where what autograd saves waits: beside the budget ("memory"), within it ("cpu"), or on NVMe beyond its share."""
    update_workers: int = 1
    """Threads that run updates, each of which has a chunk in hand."""
    updates_whole_parameters: bool = False
    """Whether no parameter may be cut: then each unit is updated at once."""
    is_alone: bool = True
    """Whether no other process averages gradients with this one."""
    num_versions: int = 0
    """Of what is stored, for as many a durable run has room; 0: the run is not durable."""

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
        """What ``config`` asks for, on a device that does or does not compute in host memory, beside such drives.

        ``runs_in_parallel``, ``updates_whole_parameters``: whether the optimizer may update several slices at a time, and
        whether it can't update a slice at all. ``is_alone``: no other process averages gradients with this one.
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
            is_alone=is_alone,
            num_versions=0 if config.infinity.durable is None else 1 + config.infinity.durable.most_kept,
            update_workers=_update_workers(config, uses_host_memory, bandwidth) if runs_in_parallel else 1,
        )

    @property
    def updates_in_backward(self) -> bool:
        """Whether a unit is updated as soon as its gradients are complete."""
        return self.update == "in_backward"

    @property
    def scratch_itemsize(self) -> int:
        """Bytes per element of a sum of gradients."""
        return self.gradient_itemsize if self.rounds_gradients else FP32_BYTES

    @property
    def gradient_moves(self) -> int:
        """How often a step reads, and how often it writes, the gradients of a unit that are spilled."""
        # In backward, the last micro-batch's sum goes into the update without another detour.
        return self.num_micro_batches - 1 if self.updates_in_backward else self.num_micro_batches

    @property
    def keeps_all_weights(self) -> bool:
        """Whether the config wants all weights in memory, on the device or beside it."""
        return self.param_tier != "nvme"

    @property
    def keeps_all_records(self) -> bool:
        """Whether the config wants all optimizer state in host memory."""
        return self.optimizer_tier == "cpu" or (self.optimizer_tier == "none" and self.uses_host_memory)

    @property
    def records_on_device(self) -> bool:
        """Whether optimizer state rests on a device with a memory of its own, and is updated there."""
        return self.optimizer_tier == "none" and not self.uses_host_memory

    def record_bytes(self, unit: UnitSize) -> int:
        """Bytes of a unit's optimizer state as this process stores it."""
        return self.record_format.record_bytes(unit.state_numel, unit.num_states)

    def trainable_bytes(self, unit: UnitSize) -> int:
        """Bytes of a unit's weights that this process writes in a step."""
        return unit.written_numel * self.record_format.weight_dtype.itemsize

    def map_bytes(self, units: Iterable[UnitSize]) -> int:
        """Bytes of the map that says where each version of a durable run's states lies."""
        if not self.num_versions:
            return 0
        stored = sum(unit.stored_weight_bytes + self.record_bytes(unit) for unit in units)
        return VersionedBackend.memory_bytes(stored, stored * self.num_versions)

    def serving_bytes(self, units: Iterable[UnitSize]) -> int:
        """Bytes of the memory through which shards of weights go to other processes."""
        return NUM_SERVED * max((unit.weight_shard_bytes or 0 for unit in units), default=0)

    def update_bytes(self, units: Iterable[UnitSize]) -> int:
        """Bytes of what an optimizer makes of a whole parameter besides states; of a slice it is little."""
        largest = max((unit.trainable_numel for unit in units), default=0)
        return _TEMPORARIES * FP32_BYTES * largest if self.updates_whole_parameters else 0

    def shards_in_memory(self, units: Sequence[UnitSize]) -> int | None:
        """Bytes of this process's shard of the weights, where all of them rest in the memory in which the model computes.

        None where weights are not divided, or that is a device's.
        """
        if not self.uses_host_memory or not self.keeps_all_weights or not divides_weights(units):
            return None
        return sum(unit.weight_shard_bytes or 0 for unit in units)

    def saved_by_weights(self, unit: UnitSize) -> int:
        """Bytes that a step does not move if the unit's weights stay in memory: they are read in each pass, and written."""
        return 2 * self.num_micro_batches * unit.stored_weight_bytes + self.trainable_bytes(unit)


def _update_workers(config: InfinityConfig, uses_host_memory: bool, bandwidth: Bandwidth | None) -> int:
    tier = config.offload_optimizer.device
    if tier == "none" and not uses_host_memory:
        return 1
    if config.infinity.update_workers is not None:
        return config.infinity.update_workers
    num_cores = len(os.sched_getaffinity(0))
    if not uses_host_memory:
        most = _MOST_WORKERS
        if tier == "nvme":
            most = _WORKERS_FOR_UNKNOWN_DRIVES
            if bandwidth is not None:
                wanted = math.ceil(2 * bandwidth.mixed_bytes_per_second / _UPDATED_BYTES_PER_SECOND)
                most = min(wanted, _MOST_WORKERS)
        return min(max(num_cores - _THREADS_BESIDE_A_GPU, 1), most)
    num_computing = torch.get_num_threads()
    num_idle = num_computing if config.infinity.update == "step" else 1  # in the step nothing is computed beside
    return min(max(num_cores - num_computing, num_idle), _MOST_WORKERS)


def guessed_order(num_units: int, *, is_trained: bool = True) -> list[int]:
    """Before the first micro-batch is recorded: forward in the order of registration, backward (if any) in reverse."""
    forward = list(range(num_units))
    return [*forward, *reversed(forward)] if is_trained else forward


def has_shards(units: Iterable[UnitSize]) -> bool:
    """Whether this process keeps main weights and states of a part alone, and others of the rest."""
    return any(unit.state_numel < unit.trainable_numel for unit in units)


def divides_weights(units: Iterable[UnitSize]) -> bool:
    """Whether this process keeps its shard alone of weights that do not stay in memory."""
    return any(unit.weight_shard_bytes is not None for unit in units)


def needed_together(units: Sequence[UnitSize], request: Request, moving: Iterable[int]) -> int:
    """Bytes that units which come and go need at once: the two largest, or those that a block uses and the largest other."""
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
    """``range(count)`` in an order whose every beginning is spread evenly over it."""
    num_bits = max(count - 1, 1).bit_length()
    return tuple(sorted(range(count), key=lambda index: int(f"{index:0{num_bits}b}"[::-1], 2)))
