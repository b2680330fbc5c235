"""What the update of a chunk costs in Python: calls of the packages, in all threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.device.compute import ComputeDevice
from infinity.gradients.main_gradients import GradientBuffer, MemoryGradients
from infinity.numerics.chunk_format import ChunkFormat
from infinity.optim.fused_adam import FusedAdam
from infinity.optim.slice_updater import SliceUpdater
from infinity.optim.wrapped_optimizer import wrap_optimizer
from infinity.tiers.state_store import PagedStateStore
from infinity.tiers.weight_store import WeightStore
from infinity.updates.chunk_updater import ChunkUpdater
from infinity.updates.job import ParameterState, UpdateJob
from infinity.updates.stream import UpdateStream
from swapper import StagingPool, Swapper, SwapperConfig
from tests.calls import call_counter
from tests.unit.stage import trainable_unit

_CHUNK_NUMEL = 1 << 14
_NUM_CHUNKS = (10, 20)
_NUM_BUFFERS = 8
_NAMES = ("exp_avg", "exp_avg_sq")
_WAITS = {"Handle.wait", "IOScheduler.sleep", "sleep", "Bell.wait"}
"""Who is called if something is not there yet, which depends on the machine."""


class _Rig:
    """One unit whose states are on a drive, and what updates it."""

    def __init__(
        self, swapper: Swapper, num_chunks: int, shapes: list[tuple[int]], dtype: torch.dtype, *, is_resident: bool
    ) -> None:
        self.swapper = swapper
        self.device = ComputeDevice()
        form = ChunkFormat.of(dtype, has_remainder=True)
        self.unit = trainable_unit(0, shapes * num_chunks, dtype)
        self.chunks = self.unit.layout.chunks(_CHUNK_NUMEL)
        assert {len(chunk.slices) for chunk in self.chunks} == {len(shapes)} and len(self.chunks) == num_chunks
        self.staging_pool = StagingPool(form.workspace_bytes(_CHUNK_NUMEL, 2), _NUM_BUFFERS)
        self.records = PagedStateStore(swapper, self.staging_pool, form)
        self.records.allocate(self.unit, self.chunks, _NAMES)
        self.weights = WeightStore(swapper, self.device)
        self.weights.allocate(self.unit)
        zeros = torch.zeros(self.unit.num_bytes, dtype=torch.uint8)
        self.weights.write_all(self.unit, zeros)
        if is_resident:
            flat = self.device.allocate_flat(self.unit.num_bytes)
            flat.tensor().zero_()
            self.unit.adopt(flat)
        parameter = nn.Parameter(torch.zeros(8))
        optimizer = wrap_optimizer(torch.optim.AdamW([parameter], fused=True), [("weight", parameter)], "cpu")
        fused = FusedAdam.of(optimizer, torch.device("cpu"), has_remainder=dtype == torch.bfloat16)
        if fused is None:
            pytest.skip("there is no kernel for this processor")
        self.group: dict[str, Any] = optimizer.read().values[0]
        states = {(0, slot.index): ParameterState() for slot in self.unit.layout.slots}
        updater = ChunkUpdater(
            SliceUpdater(optimizer), states, fused=fused, splits_main_weights=dtype == torch.bfloat16
        )
        self.stream = UpdateStream(self.records, self.weights, updater, self.device, states)
        self.gradients = GradientBuffer(self.unit, self.device.allocate_flat(self.unit.num_bytes), dtype)
        self.gradients.values.fill_(1)

    def update(self) -> None:
        slots = self.unit.layout.slots
        groups = {slot.index: self.group for slot in slots}
        source = MemoryGradients(self.gradients, slots)
        job = UpdateJob(self.unit, self.chunks, source, groups, None, self.device.mark())
        self.stream.submit(job)
        self.stream.drain()


@contextmanager
def _rig(
    directory: Path, num_chunks: int, shapes: list[tuple[int]], dtype: torch.dtype, *, is_resident: bool
) -> Iterator[_Rig]:
    directory.mkdir()
    with Swapper.open(directory, 64 << 20, SwapperConfig(backend="threads")) as swapper:
        rig = _Rig(swapper, num_chunks, shapes, dtype, is_resident=is_resident)
        yield rig
        rig.stream.close()
        swapper.flush()
        rig.records.close()
        rig.staging_pool.close()


@pytest.mark.parametrize("is_resident", [True, False], ids=["resident", "paged out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "shapes", [[(_CHUNK_NUMEL,)], [(64,)] * 256, [(60,)] * 256], ids=["1 piece", "256 pieces", "256 odd pieces"]
)
def test_one_more_chunk_takes_few_calls(
    shapes: list[tuple[int]], dtype: torch.dtype, is_resident: bool, tmp_path: Path
) -> None:
    least: list[int] = []
    for num_chunks in _NUM_CHUNKS:
        with call_counter() as counter:
            with _rig(tmp_path / str(num_chunks), num_chunks, shapes, dtype, is_resident=is_resident) as rig:
                found = []
                for number in range(10):
                    with counter.counting():
                        rig.update()
                        rig.swapper.flush()
                    if number > 1:  # the first ones compile the kernel and lay the chunks out
                        found.append(sum(num for name, num in counter.by_function.items() if name not in _WAITS))
            least.append(min(found))
    # Weights that are paged out are read as well. A worker of a busy machine may wait for a read once more: so the least of 8.
    most = 40 if is_resident else 48
    if shapes[0] == (60,):  # their last elements go to torch: one call, and copies there and back
        most += 20
    assert least[1] - least[0] <= most * (_NUM_CHUNKS[1] - _NUM_CHUNKS[0]), least
