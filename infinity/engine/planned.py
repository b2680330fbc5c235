"""The plan of an engine: which process has which shard, and where weights and states are stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from infinity.config import InfinityConfig
from infinity.device.compute import ComputeDevice
from infinity.device.drive_tensors import on_drive
from infinity.device.host_memory import find_free_memory
from infinity.distributed.collectives import Ranks
from infinity.distributed.meshes import Mesh
from infinity.distributed.world import num_local_processes, world
from infinity.errors import BudgetTooSmallError, ConfigError
from infinity.machine.here import bandwidth_of
from infinity.optim.classes import OneBitAdam
from infinity.optim.wrapped_optimizer import WrappedOptimizer
from infinity.packed.selection import KEY, packed_weights
from infinity.plan.inputs import PlanInputs
from infinity.plan.placement import DEVICE_KEY, NUM_SHARD_BUFFERS, Placement
from infinity.units.layout import Chunk
from infinity.units.shards import Shards

logger = logging.getLogger(__name__)
_Placed = tuple[PlanInputs, Placement, str | None]
"""Inputs, placement, and why steps cannot go vertically."""


@dataclass(frozen=True)
class Planned(PlanInputs):
    """The plan that an engine is built from: where weights, states and gradients are stored."""

    placement: Placement
    reason_against: str | None
    """Why steps cannot go vertically; None: they may."""
    splits: list[int]
    """For each unit, the element of its trainable segment up to which records are in memory. Behind it they are on
    NVMe."""
    chunks: list[tuple[Chunk, ...]]
    """For each unit, the chunks whose records this process keeps."""
    shards: Shards
    """Which part of the states is this process's."""
    divides_weights: bool
    """Whether weights that do not stay in memory are divided among ranks, as in stage 3."""

    @property
    def has_remainder(self) -> bool:
        """Whether a model weight is one half of its main weight."""
        return self.config.infinity.main_weights == "remainder"


def _divided(mesh: Mesh, config: InfinityConfig) -> tuple[Shards, InfinityConfig]:
    """Say which shard of states and weights this rank has. The returned config may update later than the given one."""
    ranks = mesh.data
    shards = Shards(ranks.index, ranks.num) if config.zero_stage > 0 else Shards()
    needs_all = mesh.is_divided or (ranks.num > 1 and not shards.is_divided)
    if needs_all and config.infinity.update == "in_backward":  # no part is to be updated before all have met
        config = replace(config, infinity=replace(config.infinity, update="step" if ranks.num > 1 else "deferred"))
    return shards, config


def make_plan(
    model: nn.Module, config: InfinityConfig, wrapped_optimizer: WrappedOptimizer, device: ComputeDevice, mesh: Mesh
) -> Planned:
    """Place weights, states and gradients. All ranks call this at the same point.

    Raises:
        BudgetTooSmallError, ConfigError: the config asks for something that is not possible here.
    """
    # Before anything is allocated: an "auto" budget is a share of what is free now.
    free_memory = find_free_memory(
        holds_activations=device.uses_host_memory, num_processes=num_local_processes(), is_unified=device.is_unified
    )
    shards, config = _divided(mesh, config)
    ranks = mesh.data
    # Stages 1 and 2 divide states only. Stage 3 divides the weights as well.
    has_parts = config.zero_stage == 3 and shards.is_divided
    if has_parts and packed_weights(model, config.infinity.frozen_dtype, config.compute_dtype):
        has_parts = False  # a shard would cut through blocks that share a scale
        logger.warning(
            "%s packs weights, so each process keeps all weights, as with zero_optimization.stage 2. Optimizer states "
            "and gradients are divided. To divide the weights as well, remove %s from the config",
            KEY,
            KEY,
        )
    free_bytes = device.free_bytes(model)
    # The smallest of all ranks, so that all of them keep the same units whole on their devices.
    if has_parts and free_bytes is not None:
        free_bytes = min(free for (free,) in ranks.all_gather_ints("planning the memory of devices", [free_bytes]))

    def placed(config: InfinityConfig) -> _Placed:
        inputs = PlanInputs.of(
            model,
            config,
            wrapped_optimizer,
            free_memory,
            shards=shards,
            divides_weights=has_parts,
            is_alone=world().num == 1,
            uses_host_memory=device.uses_host_memory,
            device_free_bytes=free_bytes,
            bandwidth=bandwidth_of(config),
        )
        return inputs, *inputs.place()

    # Stage 3 with weights on "none": each rank holds all weights on its device, if every device has the room.
    fills_devices = has_parts and config.offload_param.device == "none" and not device.uses_host_memory
    inputs, placement, reason_against = _placed_on_devices(ranks, placed, config) if fills_devices else placed(config)
    _warn_of_nothing_packed(inputs)
    if has_parts:
        placement, reason_against = _agreed(ranks, placement, reason_against, len(inputs.units))
    if inputs.config.infinity.host_memory_budget is not None:
        # Weights that are in memory now are released as units are stored.
        in_memory = [parameter for parameter in model.parameters() if not on_drive(parameter)]
        free_memory.warn_beyond(
            placement.host_bytes(inputs.request), sum(p.numel() * p.element_size() for p in in_memory)
        )
    for unit in inputs.units:
        unit.is_persistent = unit.index in placement.resident_units
    # A unit with 1000 trainable elements on rank 1 of 2: span (500, 1000). If the states of 200 elements stay in
    # memory, the split is 700: records of [500, 700) are in memory and of [700, 1000) on NVMe. No chunk crosses it.
    # (Real numbers are multiples of the chunk granule.)
    splits = [span[0] + kept for span, kept in zip(inputs.spans, placement.states_in_memory, strict=True)]
    chunks = [
        unit.layout.chunks(placement.chunk_numel, split, span)
        for unit, split, span in zip(inputs.units, splits, inputs.spans, strict=True)
    ]
    return Planned(
        **vars(inputs),
        placement=placement,
        reason_against=reason_against,
        splits=splits,
        chunks=chunks,
        shards=shards,
        divides_weights=has_parts,
    )


def _warn_of_nothing_packed(inputs: PlanInputs) -> None:
    frozen_dtype = inputs.config.infinity.frozen_dtype
    if frozen_dtype is None or frozen_dtype == "bf16":
        return
    if not any(slot.spec.packed is not None for unit in inputs.units for slot in unit.layout.slots):
        logger.warning(
            "%s is %s, and nothing is packed: no weight of a linear layer is frozen. Freeze the base before "
            "infinity.initialize (requires_grad_(False)), or add adapters with PEFT",
            KEY,
            frozen_dtype,
        )


def _placed_on_devices(ranks: Ranks, placed: Callable[[InfinityConfig], _Placed], config: InfinityConfig) -> _Placed:
    """Place all weights on each rank's device if every device has the room, else in host memory."""
    found = None
    try:
        found = placed(config)
    except BudgetTooSmallError as error:
        # Any other budget is this rank's own problem, and cannot be cured by moving weights to host memory.
        if error.key != DEVICE_KEY:
            raise
    has_room = all(
        is_there for (is_there,) in ranks.all_gather_ints("placing all weights on devices", [int(found is not None)])
    )
    if found is not None and has_room:
        return found
    logger.warning(
        "the devices have no room for all weights, so each process keeps its shard of them in host memory, as with "
        '"offload_param": {"device": "cpu"}'
    )
    return placed(replace(config, offload_param=replace(config.offload_param, device="cpu")))


def _agreed(
    ranks: Ranks, placement: Placement, reason_against: str | None, num_units: int
) -> tuple[Placement, str | None]:
    """Make memory the same on all ranks, whose budgets may differ: resident units, and room for the others.

    So is the order of a step: if one rank has a reason against vertical steps, all have.
    """
    stays = [int(index in placement.resident_units) for index in range(num_units)]
    # Rank 0 keeps units 0, 1, 2 and rank 1 keeps 0, 1: rows [1, 1, 1, 90] and [1, 1, 0, 60]. Units 0 and 1 stay on all, in
    # 60 bytes.
    told = [*stays, placement.weights_bytes, reason_against is None]
    found = ranks.all_gather_ints("laying out weights", told)
    *everywhere, weights_bytes, can_be_vertical = (min(of_ranks) for of_ranks in zip(*found, strict=True))
    if not can_be_vertical:
        reason_against = reason_against or "another process has a reason against it"
    residents = frozenset(index for index, on_all in enumerate(everywhere) if on_all)
    num_buffers = NUM_SHARD_BUFFERS if len(residents) < num_units else 0
    placement = replace(
        placement, resident_units=residents, weights_bytes=weights_bytes, num_upload_buffers=num_buffers
    )
    return placement, reason_against


def exchanges_momenta(plan: Planned, mesh: Mesh, wrapped_optimizer: WrappedOptimizer, *, is_durable: bool) -> bool:
    """Whether momenta are exchanged in place of gradients, as 1-bit Adam does where each rank has all of them.

    Raises:
        ConfigError: processes have parts of the model, or the run is durable.
    """
    if not isinstance(wrapped_optimizer.optimizer, OneBitAdam) or mesh.data.num == 1:
        return False
    if mesh.is_divided:
        raise ConfigError.value(
            "optimizer.type",
            "OneBitAdam",
            f"processes have {mesh.parts.num} parts of the model, and after the warm-up 1-bit Adam clips by each "
            "one's norm",
            cure='Take "Adam", or let each process have the whole model',
        )
    if plan.shards.is_divided:
        logger.warning(
            "OneBitAdam with ZeRO's stage %d: momenta are not compressed, for each rank has a part of them. After "
            "freeze_step, whole gradients are averaged in fp32 as before, and the variance stays as it is. Set "
            "zero_optimization.stage to 0 for the exchange in one bit",
            plan.config.zero_stage,
        )
        return False
    if is_durable:
        raise ConfigError.value(
            "infinity.durable",
            True,
            "commits do not store what OneBitAdam's signs leave out, so a resumed run would have other numbers",
            cure="Set zero_optimization.stage to 1, where whole gradients are averaged, or leave it out and save checkpoints",
        )
    return True
