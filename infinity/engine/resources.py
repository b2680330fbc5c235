"""The files and memory of one engine: swappers, staging pools, flat pools. Opened together and closed together."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.device.compute import ComputeDevice
from infinity.device.flat_pool import FlatPool
from infinity.distributed.collective_thread import CollectiveThread
from infinity.engine.planned import Planned
from infinity.errors import BudgetTooSmallError, EngineClosedError, StorageError
from infinity.gradients.main_gradients import Arrivals
from infinity.machine.here import room_bytes
from infinity.metrics.reporter import DriveCounters
from infinity.plan.placement import HOST_KEY
from infinity.plan.volumes import TierKey, spilled_bytes
from infinity.tiers.divided_weights import DividedWeights
from infinity.tiers.state_store import PagedStateStore, ResidentStateStore, StateStore
from infinity.tiers.user_copies import PutAside
from infinity.tiers.weight_store import WeightStore
from swapper import BusyTimes, RunDirectory, StagingPool, Swapper, TransferRecord, Versions
from swapper.errors import BackendUnavailableError, VolumeError, VolumeTooSmallError, limit_cure
from swapper.sync import switching
from swapper.volumes.directory import Directory

logger = logging.getLogger(__name__)

_IN_MEMORY: TierKey = ("shards", ())  # of the swapper that serves other ranks from host memory


@dataclass(eq=False)
class EngineResources:
    """Opens all files and memory that the placement asks for. Nothing is written before all of it is open.

    Raises:
        StorageError: a directory cannot be used, or is too small. Nothing is left behind.
    """

    _plan: Planned
    device: ComputeDevice
    _run: RunDirectory | None
    """Directory of the durable run; closed with the rest."""
    _gathers: CollectiveThread | None
    """The thread that gathers weights; None: they are not divided."""
    is_closed = False
    versions: Versions | None = None
    """The commits of a durable run; None without one."""
    _upload_pool: StagingPool | None = None
    """Through which weights go to the device."""

    def __post_init__(self) -> None:
        plan, placement = self._plan, self._plan.placement
        self._swappers: dict[TierKey, Swapper] = {}
        self._more: list[Swapper] = []
        self._staging_pools: list[StagingPool] = []
        self._busy = BusyTimes()
        self._volumes = plan.volumes(placement)
        # Other ranks fetch shards through a swapper. Those in host memory need one as well, which moves bytes without a
        # drive. It has 4096 bytes at least, as a swapper cannot be empty.
        if self._gathers is not None and placement.hosted_units:
            num_bytes = sum(plan.sizes[index].stored_weight_bytes for index in placement.hosted_units) or 4096
            self._swappers[_IN_MEMORY] = Swapper.in_memory(num_bytes, plan.config.io)
        try:
            self._check_room()
            for key, num_bytes in self._volumes.num_bytes.items():
                self._swappers[key] = self._open(key, num_bytes)
            self.weights, self.records = self._build()
            # Capacities from the placement, for units' weights, for gradients, and for gradients on their way from a
            # GPU. Who finds a pool full evicts a unit, spills gradients, or waits for the first arrival.
            self.pool = FlatPool(self.device, placement.weights_bytes)
            gradients_on = self.device if placement.gradients_on_device else ComputeDevice()
            self.gradient_pool = FlatPool(gradients_on, placement.gradient_bytes)
            self.arrivals = Arrivals(self.device, placement.landing_bytes)
        except BaseException:
            self._close_swappers()
            raise
        switching.acquire(id(self))  # see [Note: switch interval] in swapper.sync.switching

    def _check_room(self) -> None:
        """Check the space for all volumes together, because they may be on one drive."""
        directories = tuple(dict.fromkeys(each for _, of_key in self._volumes.num_bytes for each in of_key))
        try:
            problem = self._volumes.problem(room_bytes) if len(self._volumes.num_bytes) > 1 else None
            beside = None if problem else self._volumes.checkpoint_problem(room_bytes)
        except VolumeError:  # opening the volume raises an error that says more
            return
        if problem is not None:
            cure = "Choose another nvme_path or durable_path, or give several as a list"
            raise StorageError(
                _names(directories), f"cannot hold the states and what is stored with them: {problem}", cure=cure
            )
        if beside is not None:
            logger.warning("%s: save elsewhere", beside)

    def _open(self, key: TierKey, num_bytes: int) -> Swapper:
        tier, directories = key
        settings = self._plan.config.io
        capacity = max(num_bytes, 4096)  # even if nothing is to rest there: a directory that cannot be used is told
        try:
            if tier == "durable" and self._run is not None:
                self.versions = Versions.open(
                    self._run, directories, capacity, self._volumes.durable_bytes, settings, busy=self._busy
                )
                return self.versions.swapper
            return Swapper.open(directories, capacity, settings, busy=self._busy)
        except VolumeError as error:
            key_name = "durable_path" if tier == "durable" else "nvme_path"
            cure = f"Choose another {key_name}, or give several as a list"
            # EMFILE and the like: another directory would have the same limit.
            if limit_cure(error.__cause__):
                cure = "This limit applies to the process, not to the directory"
            kept = self._volumes.retention
            if tier == "durable" and kept is not None and isinstance(error, VolumeTooSmallError):
                fewer = dataclasses.replace(kept, room_bytes=error.free_bytes).cure()
                cure = f"{cure}. Or keep fewer: {fewer}" if fewer else cure
            raise StorageError(_names(directories), f"cannot hold the states: {error}", cure=cure) from error
        except BackendUnavailableError as error:
            raise StorageError(
                _names(directories),
                f"cannot be used with the backend '{error.backend}': {error.reason}",
                cure=f'To use it, {error.cure}; or set infinity.io_backend to "auto", which takes one that works',
                key="infinity.io_backend",
            ) from error

    def _build(self) -> tuple[WeightStore | None, StateStore]:
        plan, placement, device = self._plan, self._plan.placement, self.device
        param_key, state_key = self._volumes.param_key, self._volumes.state_key
        weights: WeightStore | None = None
        # Otherwise all weights stay in flat buffers, and nothing is ever fetched.
        if len(placement.resident_units) < len(plan.units):
            # Only a GPU needs them: on the CPU reads go straight into the flat buffer.
            if placement.num_upload_buffers:
                self._upload_pool = self._staging_pool(
                    placement.upload_buffer_bytes, placement.num_upload_buffers, param_key
                )
            on_nvme = self._swappers.get(param_key)
            if self._gathers is not None and self._upload_pool is not None:
                in_memory = self._swappers.get(_IN_MEMORY)
                weights = DividedWeights(on_nvme, in_memory, device, plan.shards, self._gathers, self._upload_pool)
            else:
                weights = WeightStore(on_nvme, device, self._upload_pool)
        # Optimizer states in GPU memory: updates run there, and no record is ever moved.
        if state_key[0] == "none" and not device.uses_host_memory:
            return weights, ResidentStateStore(device.torch_device, plan.request.record_format)
        staging_pool = self._staging_pool(placement.staging_buffer_bytes, placement.num_staging_buffers, state_key)
        return weights, PagedStateStore(self._swappers.get(state_key), staging_pool, plan.request.record_format)

    def _staging_pool(self, buffer_bytes: int, num_buffers: int, key: TierKey) -> StagingPool:
        deadline = self._plan.config.io.deadline_seconds
        pool = StagingPool(buffer_bytes, num_buffers, self.device.pin, deadline_seconds=deadline)
        self._staging_pools.append(pool)
        if key in self._swappers:
            pool.register_with(self._swappers[key].register_memory)
        return pool

    def spill_swapper(self) -> Swapper:
        """The swapper for spilled gradients.

        Raises:
            BudgetTooSmallError: there is no NVMe tier to spill to.
        """
        return self._swappers[self._key_of_spills()]

    def _key_of_spills(self) -> TierKey:
        if self._volumes.spill_key is None:
            plan, budget_bytes = self._plan, self._plan.request.budget_bytes
            raise BudgetTooSmallError(
                HOST_KEY,
                budget_bytes=budget_bytes,
                minimum_bytes=budget_bytes + spilled_bytes(plan.sizes, plan.request, plan.placement),
                reason="All gradients have to wait in RAM for optimizer.step(), because the config names no drive for "
                "them",
            )
        return self._volumes.spill_key

    def open_more(self, num_bytes: int) -> Swapper:
        """Open another volume in the directories to which gradients are spilled.

        Raises:
            BudgetTooSmallError: there is no NVMe tier.
            StorageError: there is no room.
        """
        self._more.append(self._open(self._key_of_spills(), num_bytes))
        return self._more[-1]

    def _all(self) -> list[Swapper]:
        return [*self._swappers.values(), *self._more]

    def _on_drives(self) -> list[Swapper]:
        return [swapper for key, swapper in self._swappers.items() if key[0] in ("nvme", "durable")] + self._more

    def counters(self) -> DriveCounters:
        """Bytes and busy seconds of the NVMe tier so far."""
        found = [swapper.statistics() for swapper in self._on_drives()]
        return DriveCounters(sum(s.read_bytes for s in found), sum(s.write_bytes for s in found), *self._busy.seconds())

    def observe(self, observer: Callable[[TransferRecord], None]) -> None:
        """Call ``observer`` for every transfer of the NVMe tier from now on."""
        for swapper in self._on_drives():
            swapper.observe(observer)

    def flush(self) -> None:
        """Wait for all writes."""
        for swapper in self._all():
            swapper.flush()

    def check_open(self) -> None:
        """Raise `EngineClosedError` after `close`, for engines that the end of the process has closed."""
        if self.is_closed:
            raise EngineClosedError.at_exit("this call")

    def raise_pending(self) -> None:
        """Raise the first error of a request that nobody waited for."""
        for swapper in self._all():
            swapper.raise_pending()

    def release_memory(self, put_aside: PutAside) -> None:
        """Release what is needed for training only, until `take_memory_back`. Nothing is under way, no unit is in memory."""
        self.records.release_memory(put_aside)
        for staging_pool in self._staging_pools:
            staging_pool.release_memory()
        if self.weights is not None:
            self.weights.release_memory(put_aside)
        self.gradient_pool.release_free()
        self.arrivals.close()
        self.device.release_unused()

    def take_memory_back(self) -> None:
        """The counterpart of `release_memory`, whole or cut off."""
        for staging_pool in self._staging_pools:
            staging_pool.allocate_memory()
        if self.weights is not None:
            self.weights.take_memory_back()
        self.records.take_memory_back()
        self.arrivals.open()

    def take_upload_buffers_back(self) -> None:
        """After `release_memory`: what weights need on their way to the device, until `release_uploads`."""
        if self._upload_pool is not None:
            self._upload_pool.allocate_memory()

    def release_uploads(self) -> None:
        """The counterpart of `take_upload_buffers_back`."""
        if self._upload_pool is not None:
            self._upload_pool.release_memory()
        self.device.release_unused()

    def abort(self, timeout_seconds: float) -> None:
        """Let every present and later wait for a drive or a staging buffer end with an error after ``timeout_seconds``.

        Call `close` afterwards. Data that is not written yet is lost.
        """
        # One deadline for all of them together, not for each.
        deadline = time.monotonic() + timeout_seconds
        self._end_commit(timeout_seconds)
        for staging_pool in self._staging_pools:
            staging_pool.stop_leasing()
        self._close_all(deadline)

    def close(self) -> None:
        """Release files, threads and memory. Errors of failed writes are not raised."""
        self.is_closed = True
        switching.release(id(self))
        self.records.drop_read_ahead()  # of a step that did not come
        if self.weights is not None:
            self.weights.close()
        self._close_swappers()
        self.records.close()
        self.pool.close()
        self.gradient_pool.close()
        self.arrivals.close()

    def _end_commit(self, timeout_seconds: float) -> None:
        if self.versions is not None:
            try:
                self.versions.wait(timeout_seconds)
            except Exception:
                logger.warning("the last commit of the durable run failed", exc_info=True)

    def _close_all(self, deadline: float | None = None) -> None:
        for swapper in self._all():
            timeout = () if deadline is None else (max(0.0, deadline - time.monotonic()),)
            try:
                swapper.close(*timeout)
            except Exception:
                logger.warning("closing a swapper failed", exc_info=True)

    def _close_swappers(self) -> None:
        self._end_commit(self._plan.config.io.deadline_seconds)
        if self._gathers is not None:
            self._gathers.stop()
        self._close_all()
        # After the swappers: a transfer under way still writes into these buffers.
        for staging_pool in self._staging_pools:
            staging_pool.close()
        # Last: it releases the lock on the run's directory, and another process may open the run at once.
        if self._run is not None:
            self._run.close()


def _names(directories: Sequence[Directory]) -> str:
    return ", ".join(str(directory.path) for directory in directories)
