"""Puts an engine together: the only place where all parts meet."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from infinity.activations.host_activations import HostActivations
from infinity.activations.recomputation import RecomputedForward
from infinity.activations.saved_activations import SavedActivations
from infinity.activations.spill_space import SpillSpace
from infinity.checkpoint.state_access import StateAccess
from infinity.config import InfinityConfig
from infinity.config.ranks import check_weight_group
from infinity.device.compute import ComputeDevice
from infinity.device.drive_tensors import DriveTensors, on_drive
from infinity.device.host_memory import HeapTrimmer, free_share, give_back_freed_memory, process_bytes
from infinity.distributed.collectives import Ranks
from infinity.distributed.meshes import Mesh, division_of, holders_of
from infinity.distributed.world import Numbered, num_local_processes, world
from infinity.engine.commit_parts import layout_of, persistent_buffers_of
from infinity.engine.durable_run import DurableRun
from infinity.engine.engine import Engine
from infinity.engine.parts import Parts, UpperParts
from infinity.engine.resources import EngineResources
from infinity.engine.shutdown import settle
from infinity.errors import BudgetTooSmallError, ConfigError
from infinity.gradients.averaged_grads import AveragedGradients
from infinity.gradients.loss_scaler import LossScaler
from infinity.gradients.main_grad_dtype import MainGradDtype
from infinity.gradients.owned_grads import OwnedGradients
from infinity.machine.here import bandwidth_of, room_bytes
from infinity.numerics.state_format import StateFormat
from infinity.optim.classes.one_bit_adam import OneBitAdam
from infinity.optim.facade.loose_parameters import LooseParameters
from infinity.optim.fused_adam import FusedAdam, GpuAdam
from infinity.optim.main_weights import MAIN_WEIGHT
from infinity.optim.remainder_updater import RemainderUpdater
from infinity.optim.template import Template
from infinity.paging.module_hooks import ModuleHooks
from infinity.paging.pager import Pager
from infinity.paging.parameter_handler import ParameterHandler
from infinity.paging.residency import Residency
from infinity.plan.inputs import PlanInputs
from infinity.plan.placement import DEVICE_KEY, Placement
from infinity.telemetry import Recording, Reporter, Sources, StepClock
from infinity.telemetry.progress import Note, progress
from infinity.tiers.user_copies import UserCopies
from infinity.tiers.weight_exchange import WeightExchange
from infinity.units.buffers import BufferCast, buffers_of, restore_buffers
from infinity.units.originals import Originals
from infinity.units.parameter import hold
from infinity.units.partition import find_blocks
from infinity.units.shares import Shares
from infinity.units.unit import Unit
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


def build(
    engine_class: type[EngineClass],
    model: nn.Module,
    config: InfinityConfig,
    template: Template,
    device: ComputeDevice,
    mesh: Mesh,
    undo: contextlib.ExitStack,
    engine: EngineClass | None = None,
) -> tuple[EngineClass, Originals]:
    """Make the parts, and let them take the model over.

    Args:
        engine_class: of a new engine.
        mesh: who has which part of the model.
        undo: gets what has to be called if anything fails from here on, before the engine is the caller's.
        engine: gets the new parts in place of those that it had. None: a new one is made.

    Returns:
        The engine, and what its parameters were before.

    Raises:
        BudgetTooSmallError, ConfigError: what the config asks for cannot be had.
    """
    ranks = mesh.data
    durable = None
    if config.infinity.durable is not None:
        section = config.infinity.durable.of_rank(world().index, world().num)
        durable = DurableRun(config, section, world())
        undo.callback(durable.directory.close)
        config = durable.adapted(replace(config, infinity=replace(config.infinity, durable=section)))
    recording = Recording(config.infinity.timeline) if config.infinity.timeline is not None else None
    share = free_share(holds_activations=device.shares_host_memory, num_sharing=num_local_processes())
    division = division_of(mesh, config.shard_size)
    shares = Shares(division.sharers.index, division.sharers.num) if config.zero_stage > 0 else Shares()
    holders = Ranks()
    needs_all = mesh.is_divided or (ranks.num > 1 and not shares.is_divided)
    if needs_all and config.infinity.update == "in_backward":  # no part is to be updated before all have met
        config = replace(config, infinity=replace(config.infinity, update="step" if ranks.num > 1 else "deferred"))
    divides = config.zero_stage == 3 and shares.is_divided
    if divides and config.weight_group_size is not None and config.weight_group_size < shares.num:
        check_weight_group(config.weight_group_size, shares.num)
        shares = replace(shares, among=config.weight_group_size)
        holders = holders_of(mesh, config.shard_size, shares.among)
    free_bytes = device.free_bytes(model)
    if divides and free_bytes is not None:  # or some ranks would keep units whole there that others do not
        free_bytes = min(free for (free,) in ranks.meet("planning the memory of devices", [free_bytes]))
    inputs_of = functools.partial(
        PlanInputs.of,
        model,
        template=template,
        share=share,
        shares=shares,
        divides_weights=divides,
        is_alone=world().num == 1,
        shares_host_memory=device.shares_host_memory,
        device_free_bytes=free_bytes,
    )
    fills_devices = divides and config.offload_param.device == "none" and not device.shares_host_memory
    inputs, placement, reason_against = (
        _placed_on_devices(ranks, inputs_of, config) if fills_devices else _placed(inputs_of, config)
    )
    config = inputs.config
    units, updater, sizes, request, guess = inputs.units, inputs.updater, inputs.sizes, inputs.request, inputs.guess
    names, with_room, spans = inputs.names, inputs.with_room, inputs.spans
    has_remainder = config.infinity.main_weights == "remainder"
    state_format = StateFormat(config.infinity.state_dtype)
    waiting = MainGradDtype(
        torch.bfloat16 if config.infinity.gradient_dtype == "bf16" else torch.float32, config.infinity.rounds_gradients
    )
    if divides:
        placement = _agreed(ranks, placement, len(units))
    if config.infinity.host_memory_budget is not None:
        in_memory = [parameter for parameter in model.parameters() if not on_drive(parameter)]
        share.warn_beyond(placement.host_bytes(request), sum(p.numel() * p.element_size() for p in in_memory))
    for unit in units:
        unit.stays_resident = unit.index in placement.resident_units
    if durable is not None:
        durable.check(
            layout_of(
                units,
                {i: tuple(found) for i, found in names.items()},
                request.record_format,
                template.name,
                [[template.fqn(parameter) for parameter in group["params"]] for group in template.param_groups],
                persistent_buffers_of(model),
            ),
            placement.page_bytes,
            (shares.index, shares.num),
        )
    settle()  # space of an engine that became garbage a moment ago
    storage = EngineResources(
        config,
        device,
        placement,
        request,
        sizes,
        None if durable is None else durable.directory,
        shares if divides else None,
        division.sharers,
    )
    undo.callback(storage.close)
    exchange = WeightExchange(division, shares, storage.weights, device, holders)
    undo.callback(exchange.leave)
    clock = StepClock(device, recording)
    upper = UpperParts()
    copies = UserCopies(dict.fromkeys((*config.offload_optimizer.nvme_paths, *config.offload_param.nvme_paths)))

    residency = Residency(
        units,
        storage.pool,
        storage.weights,
        clock,
        prefetches=config.infinity.prefetch,
        guess=guess,
        budget=placement.budget_of_weights(request),
        writer=upper.writer,
        is_divided=divides,
    )
    activations = None
    if config.infinity.activations == "nvme":
        activations = SavedActivations(SpillSpace(storage.open_more), clock, placement.activation_bytes)
    elif config.infinity.activations == "cpu":
        activations = HostActivations(clock, placement.activation_bytes, request.budget_bytes)
    pager = Pager(residency, copies, upper.pager_listener, activations)
    borders = [span[0] + kept for span, kept in zip(spans, placement.states_in_memory, strict=True)]
    chunks = [
        unit.layout.chunks(placement.chunk_numel, border, span)
        for unit, border, span in zip(units, borders, spans, strict=True)
    ]
    states = {place: ParameterState() for place in with_room}
    blocks = tuple(find_blocks(model, config.infinity.units))
    recomputed = RecomputedForward if config.infinity.activation_checkpointing else None
    module_hooks = ModuleHooks(model, units, blocks, recomputed)
    before_writes = durable.settle if durable is not None else lambda: None
    form = request.record_format
    access = StateAccess(
        module_hooks, pager, storage.records, storage.weights, states, chunks, form, exchange, before_writes
    )
    upper.writer.connect(access)
    for unit in units:
        storage.records.allocate(unit, chunks[unit.index], tuple(names[unit.index]), borders[unit.index])
        if storage.weights is not None:
            storage.weights.allocate(unit, in_host_memory=unit.index in placement.hosted_units)
    momenta = None
    if isinstance(template.optimizer, OneBitAdam) and ranks.num > 1:
        if mesh.is_divided:
            raise ConfigError.value(
                "optimizer.type",
                "OneBitAdam",
                f"processes have {mesh.parts.num} parts of the model, and after the warm-up 1-bit Adam clips by each one's norm",
                cure='Take "Adam", or let each process have the whole model',
            )
        if shares.is_divided:
            logger.warning(
                "OneBitAdam with ZeRO's stage %d: momenta are not compressed, for each rank has a part of them. After "
                "freeze_step, whole gradients are averaged in fp32 as before, and the variance stays as it is. Set "
                "zero_optimization.stage to 0 for the exchange in one bit",
                config.zero_stage,
            )
        elif durable is not None:
            raise ConfigError.value(
                "infinity.durable",
                True,
                "OneBitAdam's signs leave out what no commit would hold, so a run that goes on would give other bits",
                cure="Set zero_optimization.stage to 1, where whole gradients are averaged, or leave it out and save checkpoints",
            )
        else:
            momenta = CompressedMomenta(
                units,
                chunks,
                records=storage.records,
                states=states,
                template=template,
                ranks=ranks,
                await_update=pager.residency.await_update,
                zeros=functools.partial(_zeros, config.offload_optimizer.nvme_paths),
            )
    averaged: Callable[..., AveragedGradients] = functools.partial(AveragedGradients, ranks=ranks)
    if shares.is_divided:
        numbered = Numbered()  # each engine has process groups for this, which the next one takes over
        apart = division_of(mesh, config.shard_size, f"gradients {numbered.number}")
        averaged = functools.partial(OwnedGradients, division=division, apart=apart, numbered=numbered, shares=shares)
    gradients = averaged(
        units,
        device,
        clock,
        in_memory=placement.gradients_in_memory,
        open_swapper=storage.spill_swapper,
        pool=storage.gradient_pool,
        arrivals=storage.arrivals,
        waiting=waiting,
        scaler=LossScaler(config.loss_scaling, has_zero=config.zero_stage > 0),
        listener=upper.gradient_listener,
        holds_back=momenta.is_active if momenta is not None else lambda: False,
        wire=config.communication_dtype,
    )
    if placement.spills:
        gradients.reserve()
    plan_tracker = inputs.tracker(placement, reason_against, room_bytes, bandwidth_of(config))
    # Where all fits, the heap is what it is in plain torch; fresh memory after each trim would cost more than it saves.
    spills = storage.nvme_bytes > 0 or config.infinity.activations == "nvme"
    trimmer = HeapTrimmer() if device.shares_host_memory and spills else None
    parameter_handler = ParameterHandler(module_hooks, pager, upper.gradient_host, upper.gatherer)
    buffers = BufferCast(model, config.compute_dtype, config.buffer_dtype)
    originals = Originals(
        units,
        cuts_nans=has_remainder,
        stored=access.stored,
        open_space=storage.open_more,
        close_space=storage.close_more,
    )
    update_device = device.torch_device if request.optimizer_tier == "none" else torch.device("cpu")
    fused = FusedAdam.of(template, update_device, has_remainder=has_remainder)  # on the CPU
    halves_updater = None
    if has_remainder:
        kernel = GpuAdam.of(template, update_device) if update_device.type == "cuda" else fused
        halves_updater = RemainderUpdater(updater, kernel)
    stream = UpdateStream(
        storage.records,
        storage.weights,
        ChunkUpdater(updater, states, halves_updater, state_format, fused),
        device,
        states,
        recording,
        request.update_workers,
    )
    undo.callback(stream.close)
    if durable is not None:
        durable.connect(storage, units, states, pager, stream, clock.waiting, exchange)
    built: list[Engine] = []
    undo.callback(_close, built)
    undo.callback(template.give_back_states, access.state)
    undo.callback(originals.give_back)  # what is paged out comes back, as far as it can be read
    undo.callback(restore_buffers, buffers_of(model))
    undo.callback(module_hooks.uninstall)
    goes_on = durable is not None and durable.goes_on
    if durable is not None and goes_on:
        undo.callback(
            logger.warning,
            "infinity.initialize has failed after the model got the weights of the durable run in '%s', which it keeps. Make "
            "it anew before it begins another run",
            durable.directory.path,
        )
    total = sum(unit.num_bytes for unit in units)
    with progress("building the engine", total, is_shown=config.infinity.progress_bars) as note:
        _take_over(
            units, originals, access, pager.residency, storage, parameter_handler, device, is_stored=goes_on, note=note
        )
    exchange.after(units)
    loose = LooseParameters(template) if engine is None else engine.loose
    step_groups = StepGroups(module_hooks, template, updater, storage.records.names_of, access.state_names, loose)
    stepper = Stepper(
        units,
        chunks,
        StepRules(config.gradient_clipping, config.infinity.update, config.checks_overflow),
        device=device,
        pager=pager,
        gradients=gradients,
        stream=stream,
        groups=step_groups,
        gathered=access,
        exchange=exchange,
        mesh=mesh,
        before_updates=before_writes,
        momenta=momenta,
    )
    for parameter, state in template.take_initial_states():
        main = state.pop(MAIN_WEIGHT, None)
        access.load_state(parameter, state)
        if main is not None:
            access.resume_main_weight(parameter, main)
    parts = Parts(
        mesh=mesh,
        module_hooks=module_hooks,
        parameter_handler=parameter_handler,
        pager=pager,
        storage=storage,
        stream=stream,
        stepper=stepper,
        groups=step_groups,
        access=access,
        exchange=exchange,
        template=template,
        updater=updater,
        clock=clock,
        reporter=_reporter(
            config, recording, clock, device, storage, stream, ranks.num, lambda: built[0].plan.prediction
        ),
        recording=recording,
        plan_tracker=plan_tracker,
        device=device,
        vertical=StepContext(
            module_hooks=module_hooks,
            pager=pager,
            stepper=stepper,
            clock=clock,
            device=device,
            space=SpillSpace(storage.open_more),
            activation_bytes=placement.activation_bytes if device.shares_host_memory else None,
            blocks=blocks,
            suitability=Suitability(inputs.config.infinity.schedule, reason_against),
        ),
        trimmer=trimmer,
        upper=upper,
        durable=durable,
    )
    if engine is None:
        engine = engine_class(config, parts)
    else:
        engine.relay(parts)
    built.append(engine)
    buffers.apply(device.torch_device)
    module_hooks.handles_of_others.append(buffers.explain_failures())
    give_back_freed_memory()
    return engine, originals


def _zeros(directories: Sequence[Path], numel: int) -> torch.Tensor:
    """fp32, 1-D: in memory, or on the drives where there are any."""
    if not directories:
        return torch.zeros(numel, dtype=torch.float32, device="cpu")
    return DriveTensors(directories).empty((numel,), torch.float32).zero_()


def _placed(
    inputs_of: Callable[[InfinityConfig], PlanInputs], config: InfinityConfig
) -> tuple[PlanInputs, Placement, str | None]:
    inputs = inputs_of(config)
    return inputs, *inputs.place()


def _placed_on_devices(
    ranks: Ranks, inputs_of: Callable[[InfinityConfig], PlanInputs], config: InfinityConfig
) -> tuple[PlanInputs, Placement, str | None]:
    """All weights on each rank's device, if all of them have the room."""
    found = None
    try:
        found = _placed(inputs_of, config)
    except BudgetTooSmallError as error:
        if error.key != DEVICE_KEY:
            raise
    has_room = all(is_there for (is_there,) in ranks.meet("placing all weights on devices", [int(found is not None)]))
    if found is not None and has_room:
        return found
    logger.warning(
        "the devices have no room for all weights, so each process keeps its share of them in host memory, as with "
        '"offload_param": {"device": "cpu"}'
    )
    return _placed(inputs_of, replace(config, offload_param=replace(config.offload_param, device="cpu")))


def _agreed(ranks: Ranks, placement: Placement, num_units: int) -> Placement:
    """What is to stay in memory whole does so on all ranks, or on none: budgets may differ."""
    stays = [int(index in placement.resident_units) for index in range(num_units)]
    everywhere = [all(of_unit) for of_unit in zip(*ranks.meet("laying out weights", stays), strict=True)]
    return replace(placement, resident_units=frozenset(i for i, on_all in enumerate(everywhere) if on_all))


def _close(engines: Sequence[Engine]) -> None:
    for engine in engines:
        engine.close(restore_weights=False)


def _reporter(
    config: InfinityConfig,
    recording: Recording | None,
    clock: StepClock,
    device: ComputeDevice,
    storage: EngineResources,
    stream: UpdateStream,
    num_processes: int,
    prediction: Callable[[], tuple[int, int, float | None]],
) -> Reporter:
    if recording is not None:
        storage.observe(recording.note_transfer)
    sources = Sources(
        clock,
        storage.counters,
        lambda: stream.busy_seconds,
        prediction,
        device.take_copies,
        lambda: (*process_bytes(), device.peak_bytes(), AlignedRegion.take_peak_bytes()),
        num_processes,
    )
    steps_per_print = config.steps_per_print if world().index == 0 else None
    return Reporter(sources, recording, steps_per_print=steps_per_print, prints_breakdown=config.wall_clock_breakdown)


def _take_over(
    units: Sequence[Unit],
    originals: Originals,
    access: StateAccess,
    residency: Residency,
    storage: EngineResources,
    parameter_handler: ParameterHandler,
    device: ComputeDevice,
    *,
    is_stored: bool,
    note: Note,
) -> None:
    """Store unit after unit, and let go of each one's original tensors as soon as it is stored.

    ``is_stored``: what a durable run goes on from is stored already; it takes the place of the originals.
    """
    for unit in units:
        flat = storage.pool.allocate(unit.num_bytes)
        if flat is None:
            raise RuntimeError("the pool for flat buffers is smaller than a unit")
        residency.place(unit, flat)
        originals.keep(unit)
        if not is_stored:
            access.store(unit, [parameter.detach() for parameter in unit.parameters])
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            parameter.grad = None
            hold(parameter, parameter_handler, slot.spec.dtype, device.torch_device)
        residency.evict(unit)
        note(unit.num_bytes)
