"""Puts an engine together: the only place where all parts meet."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from infinity.activations.recomputation import RecomputedForward
from infinity.activations.saved_activations import HostActivations, SavedActivations
from infinity.activations.spill_space import SpillSpace
from infinity.checkpoint.gathered_units import GatheredUnits
from infinity.checkpoint.state_access import StateAccess
from infinity.checkpoint.stored_weights import StoredWeights
from infinity.config import InfinityConfig
from infinity.device.compute import ComputeDevice
from infinity.device.drive_tensors import zeros_on
from infinity.device.host_memory import HeapTrimmer, free_share, give_back_freed_memory, process_bytes
from infinity.distributed.meshes import Mesh, division_of
from infinity.distributed.world import Numbered, num_local_processes, world
from infinity.engine.durable_run import DurableRun
from infinity.engine.engine import Engine
from infinity.engine.parts import Parts
from infinity.engine.planned import (
    Divided,
    Planned,
    check_same_layout,
    divide,
    durable_run_of,
    exchanges_momenta,
    make_plan,
)
from infinity.engine.resources import EngineResources
from infinity.engine.settled_access import SettledAccess
from infinity.engine.shutdown import settle
from infinity.gradients.gradient_exchange import GradientExchange
from infinity.gradients.live_gradients import LiveGradients
from infinity.gradients.loss_scaler import LossScaler
from infinity.gradients.reducer import ReducedGradients
from infinity.gradients.unit_grads import MainGradDtype
from infinity.loop.accumulation import Accumulation
from infinity.loop.backward import Backwards
from infinity.loop.module_hooks import LoadHooks, ModuleHooks
from infinity.loop.pager import Pager, Preconditions
from infinity.loop.parameter_handler import ParameterHandler
from infinity.loop.phase import PhaseGuard
from infinity.loop.style import LoopStyle
from infinity.machine.here import bandwidth_of, room_bytes
from infinity.numerics.state_format import StateFormat
from infinity.optim.facade.loose_parameters import LooseParameters
from infinity.optim.fused_adam import FusedAdam, GpuAdam
from infinity.optim.main_weights import MAIN_WEIGHT
from infinity.optim.remainder_updater import RemainderUpdater
from infinity.optim.template import Template
from infinity.paging.assigned import AssignedData
from infinity.paging.parameter_map import ParameterMap
from infinity.paging.residency import Residency
from infinity.telemetry import Recording, Reporter, Sources, StepClock
from infinity.telemetry.progress import progress
from infinity.threads.engine_lock import EngineLock
from infinity.tiers.user_copies import UserCopies
from infinity.tiers.weight_exchange import WeightExchange
from infinity.units.buffers import BufferCast, buffers_of, restore_buffers
from infinity.units.originals import Originals
from infinity.units.parameter import hold
from infinity.units.partition import find_blocks
from infinity.updates.chunk_updater import ChunkUpdater
from infinity.updates.job import ParameterState
from infinity.updates.momenta import CompressedMomenta
from infinity.updates.step_groups import StepGroups
from infinity.updates.stepper import Stepper, StepRules
from infinity.updates.stream import UpdateStream
from infinity.vertical.eligibility import Suitability
from infinity.vertical.step import StepContext
from swapper import AlignedRegion

logger = logging.getLogger(__name__)
EngineClass = TypeVar("EngineClass", bound=Engine)


@dataclass(frozen=True)
class _Opened:
    """Memory, files, and the clock that sees how long they are waited for."""

    storage: EngineResources
    exchange: WeightExchange
    clock: StepClock
    durable: DurableRun | None
    recording: Recording | None


@dataclass(frozen=True)
class _Weights:
    """The model's weights, at rest and in memory."""

    stored: StoredWeights
    gathered: GatheredUnits
    states: dict[tuple[int, int], ParameterState]
    residency: Residency
    parameter_map: ParameterMap
    copies: UserCopies


@dataclass(frozen=True)
class _Updates:
    """Gradients, and what updates weights and states by them."""

    live: LiveGradients
    stream: UpdateStream
    groups: StepGroups
    stepper: Stepper
    trimmer: HeapTrimmer | None
    """Where memory has to be given back between the pieces of a step."""


def build(
    engine_class: type[EngineClass],
    model: nn.Module,
    config: InfinityConfig,
    template: Template,
    device: ComputeDevice,
    mesh: Mesh,
    undo: contextlib.ExitStack,
    engine: EngineClass | None = None,
    before: Parts | None = None,
) -> tuple[EngineClass, Originals]:
    """Make the parts, and let them take the model over.

    Args:
        engine_class: of a new engine.
        mesh: who has which part of the model.
        undo: gets what has to be called if anything fails from here on, before the engine is the caller's.
        engine: gets the new parts in place of those that it had. None: a new one is made.
        before: those.

    Returns:
        The engine, and what its parameters were before.

    Raises:
        BudgetTooSmallError, ConfigError: what the config asks for cannot be had.
    """
    durable, config = durable_run_of(config, undo)
    recording = Recording(config.infinity.timeline) if config.infinity.timeline is not None else None
    share = free_share(
        holds_activations=device.shares_host_memory,
        num_sharing=num_local_processes(),
        is_unified=device.is_unified,
    )
    divided, config = divide(mesh, config)
    plan = make_plan(model, config, template, device, share, divided)
    if durable is not None:
        check_same_layout(durable, plan, template, model, divided)
    settle()  # space of an engine that became garbage a moment ago
    opened = _open(plan, device, divided, durable, recording, undo)
    weights = _weights(model, plan, opened, divided)
    updates = _updates(plan, opened, divided, weights, template, device, before, undo)
    parts = _parts(plan, opened, weights, updates, template, device, mesh, before)
    buffers = BufferCast(model, plan.config.compute_dtype, plan.config.buffer_dtype)
    originals = Originals(
        plan.units,
        cuts_nans=plan.has_remainder,
        stored=parts.access.stored,
        open_space=opened.storage.open_more,
        close_space=opened.storage.close_more,
    )
    built: list[EngineClass] = []
    undo.callback(_close, built)
    undo.callback(template.give_back_states, parts.access.state)
    undo.callback(originals.give_back)  # what is paged out comes back, as far as it can be read
    undo.callback(restore_buffers, buffers_of(model))
    undo.callback(parts.module_hooks.uninstall)
    _take_over(plan, originals, opened, weights, parts.parameter_handler, device, undo)
    _take_initial_states(template, parts.access)
    if recording is not None:
        opened.storage.observe(recording.note_transfer)
    if engine is None:
        engine = engine_class(plan.config, parts)
    else:
        engine.relay(parts)
    built.append(engine)
    buffers.apply(device.torch_device)
    parts.module_hooks.handles_of_others.append(buffers.explain_failures())
    give_back_freed_memory()
    return engine, originals


# ------------------------------------------------------------------------------------------------------------ storage


def _open(
    plan: Planned,
    device: ComputeDevice,
    divided: Divided,
    durable: DurableRun | None,
    recording: Recording | None,
    undo: contextlib.ExitStack,
) -> _Opened:
    storage = EngineResources(
        plan.config,
        device,
        plan.placement,
        plan.request,
        plan.inputs.sizes,
        None if durable is None else durable.directory,
        divided.shares if divided.has_parts_of_weights else None,
        divided.among.sharers,
    )
    undo.callback(storage.close)
    exchange = WeightExchange(divided.among, divided.shares, storage.weights, device, divided.holders)
    undo.callback(exchange.leave)
    clock = StepClock(device, recording)
    return _Opened(storage, exchange, clock, durable, recording)


# ------------------------------------------------------------------------------------------------------------ weights


def _weights(model: nn.Module, plan: Planned, opened: _Opened, divided: Divided) -> _Weights:
    config, storage = plan.config, opened.storage
    states = {place: ParameterState() for place in plan.inputs.with_room}
    stored = StoredWeights(
        storage.records,
        storage.weights,
        states,
        plan.chunks,
        plan.request.record_format,
        opened.exchange,
        opened.durable.settle if opened.durable is not None else lambda: None,
    )
    residency = Residency(
        plan.units,
        storage.pool,
        storage.weights,
        opened.clock,
        prefetches=config.infinity.prefetch,
        guess=plan.inputs.guess,
        budget=plan.placement.budget_of_weights(plan.request),
        writer=stored,
        is_divided=divided.has_parts_of_weights,
    )
    copies = UserCopies(dict.fromkeys((*config.offload_optimizer.nvme_paths, *config.offload_param.nvme_paths)))
    _allocate(plan, storage)
    return _Weights(stored, GatheredUnits(stored), states, residency, ParameterMap(model, plan.units), copies)


def _allocate(plan: Planned, storage: EngineResources) -> None:
    """Room for each unit's records and weights."""
    for unit in plan.units:
        names = tuple(plan.inputs.names[unit.index])
        storage.records.allocate(unit, plan.chunks[unit.index], names, plan.borders[unit.index])
        if storage.weights is not None:
            storage.weights.allocate(unit, in_host_memory=unit.index in plan.placement.hosted_units)


def _take_over(
    plan: Planned,
    originals: Originals,
    opened: _Opened,
    weights: _Weights,
    parameter_handler: ParameterHandler,
    device: ComputeDevice,
    undo: contextlib.ExitStack,
) -> None:
    """Store unit after unit, and let go of each one's original tensors as soon as it is stored.

    What a durable run goes on from is stored already; it takes the place of the originals.
    """
    goes_on = opened.durable is not None and opened.durable.goes_on
    if opened.durable is not None and goes_on:
        undo.callback(
            logger.warning,
            "infinity.initialize has failed after the model got the weights of the durable run in '%s', which it keeps. Make "
            "it anew before it begins another run",
            opened.durable.directory.path,
        )
    total = sum(unit.num_bytes for unit in plan.units)
    with progress("building the engine", total, is_shown=plan.config.infinity.progress_bars) as note:
        for unit in plan.units:
            flat = opened.storage.pool.allocate(unit.num_bytes)
            if flat is None:
                raise RuntimeError("the pool for flat buffers is smaller than a unit")
            weights.residency.place(unit, flat)
            originals.keep(unit)
            if not goes_on:
                weights.stored.store(unit, [parameter.detach() for parameter in unit.parameters])
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                parameter.grad = None
                hold(parameter, parameter_handler, slot.spec.dtype, device.torch_device)
            weights.residency.evict(unit)
            note(unit.num_bytes)
    opened.exchange.after(plan.units)


# ---------------------------------------------------------------------------------------------------------- gradients


def _gradients(
    plan: Planned, opened: _Opened, divided: Divided, momenta: CompressedMomenta | None, device: ComputeDevice
) -> ReducedGradients:
    config, storage = plan.config, opened.storage
    exchange: GradientExchange | None = None
    if divided.shares.is_divided:
        numbered = Numbered()  # each engine has process groups for this, which the next one takes over
        apart = division_of(divided.mesh, config.shard_size, f"gradients {numbered.number}")
        exchange = GradientExchange(apart, numbered, divided.shares, config.communication_dtype, device)
    store = ReducedGradients(
        plan.units,
        device,
        opened.clock,
        in_memory=plan.placement.gradients_in_memory,
        open_swapper=storage.spill_swapper,
        pool=storage.gradient_pool,
        arrivals=storage.arrivals,
        waiting=MainGradDtype(
            torch.bfloat16 if config.infinity.gradient_dtype == "bf16" else torch.float32,
            config.infinity.rounds_gradients,
        ),
        scaler=LossScaler(config.loss_scaling, has_zero=config.zero_stage > 0),
        holds_back=momenta.is_active if momenta is not None else lambda: False,
        wire=config.communication_dtype,
        ranks=divided.mesh.data,
        sharers=divided.among.sharers,
        exchange=exchange,
    )
    if plan.placement.spills:
        store.reserve()
    return store


def _momenta(
    plan: Planned, opened: _Opened, divided: Divided, weights: _Weights, template: Template
) -> CompressedMomenta | None:
    """What 1-bit Adam exchanges in place of gradients."""
    if not exchanges_momenta(plan, divided, template, is_durable=opened.durable is not None):
        return None
    return CompressedMomenta(
        plan.units,
        plan.chunks,
        records=opened.storage.records,
        states=weights.states,
        template=template,
        ranks=divided.mesh.data,
        await_update=weights.residency.await_update,
        zeros=functools.partial(zeros_on, plan.config.offload_optimizer.nvme_paths),
    )


# ------------------------------------------------------------------------------------------------------------ updates


def _update_stream(
    plan: Planned, opened: _Opened, weights: _Weights, template: Template, device: ComputeDevice
) -> UpdateStream:
    has_remainder = plan.has_remainder
    update_device = device.torch_device if plan.request.optimizer_tier == "none" else torch.device("cpu")
    fused = FusedAdam.of(template, update_device, has_remainder=has_remainder)  # on the CPU
    halves_updater = None
    if has_remainder:
        kernel = GpuAdam.of(template, update_device) if update_device.type == "cuda" else fused
        halves_updater = RemainderUpdater(plan.inputs.updater, kernel)
    state_format = StateFormat(plan.config.infinity.state_dtype)
    return UpdateStream(
        opened.storage.records,
        opened.storage.weights,
        ChunkUpdater(plan.inputs.updater, weights.states, halves_updater, state_format, fused),
        device,
        weights.states,
        opened.recording,
        plan.request.update_workers,
    )


def _updates(
    plan: Planned,
    opened: _Opened,
    divided: Divided,
    weights: _Weights,
    template: Template,
    device: ComputeDevice,
    before: Parts | None,
    undo: contextlib.ExitStack,
) -> _Updates:
    config, storage = plan.config, opened.storage
    momenta = _momenta(plan, opened, divided, weights, template)
    gradients = _gradients(plan, opened, divided, momenta, device)
    stream = _update_stream(plan, opened, weights, template, device)
    undo.callback(stream.close)
    if opened.durable is not None:
        opened.durable.connect(
            storage, plan.units, weights.states, weights.residency, stream, opened.clock.waiting, opened.exchange
        )
    # Where all fits, the heap is what it is in plain torch; fresh memory after each trim would cost more than it saves.
    spills = storage.nvme_bytes > 0 or config.infinity.activations == "nvme"
    trimmer = HeapTrimmer() if device.shares_host_memory and spills else None
    groups = StepGroups(
        weights.parameter_map,
        template,
        plan.inputs.updater,
        storage.records.names_of,
        weights.states,
        weights.residency.await_update,
        LooseParameters(template) if before is None else before.groups.loose,
    )
    stepper = Stepper(
        plan.units,
        plan.chunks,
        StepRules(config.gradient_clipping, config.infinity.update, config.checks_overflow),
        device=device,
        residency=weights.residency,
        trimmer=trimmer,
        gradients=gradients,
        stream=stream,
        groups=groups,
        gathered=weights.gathered,
        exchange=opened.exchange,
        mesh=divided.mesh,
        before_updates=weights.stored.before_writes,
        momenta=momenta,
    )
    return _Updates(LiveGradients(gradients, weights.residency.await_update), stream, groups, stepper, trimmer)


def _take_initial_states(template: Template, access: StateAccess) -> None:
    """States that the optimizer came with are the engine's from now on."""
    for parameter, state in template.take_initial_states():
        main = state.pop(MAIN_WEIGHT, None)
        access.load_state(parameter, state)
        if main is not None:
            access.resume_main_weight(parameter, main)


# --------------------------------------------------------------------------------------------------------------- step


def _parts(
    plan: Planned,
    opened: _Opened,
    weights: _Weights,
    updates: _Updates,
    template: Template,
    device: ComputeDevice,
    mesh: Mesh,
    before: Parts | None,
) -> Parts:
    """All of them, with what the user's loop and torch's hooks call."""
    storage, stream, stepper, groups = opened.storage, updates.stream, updates.stepper, updates.groups
    residency, parameter_map, live = weights.residency, weights.parameter_map, updates.live
    counts = Accumulation(plan.config, mesh.data.num) if before is None else before.counts
    style = LoopStyle(counts) if before is None else before.style
    lock, assigned = EngineLock(), AssignedData()
    loads: dict[LoadHooks, None] = {}
    guard = PhaseGuard(stepper, counts)
    backwards = Backwards(parameter_map, residency, lock, stepper, guard, live, style, counts)
    reporter = _reporter(plan.config, opened, device, stream, mesh.data.num)
    checks = (
        guard.check_open,
        functools.partial(lock.check_process, "this call"),
        storage.check_open,
        assigned.check,
        backwards.raise_deferred,
        stream.raise_error,
        storage.raise_pending,
    )
    preconditions = Preconditions(checks, guard, backwards, groups, loads, reporter)
    activations = _activations(plan, opened)
    pager = Pager(residency, lock, backwards, preconditions, weights.copies, updates.trimmer, activations)
    access = StateAccess(parameter_map, pager, storage.records, weights.states, weights.stored, weights.gathered)
    settled = SettledAccess(pager, access, weights.gathered, stream, storage, preconditions, opened.durable, mesh.data)
    blocks = tuple(find_blocks(parameter_map.model, plan.config.infinity.units))
    recomputed = RecomputedForward if plan.config.infinity.activation_checkpointing else None
    hooks = ModuleHooks(parameter_map, pager, loads, blocks, recomputed)
    return Parts(
        mesh,
        counts,
        style,
        guard,
        preconditions,
        backwards,
        parameter_map,
        module_hooks=hooks,
        parameter_handler=ParameterHandler(parameter_map, hooks, pager, stepper, live, settled, assigned),
        pager=pager,
        storage=storage,
        stream=stream,
        stepper=stepper,
        live=live,
        groups=groups,
        stored=weights.stored,
        access=access,
        settled=settled,
        exchange=opened.exchange,
        template=template,
        updater=plan.inputs.updater,
        clock=opened.clock,
        reporter=reporter,
        recording=opened.recording,
        plan_tracker=plan.inputs.tracker(plan.placement, plan.reason_against, room_bytes, bandwidth_of(plan.config)),
        device=device,
        vertical=_vertical_context(plan, opened, parameter_map, hooks, pager, stepper, blocks),
        durable=opened.durable,
    )


def _vertical_context(
    plan: Planned,
    opened: _Opened,
    parameter_map: ParameterMap,
    hooks: ModuleHooks,
    pager: Pager,
    stepper: Stepper,
    blocks: tuple[str, ...],
) -> StepContext:
    device = opened.storage.device
    activation_bytes = plan.placement.activation_bytes if device.shares_host_memory else None
    space, suitability = (
        SpillSpace(opened.storage.open_more),
        Suitability(plan.config.infinity.schedule, plan.reason_against),
    )
    return StepContext(
        parameter_map, hooks, pager, stepper, opened.clock, device, space, activation_bytes, blocks, suitability
    )


def _activations(plan: Planned, opened: _Opened) -> SavedActivations | HostActivations | None:
    """Where what autograd saves waits for backward; None: where it is."""
    num_bytes = plan.placement.activation_bytes
    if plan.config.infinity.activations == "nvme":
        return SavedActivations(SpillSpace(opened.storage.open_more), opened.clock, num_bytes)
    if plan.config.infinity.activations == "cpu":
        return HostActivations(opened.clock, num_bytes, plan.request.budget_bytes)
    return None


def _close(engines: Sequence[Engine]) -> None:
    for engine in engines:
        engine.close(restore_weights=False)


def _reporter(
    config: InfinityConfig,
    opened: _Opened,
    device: ComputeDevice,
    stream: UpdateStream,
    num_processes: int,
) -> Reporter:
    storage, recording = opened.storage, opened.recording
    sources = Sources(
        opened.clock,
        storage.counters,
        lambda: stream.busy_seconds,
        device.take_copies,
        lambda: (*process_bytes(), device.peak_bytes(), AlignedRegion.take_peak_bytes()),
        num_processes,
    )
    steps_per_print = config.steps_per_print if world().index == 0 else None
    return Reporter(sources, recording, steps_per_print=steps_per_print, prints_breakdown=config.wall_clock_breakdown)
