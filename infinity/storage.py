"""The tiers of one engine: swappers, arenas and pools, opened together and closed together.

Knows what the config and the placement ask for; must not know modules or when anything is used.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from infinity.config import InfinityConfig, IOSection
from infinity.device import ComputeDevice
from infinity.errors import BudgetTooSmallError, StorageError
from infinity.flat_pool import FlatPool
from infinity.placement import HOST_KEY, Placement, Request, UnitSize, predict
from infinity.plan import Plan
from infinity.records import PagedRecords, RecordStore, ResidentRecords, record_bytes
from infinity.trace import Trace
from infinity.traffic import Traffic
from infinity.weights import WeightStore
from swapper import StagingArena, Swapper, SwapperConfig, VolumeError

logger = logging.getLogger(__name__)
_FP32_BYTES = 4


class Storage:
    """Opens what the placement asks for. Nothing is written before all of it could be opened."""

    def __init__(
        self,
        config: InfinityConfig,
        device: ComputeDevice,
        placement: Placement,
        request: Request,
        sizes: Sequence[UnitSize],
    ) -> None:
        """
        Args:
            config: tiers, directories and I/O settings.
            device: the compute device.
            placement: the division of the budget.
            request: what the placement was asked, for predictions.
            sizes: all units.

        Raises:
            StorageError: a directory cannot be used, or is too small. Nothing is left behind.
        """
        self._config = config
        self._placement = placement
        self._request = request
        self._sizes = list(sizes)
        self._swappers: dict[tuple[str, tuple[Path, ...]], Swapper] = {}
        self._more: list[Swapper] = []
        self._arenas: list[StagingArena] = []
        self._predicted: tuple[tuple[tuple[int, ...], Traffic], Plan] | None = None
        weight_bytes = sum(size.weight_bytes for size in sizes)
        state_bytes = sum(record_bytes(s.trainable_numel, s.num_states, request.weight_itemsize) for s in sizes)
        self.gradient_bytes = sum(
            s.trainable_numel * _FP32_BYTES
            for index, s in enumerate(sizes)
            if index not in placement.gradients_in_memory
        )
        needed: dict[tuple[str, tuple[Path, ...]], int] = {}
        param_key = (config.offload_param.device, config.offload_param.nvme_paths)
        state_key = (config.offload_optimizer.device, config.offload_optimizer.nvme_paths)
        self._spill_key = next((key for key in (state_key, param_key) if key[0] == "nvme"), None)
        if param_key[0] != "none":
            needed[param_key] = needed.get(param_key, 0) + weight_bytes
        if state_key[0] != "none":
            needed[state_key] = needed.get(state_key, 0) + state_bytes
        if self._spill_key is not None:
            needed[self._spill_key] += self.gradient_bytes
        try:
            for key, num_bytes in needed.items():
                self._swappers[key] = self._open(key, num_bytes)
            self.weights, self.records = self._build(device, param_key, state_key)
            self.pool = FlatPool(device, placement.weights_bytes)
            self.gradient_pool = FlatPool(ComputeDevice(), placement.gradient_bytes)
        except BaseException:
            self._close_swappers()
            raise

    def _open(self, key: tuple[str, tuple[Path, ...]], num_bytes: int) -> Swapper:
        tier, directories = key
        settings = _swapper_config(self._config.io)
        capacity = max(num_bytes, 4096)
        if tier == "cpu":
            return Swapper.in_memory(capacity, settings)
        try:
            return Swapper.open(directories, capacity, settings)
        except VolumeError as error:
            names = ", ".join(map(str, directories))
            raise StorageError(
                names, f"cannot hold the states: {error}", cure="Choose another nvme_path, or give several as a list"
            ) from error

    def _build(
        self, device: ComputeDevice, param_key: tuple[str, tuple[Path, ...]], state_key: tuple[str, tuple[Path, ...]]
    ) -> tuple[WeightStore | None, RecordStore]:
        placement = self._placement
        deadline = self._config.io.deadline_seconds
        weights: WeightStore | None = None
        if param_key[0] != "none":
            arena = None
            if placement.num_upload_pages:
                arena = StagingArena(
                    placement.upload_page_bytes, placement.num_upload_pages, device.pin, deadline_seconds=deadline
                )
                self._arenas.append(arena)
            weights = WeightStore(self._swappers[param_key], device, arena)
        if state_key[0] == "none":
            return weights, ResidentRecords(device.torch_device, self._config.compute_dtype)
        arena = StagingArena(placement.page_bytes, placement.num_pages, device.pin, deadline_seconds=deadline)
        self._arenas.append(arena)
        return weights, PagedRecords(self._swappers[state_key], arena, self._config.compute_dtype)

    def spill_swapper(self) -> Swapper:
        """Where gradients are spilled.

        Raises:
            BudgetTooSmallError: there is no NVMe tier to spill to.
        """
        if self._spill_key is None:
            raise BudgetTooSmallError(
                HOST_KEY,
                budget_bytes=self._request.budget_bytes,
                minimum_bytes=self._request.budget_bytes + self.gradient_bytes,
                reason="All gradients have to wait in RAM for optimizer.step(), and no NVMe tier takes them",
            )
        return self._swappers[self._spill_key]

    def open_more(self, num_bytes: int) -> Swapper:
        """Open another volume in the directories to which gradients are spilled.

        Raises:
            BudgetTooSmallError: there is no NVMe tier.
            StorageError: there is no room.
        """
        self.spill_swapper()
        if self._spill_key is None:
            raise RuntimeError("there is a swapper for spilling, but it has no key")
        self._more.append(self._open(self._spill_key, num_bytes))
        return self._more[-1]

    def _all(self) -> list[Swapper]:
        return [*self._swappers.values(), *self._more]

    def counters(self) -> tuple[int, int]:
        """Bytes read and written so far in the NVMe tier."""
        on_drives = [swapper for key, swapper in self._swappers.items() if key[0] == "nvme"] + self._more
        found = [swapper.statistics() for swapper in on_drives]
        return sum(s.read_bytes for s in found), sum(s.write_bytes for s in found)

    def flush(self) -> None:
        """Wait for all writes."""
        for swapper in self._all():
            swapper.flush()

    def raise_pending(self) -> None:
        """Raise the first error of a request that nobody waited for."""
        for swapper in self._all():
            swapper.raise_pending()

    def states_bytes(self) -> dict[str, int]:
        """Bytes at rest per tier."""
        result = {"device": 0, "host": 0, "nvme": 0}
        names = {"none": "device", "cpu": "host", "nvme": "nvme"}
        result[names[self._request.param_tier]] += sum(s.weight_bytes for s in self._sizes)
        result[names[self._request.optimizer_tier]] += sum(
            record_bytes(s.trainable_numel, s.num_states, self._request.weight_itemsize) for s in self._sizes
        )
        if self._spill_key is not None:
            result["nvme"] += self.gradient_bytes
        return result

    def replan(self, plan: Plan, trace: Trace, traffic: Traffic) -> Plan:
        """``plan`` with the predictions that follow from the recorded trace and the order of the last step."""
        if self._predicted is None or self._predicted[0] != (trace.order, traffic):
            request = self._request
            if traffic.is_vertical:  # the trace is that of a whole step
                request = dataclasses.replace(request, num_micro_batches=1)
            prediction = predict(self._sizes, request, self._placement, trace.order, trace.backward_start)
            self._predicted = (
                (trace.order, traffic),
                dataclasses.replace(
                    plan,
                    predicted_read_bytes_per_step=prediction.read_bytes + traffic.extra_bytes,
                    predicted_write_bytes_per_step=prediction.write_bytes + traffic.extra_bytes,
                    traffic=traffic,
                ),
            )
        return self._predicted[1]

    def close(self) -> None:
        """Release files, threads and memory. Does not raise what failed writes had to say."""
        if self.weights is not None:
            self.weights.close()
        self._close_swappers()
        self.pool.close()
        self.gradient_pool.close()

    def _close_swappers(self) -> None:
        for swapper in self._all():
            try:
                swapper.close()
            except Exception:
                logger.warning("closing a swapper failed", exc_info=True)
        for arena in self._arenas:
            arena.close()


def _swapper_config(io: IOSection) -> SwapperConfig:
    return SwapperConfig(
        request_bytes=io.request_bytes,
        num_threads=io.num_threads,
        max_inflight=io.max_inflight,
        deadline_seconds=io.deadline_seconds,
        direct=io.direct,
    )
