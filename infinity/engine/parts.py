"""The parts of an engine, made in stages: plan, storage, weights, updates, step."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator

import torch
from torch import nn

from infinity.activations.recomputation import RecomputedForward
from infinity.activations.saved_activations import HostActivations, SavedActivations
from infinity.activations.spilled import SpillSpace
from infinity.checkpoint.record_stream import RecordStream
from infinity.checkpoint.state_access import StateAccess
from infinity.checkpoint.stored_weights import StoredWeights
from infinity.config import InfinityConfig
from infinity.device.compute import ComputeDevice
from infinity.device.drive_tensors import zeros_on
from infinity.device.host_memory import HeapTrimmer, process_bytes, trim_heap
from infinity.distributed.collective_thread import CollectiveThread
from infinity.distributed.meshes import Mesh
from infinity.distributed.world import world
from infinity.engine.consistent_access import ConsistentAccess
from infinity.engine.durable_run import DurableRun
from infinity.engine.planned import exchanges_momenta, make_plan
from infinity.engine.resources import EngineResources
from infinity.engine.shutdown import wait_for_collected
from infinity.gradients.gradient_exchange import GradientExchange
from infinity.gradients.live_gradients import LiveGradients
from infinity.gradients.loss_scaler import LossScaler
from infinity.gradients.main_gradients import MainGradDtype
from infinity.gradients.reducer import ReducedGradients
from infinity.loop.accumulation import Accumulation
from infinity.loop.backward import Backwards
from infinity.loop.module_hooks import ModuleHooks
from infinity.loop.parameter_coordinator import ParameterCoordinator, Preconditions
from infinity.loop.parameter_handler import ParameterHandler
from infinity.loop.phase import PhaseGuard
from infinity.loop.style import LoopStyle
from infinity.machine.here import room_bytes
from infinity.metrics.clock import StepClock
from infinity.metrics.progress import progress
from infinity.metrics.reporter import Reporter
from infinity.metrics.timeline import Timeline
from infinity.numerics.state_format import StateFormat
from infinity.optim.facade.loose_parameters import LooseParameters
from infinity.optim.fused_adam import FusedAdam, GpuAdam
from infinity.optim.main_weights import MAIN_WEIGHT
from infinity.optim.wrapped_optimizer import WrappedOptimizer
from infinity.packed.sources import clear_source
from infinity.paging.assigned import AssignedData
from infinity.paging.parameter_cache import ParameterCache
from infinity.paging.parameter_map import ParameterMap
from infinity.plan.plan import PlanTracker
from infinity.plan.volumes import resting_bytes
from infinity.threads.engine_lock import EngineLock
from infinity.threads.openmp import use_threads
from infinity.tiers.divided_weights import WeightExchange
from infinity.tiers.user_copies import UserCopies
from infinity.units.buffers import BufferCast, module_buffers, restore_buffers
from infinity.units.experts import expert_groups
from infinity.units.originals import Originals
from infinity.units.parameter import hold
from infinity.units.partition import find_blocks
from infinity.updates.chunk_updater import ChunkUpdater
from infinity.updates.job import ParameterState
from infinity.updates.momenta import CompressedMomenta
from infinity.updates.step_groups import StepGroups
from infinity.updates.stepper import Stepper
from infinity.updates.stream import UpdateStream
from infinity.vertical.schedule_selector import ScheduleSelector
from infinity.vertical.step import StepContext
from swapper import AlignedRegion

logger = logging.getLogger(__name__)


class Parts:
    """The parts of one engine, made in stages. Each stage uses the ones before.

    Attributes:
        mesh: Which process has which part of the model.
        durable: Commits each step; None unless the config asks for it.
        timeline: Records which thread is busy when; None unless the config asks for it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: InfinityConfig,
        wrapped_optimizer: WrappedOptimizer,
        device: ComputeDevice,
        mesh: Mesh,
        undo: contextlib.ExitStack,
        before: Parts | None = None,
    ) -> None:
        """Open files and memory. The model is unchanged until `take_model`.

        Args:
            mesh: which process has which part of the model.
            undo: gets callbacks that undo everything after a failure.
            before: for a relayout: the engine's present parts.

        Raises:
            BudgetTooSmallError, ConfigError: the config asks for something that is not possible here.
        """
        self._made_of = model, config, wrapped_optimizer, device, mesh
        self.mesh, self.wrapped_optimizer, self.device = mesh, wrapped_optimizer, device
        self.durable: DurableRun | None = None
        if config.infinity.durable is not None:
            self.durable = DurableRun(config, config.infinity.durable)
            undo.callback(self.durable.directory.close)
            config = self.durable.config
        self.timeline: Timeline | None = None
        if before is not None:
            self.timeline = before.timeline  # the file has all of the run
        elif config.infinity.timeline is not None:
            self.timeline = Timeline(config.infinity.timeline)
        self.plan = make_plan(model, config, wrapped_optimizer, device, mesh)
        self.config, self.updater = self.plan.config, self.plan.updater
        if self.durable is not None:
            self.durable.check(self.plan, wrapped_optimizer, model)
        wait_for_collected()  # space of an engine that became garbage a moment ago
        self._open_storage(undo)
        self._make_weights(model)
        self._make_updates(before, undo)
        self._make_step(before)

    def anew(self, undo: contextlib.ExitStack) -> Parts:
        """Plan and make the parts once more, for groups that have got new parameters."""
        return Parts(*self._made_of, undo, before=self)

    @property
    def mains(self) -> ConsistentAccess | None:
        """Reads and replaces main weights; None if they are the model weights."""
        return self.consistent if self.stored.has_main_weights else None

    # --------------------------------------------------------------------------------------------------------- storage

    def _open_storage(self, undo: contextlib.ExitStack) -> None:
        """Memory, files, and the clock that measures waiting for them."""
        run = None if self.durable is None else self.durable.directory
        gathers = self._thread_for("weights") if self.plan.divides_weights else None
        self.storage = EngineResources(self.plan, self.device, run, gathers)
        undo.callback(self.storage.close)
        self.exchange = WeightExchange(self.mesh.data, self.plan.shards, self.storage.weights, self.device)
        self.clock = StepClock(self.device, self.timeline)

    def _thread_for(self, purpose: str) -> CollectiveThread:
        """For what ranks exchange beside their scripts. All of them come here."""
        parts = self.mesh.groups or (self.mesh.data.members,)
        return CollectiveThread(purpose, self.mesh.data, parts, functools.partial(_alone, self.device))

    # --------------------------------------------------------------------------------------------------------- weights

    def _make_weights(self, model: nn.Module) -> None:
        """The model's weights, stored and in memory."""
        plan, config, storage = self.plan, self.config, self.storage
        self.parameter_map = ParameterMap(model, plan.units)
        # (unit index, slot index) -> scalars and state names of each parameter that is trained here. The tensors are in
        # records.
        self._states = {place: ParameterState() for place in plan.with_states}
        self.stored = StoredWeights(
            RecordStream(storage.records, storage.weights, self._states, plan.chunks),
            plan.request.record_format,
            self.exchange,
            self.durable.wait if self.durable is not None else lambda: None,
        )
        self._parameter_cache = ParameterCache(
            plan.units,
            storage.pool,
            storage.weights,
            self.clock,
            prefetches=config.infinity.prefetch,
            guess=plan.guess,
            experts=expert_groups(model, self.parameter_map.locate),
            budget=plan.placement.budget_of_weights(plan.request),
            writer=self.stored,
            exchange=self.exchange,
        )
        # In this order in every process: a durable run expects each extent where it was.
        for unit in plan.units:  # room for its records and weights
            names = tuple(plan.names[unit.index])
            storage.records.allocate(unit, plan.chunks[unit.index], names, plan.splits[unit.index])
            if storage.weights is not None:
                in_host_memory = unit.index in plan.placement.hosted_units
                keeps_codes = plan.sizes[unit.index].keeps_codes
                storage.weights.allocate(unit, in_host_memory=in_host_memory, keeps_codes=keeps_codes)

    def take_model(self, undo: contextlib.ExitStack) -> Originals:
        """Move the model's weights and the optimizer's states into the parts.

        Args:
            undo: gets callbacks that undo it. They read the storage, so an engine over these parts is closed after them.

        Returns:
            A record of what the parameters were before.
        """
        model = self.parameter_map.model
        buffers = BufferCast(model, self.config.compute_dtype, self.config.buffer_dtype)
        originals = Originals(
            self.plan.units,
            cuts_nans=self.plan.has_remainder,  # a remainder keeps one bit pattern of NaN only
            stored=self.access.stored,
            directories=self.config.nvme_paths,
        )
        # Undo runs in reverse: hooks go first, then buffers and parameters become ordinary again, then the optimizer gets
        # its states back.
        undo.callback(self.wrapped_optimizer.restore_states, self.access.state)
        undo.callback(originals.restore)  # what is paged out comes back, as far as it can be read
        undo.callback(restore_buffers, [*module_buffers(model)])
        undo.callback(self.module_hooks.uninstall)
        self._store_model(originals, undo)
        buffers.apply(self.device.torch_device)
        self.module_hooks.handles_of_others.append(buffers.explain_failures())
        # The originals were freed unit by unit, and the heap keeps their memory in gaps.
        trim_heap()
        return originals

    def _store_model(self, originals: Originals, undo: contextlib.ExitStack) -> None:
        """Store unit after unit, and release the original tensors of each as soon as it is stored.

        A resumed durable run has its weights stored already; they replace the originals.
        """
        goes_on = self.durable is not None and self.durable.goes_on
        if self.durable is not None and goes_on:
            undo.callback(
                logger.warning,
                "infinity.initialize failed after it had loaded the weights of the durable run in '%s' into the "
                "model. Build the model again before you start another run",
                self.durable.directory.path,
            )
        total = sum(unit.num_bytes for unit in self.plan.units)
        # Between the parts in which a unit is cast or packed, small objects stay: each layer left a gap of 1 MB.
        trimmer = HeapTrimmer(4 << 20)
        with progress("building the engine", total, is_shown=self.config.infinity.progress_bars) as note:
            for unit in self.plan.units:
                flat = self.storage.pool.allocate(unit.num_bytes)
                if flat is None:
                    raise RuntimeError("the pool for flat buffers is smaller than a unit")
                self._parameter_cache.place(unit, flat)
                # Before `store`, which rounds to what the engine keeps.
                originals.keep(unit)
                # The files of a durable run already hold the weights of its newest commit.
                if not goes_on:
                    self.stored.store(unit, [parameter.detach() for parameter in unit.parameters])
                for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                    # `hold` makes the parameter a paged one: the original tensor loses its last reference.
                    parameter.grad = None
                    clear_source(parameter)
                    hold(parameter, self.parameter_handler, slot.spec.dtype, self.device.torch_device)
                self._parameter_cache.evict(unit)
                trimmer.trim()
                note(unit.num_bytes)
        # States of an optimizer that has made steps before. Each leaves memory before the next one is read.
        for parameter, state in self.wrapped_optimizer.pop_initial_states():
            main = state.pop(MAIN_WEIGHT, None)
            self.access.load_state(parameter, state)
            if main is not None:
                self.access.resume_main_weight(parameter, main)
        if self.timeline is not None:
            # Last, so that the timeline begins with the training and not with this.
            self.storage.observe(self.timeline.on_transfer)

    # --------------------------------------------------------------------------------------------------------- updates

    def _make_updates(self, before: Parts | None, undo: contextlib.ExitStack) -> None:
        """Gradients, and the updates of weights and states."""
        plan, config, storage = self.plan, self.config, self.storage
        momenta = self._make_momenta()
        gradients = self._make_gradients(momenta)
        # Gradients as scripts see them in ``parameter.grad`` between backward and step.
        self.live_gradients = LiveGradients(gradients, self._parameter_cache.await_update)
        self.stream = self._make_stream()
        undo.callback(self.stream.close)
        if self.durable is not None:
            self.durable.connect(storage, self._states, self._parameter_cache, self.stream)
        # Where all fits, the heap is what it is in plain torch; fresh memory after each trim would cost more than it saves.
        on_drives = resting_bytes(plan.sizes, plan.request, plan.placement)["nvme"]
        spills = any(on_drives.values()) or config.infinity.activations == "nvme"
        self._trimmer = HeapTrimmer() if self.device.uses_host_memory and spills else None
        self.groups: StepGroups = StepGroups(
            self.parameter_map,
            self.wrapped_optimizer,
            self.updater,
            storage.records.names_of,
            self._states,
            self._parameter_cache.await_update,
            # After a relayout, parameters that no engine holds keep their states and gradients.
            LooseParameters(self.wrapped_optimizer) if before is None else before.groups.loose,
        )
        self.stepper = Stepper(
            plan.units,
            plan.chunks,
            config,
            device=self.device,
            parameter_cache=self._parameter_cache,
            trimmer=self._trimmer,
            gradients=gradients,
            stream=self.stream,
            step_groups=self.groups,
            exchange=self.exchange,
            mesh=self.mesh,
            before_updates=self.stored.before_writes,
            momenta=momenta,
        )

    def _make_momenta(self) -> CompressedMomenta | None:
        """The momenta that 1-bit Adam exchanges in place of gradients; None for other optimizers."""
        if not exchanges_momenta(self.plan, self.mesh, self.wrapped_optimizer, is_durable=self.durable is not None):
            return None
        return CompressedMomenta(
            self.plan.units,
            self.plan.chunks,
            records=self.storage.records,
            states=self._states,
            wrapped_optimizer=self.wrapped_optimizer,
            ranks=self.mesh.data,
            await_update=self._parameter_cache.await_update,
            zeros=functools.partial(zeros_on, self.config.offload_optimizer.nvme_paths),
        )

    def _make_gradients(self, momenta: CompressedMomenta | None) -> ReducedGradients:
        plan, config, storage = self.plan, self.config, self.storage
        exchange: GradientExchange | None = None
        if plan.shards.is_divided:
            exchange = GradientExchange(self._thread_for("gradients"), plan.shards, config.communication_dtype)
        dtype = torch.bfloat16 if config.infinity.gradient_dtype == "bf16" else torch.float32
        store = ReducedGradients(
            plan.units,
            self.device,
            self.clock,
            in_memory=plan.placement.gradients_in_memory,
            open_swapper=storage.spill_swapper,
            pool=storage.gradient_pool,
            arrivals=storage.arrivals,
            main_dtype=MainGradDtype(dtype, config.infinity.rounds_gradients),
            # DeepSpeed's fp16 without ZeRO has another rule for overflows.
            scaler=LossScaler(config.loss_scaling, has_zero=config.zero_stage > 0),
            holds_back=momenta.is_active if momenta is not None else lambda: False,
            wire=config.communication_dtype,
            ranks=self.mesh.data,
            exchange=exchange,
        )
        if plan.placement.spills:
            # Extents for gradients before the first step, so that a full drive is an error of `initialize`.
            store.reserve()
        return store

    def _make_stream(self) -> UpdateStream:
        plan, has_remainder = self.plan, self.plan.has_remainder
        # With "none", states are in GPU memory, and updates run there. Otherwise the CPU updates them in staging
        # buffers.
        update_device = self.device.torch_device if plan.request.optimizer_tier == "none" else torch.device("cpu")
        kernel = GpuAdam if has_remainder and update_device.type == "cuda" else FusedAdam
        fused = kernel.of(self.wrapped_optimizer, update_device, has_remainder=has_remainder)
        state_format = StateFormat(self.config.infinity.state_dtype)
        return UpdateStream(
            self.storage.records,
            self.storage.weights,
            ChunkUpdater(self.updater, self._states, state_format, fused, splits_main_weights=has_remainder),
            self.device,
            self._states,
            self.timeline,
            plan.request.update_workers,
        )

    # ------------------------------------------------------------------------------------------------------------ step

    def _make_step(self, before: Parts | None) -> None:
        """The parts that the user's loop and torch's hooks call."""
        plan, storage, stepper = self.plan, self.storage, self.stepper
        parameter_map, parameter_cache = self.parameter_map, self._parameter_cache
        # Kept through a relayout: counters and the style of the loop (whose backward and step it calls) are the script's.
        self.counts: Accumulation = Accumulation(self.config, self.mesh.data.num) if before is None else before.counts
        self.style: LoopStyle = LoopStyle(self.counts) if before is None else before.style
        lock, assigned = EngineLock(), AssignedData()
        # Knows whether forward, backward or step may come now, and refuses what is out of order.
        self.guard = PhaseGuard(stepper, self.counts)
        self.backwards = Backwards(
            parameter_map, parameter_cache, lock, stepper, self.guard, self.live_gradients, self.style, self.counts
        )
        self.reporter = self._make_reporter()
        # Run in this order at the beginning of each call: closed, forked or ended first, because the later ones read
        # what is gone then.
        checks = (
            self.guard.check_awake,
            functools.partial(lock.check_process, "this call"),
            storage.check_open,
            assigned.check,
            self.backwards.raise_deferred,
            self.stream.raise_error,
            storage.raise_pending,
        )
        preconditions = Preconditions(checks, self.guard, self.backwards, self.groups, self.reporter)
        # dict.fromkeys removes duplicates and keeps the order.
        copies = UserCopies(
            dict.fromkeys((*self.config.offload_optimizer.nvme_paths, *self.config.offload_param.nvme_paths))
        )
        activations = self._activations()
        self.coordinator = ParameterCoordinator(
            parameter_map, parameter_cache, lock, self.backwards, preconditions, copies, self._trimmer, activations
        )
        self.access = StateAccess(parameter_map, self.coordinator, self.stored)
        self.consistent = ConsistentAccess(
            self.coordinator, self.access, self.stored, self.stream, storage, self.mesh.data
        )
        blocks = tuple(find_blocks(parameter_map.model, self.config.infinity.units))
        recomputed = RecomputedForward if self.config.infinity.activation_checkpointing else None
        self.module_hooks = ModuleHooks(parameter_map, self.coordinator, blocks, recomputed)
        # The parameters' `__torch_function__`, ``data`` and ``grad`` call it.
        self.parameter_handler = ParameterHandler(
            parameter_map, self.module_hooks, self.coordinator, stepper, self.live_gradients, self.consistent, assigned
        )
        self.plan_tracker = PlanTracker(plan.plan(plan.placement, plan.reason_against, room_bytes))
        self.vertical = StepContext(
            self.module_hooks,
            self.coordinator,
            stepper,
            self.guard,
            self.device,
            SpillSpace(storage.open_more),
            # None: a GPU keeps activation checkpoints in its own memory, and spills none of them.
            plan.placement.activation_bytes if self.device.uses_host_memory else None,
            blocks,
            ScheduleSelector(self.config.infinity.schedule, plan.reason_against),
        )

    def _activations(self) -> SavedActivations | HostActivations | None:
        """Keeps what autograd saves on the host or on NVMe; None: autograd keeps it in memory."""
        num_bytes = self.plan.placement.activation_bytes
        if self.config.infinity.activations == "nvme":
            return SavedActivations(SpillSpace(self.storage.open_more), self.clock, num_bytes)
        if self.config.infinity.activations == "cpu":
            return HostActivations(self.clock, num_bytes, self.plan.request.budget_bytes)
        return None

    def _make_reporter(self) -> Reporter:
        stream, device = self.stream, self.device
        return Reporter(
            self.clock,
            self.storage.counters,
            lambda: stream.busy_seconds,
            device.pop_copies,
            lambda: (*process_bytes(), device.peak_bytes(), AlignedRegion.pop_peak_bytes()),
            self.timeline,
            num_processes=self.mesh.data.num,
            steps_per_print=self.config.steps_per_print if world().index == 0 else None,
            prints_breakdown=self.config.wall_clock_breakdown,
        )


@contextlib.contextmanager
def _alone(device: ComputeDevice) -> Iterator[None]:
    """What a thread works inside whose operators run on it alone: see [Note: one pool] in ``infinity.threads.openmp``."""
    use_threads(1)
    with device.background_thread():
        yield
