"""An update stream over slow storage, with an optimizer whose results tell what it saw."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from infinity.device.compute import ComputeDevice, FlatBuffer
from infinity.gradients.main_gradients import GradientSource
from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.tiers.state_store import PagedStateStore
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import CHUNK_GRANULE, Chunk, ParameterSlice
from infinity.units.unit import Unit
from infinity.updates.chunk_updater import ChunkUpdater
from infinity.updates.job import ParameterState, UpdateJob
from infinity.updates.stream import UpdateStream
from swapper import StagingPool, Swapper, SwapperConfig
from swapper.backends.memory import MemoryBackend
from tests.latency import delayed
from tests.unit.stage import trainable_unit
from tests.waiting import wait_until

NUMEL = 3 * CHUNK_GRANULE
WAIT_SECONDS = 20


class Gradients(GradientSource):
    """Gradients in memory: the value of each parameter's, by slot index."""

    def __init__(self, unit: Unit, values: Mapping[int, float]) -> None:
        super().__init__([slot for slot in unit.layout.slots if slot.index in values], torch.float32)
        self._values = values
        self.num_released = 0

    def of_chunk(self, chunk: Chunk, slices: Sequence[ParameterSlice], scratch: torch.Tensor) -> torch.Tensor:
        for param_slice in slices:
            scratch[param_slice.offset : param_slice.offset + param_slice.numel] = self._values[param_slice.slot.index]
        return scratch

    def release(self) -> None:
        self.num_released += 1


class Summing:
    """An optimizer whose result tells what it saw: weight += lr * grad, and the state counts and sums.

    Attributes:
        gate: the update waits for it.
        fail_at: raise in the n-th piece from now.
    """

    mixes_elements = False

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at: int | None = None
        self.order: list[float] = []

    def update(
        self,
        group: dict[str, Any],
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, torch.Tensor] | None,
        scalars: dict[str, Any],
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if not self.gate.wait(WAIT_SECONDS):
            raise TimeoutError("the test forgot the gate")
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                raise ArithmeticError("the optimizer failed")
        self.order.append(float(grad[0]))
        if state is None:
            state = {"total": torch.zeros_like(weight)}
        state["total"].add_(grad)
        weight.add_(grad, alpha=group["lr"])
        return state, {"step": scalars.get("step", 0) + 1}


@dataclass
class SlowStream:
    """A stream over slow storage, so that a read that comes too early is there too early."""

    stream: UpdateStream
    updater: Summing
    records: PagedStateStore
    weights: WeightStore
    swapper: Swapper
    staging_pool: StagingPool
    units: list[Unit]
    states: dict[tuple[int, int], ParameterState]
    dtype: torch.dtype
    device: ComputeDevice

    def chunks(self, unit: Unit) -> Sequence[Chunk]:
        return unit.layout.chunks(CHUNK_GRANULE)

    def job(self, unit: Unit, values: Mapping[int, float], *, coefficient: float | None = None) -> UpdateJob:
        gradients = Gradients(unit, values)
        clip = None if coefficient is None else torch.tensor(coefficient)
        return UpdateJob(
            unit, self.chunks(unit), gradients, {index: {"lr": 1.0} for index in values}, clip, self.device.mark()
        )

    def stored_weights(self, unit: Unit) -> torch.Tensor:
        base = torch.zeros(unit.num_bytes, dtype=torch.uint8)
        self.swapper.read(unit.extent, base).wait()
        return unit.trainable_view(base).clone()

    def totals(self, unit: Unit, slot: int = 0) -> list[float]:
        """The distinct values of a parameter's state."""
        found: set[float] = set()
        for chunk in self.chunks(unit):
            lease = self.records.open(unit, chunk, is_blocking=True)
            lease.wait()
            for param_slice in chunk.slices:
                if param_slice.slot.index == slot:
                    total = lease.workspace.states["total"]
                    found |= set(total[param_slice.offset : param_slice.offset + param_slice.numel].tolist())
            lease.discard()
        return sorted(found)

    def flat(self, unit: Unit) -> FlatBuffer:
        flat = ComputeDevice().allocate_flat(unit.num_bytes)
        flat.tensor().zero_()
        return flat


@contextmanager
def slow_stream(
    dtype: torch.dtype,
    num_staging_buffers: int,
    device: ComputeDevice | None = None,
    *,
    main: MainWeight | None = None,
    num_workers: int = 1,
) -> Iterator[SlowStream]:
    """``main``: how main weights are kept; by default as a whole."""
    device = device or ComputeDevice()
    default = MainWeight.MODEL_WEIGHT if dtype == torch.float32 else MainWeight.FP32
    record_format = ChunkFormat(dtype, main or default)
    backend = delayed(MemoryBackend(1 << 20, 4), read_seconds=0.0, write_seconds=0.004)
    swapper = Swapper(backend, SwapperConfig(deadline_seconds=WAIT_SECONDS))
    staging_pool = StagingPool(
        record_format.workspace_bytes(CHUNK_GRANULE, 1), num_staging_buffers, deadline_seconds=WAIT_SECONDS
    )
    units = [trainable_unit(index, [(NUMEL - 200,), (90,)], dtype) for index in range(3)]
    records = PagedStateStore(swapper, staging_pool, record_format)
    weights = WeightStore(swapper, ComputeDevice())
    states = {}
    for unit in units:
        chunks = unit.layout.chunks(CHUNK_GRANULE)
        weights.allocate(unit)
        records.allocate(unit, chunks, ("total",))
        weights.write_all(unit, torch.zeros(unit.num_bytes, dtype=torch.uint8))
        for slot in unit.layout.slots:
            states[unit.index, slot.index] = ParameterState()
        for chunk in chunks:
            lease = records.open(unit, chunk, is_blocking=True)
            lease.wait()
            lease.workspace.record.zero_()
            lease.write_back([], main_only=True)
    updater = Summing()
    chunks = ChunkUpdater(updater, states, splits_main_weights=record_format.main is MainWeight.REMAINDER)
    stream = UpdateStream(records, weights, chunks, device, states, num_workers=num_workers)
    yield SlowStream(stream, updater, records, weights, swapper, staging_pool, units, states, dtype, device)
    updater.gate.set()
    stream.close()
    swapper.close()
    staging_pool.close()


def wait_for(job: UpdateJob) -> None:
    """`UpdateJob.wait` with an end: a hang has to fail here and not in the whole suite's timeout."""
    wait_until(job.done)
    job.wait()
