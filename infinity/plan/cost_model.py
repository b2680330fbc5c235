"""Predicts the bytes that a step reads from and writes to the drives, for a placement. Pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.utils._pytree import tree_map

from infinity.errors import BudgetTooSmallError
from infinity.paging.prefetch_schedule import simulate
from infinity.plan.placement import Placement, place, placements
from infinity.plan.sizes import FP32_BYTES, Request, UnitSize, divides_weights, has_shards
from infinity.plan.staging_sizes import price_of_chunks

# `placements` sorts by an estimate. The first four are simulated, and compared by the bytes that they really move.
_SIMULATED = 4
# With more units a simulation takes a good part of a second, so only the first placement is simulated.
_MANY_UNITS = 300
# After so many micro-batches each one moves what the one before did. More are extrapolated: a config may ask for 2^31.
_SIMULATED_CYCLES = 32
# By `infinity.activations`: one part in so many of what the budget leaves is for activations in host memory. With "cpu"
# all saved activations have to fit, with "memory" only the activation checkpoints of vertical steps.
_ACTIVATIONS_SHARE = {"memory": 4, "cpu": 2, "nvme": 4}
# The vertical order computes every block's forward twice. If it saves less of a step's bytes, the ordinary order is
# chosen.
_LEAST_SAVED_SHARE = 0.1


@dataclass(frozen=True)
class Traffic:
    """Facts about the last step that predictions depend on."""

    is_vertical: bool = False
    """Whether it went in the vertical order."""
    spilled_bytes: int = 0
    """Bytes of activation checkpoints that were written to NVMe, and read again."""
    resumed_bytes: int = 0
    """Bytes of incomplete sums of gradients that were written: of units that are used at several places."""

    @property
    def extra_bytes(self) -> int:
        """Bytes written, and read again, besides weights, states and complete gradients."""
        return self.spilled_bytes + self.resumed_bytes


@dataclass(frozen=True)
class Prediction:
    """Bytes that one step moves, in the steady state, when every parameter gets a gradient."""

    kinds: Mapping[str, tuple[int, int]]
    """(read, written) on the NVMe tier by kind: "weights", "optimizer state", "gradients"."""
    upload_bytes: int = 0
    """Bytes copied from host memory to a GPU; 0 if the CPU computes, and so for `download_bytes`."""
    download_bytes: int = 0
    """Bytes copied from a GPU to host memory."""

    @property
    def read_bytes(self) -> int:
        """All bytes that are read."""
        return sum(read for read, _ in self.kinds.values())

    @property
    def write_bytes(self) -> int:
        """All bytes that are written."""
        return sum(written for _, written in self.kinds.values())

    @property
    def moved_bytes(self) -> int:
        """All bytes that are read or written."""
        return self.read_bytes + self.write_bytes

    def in_vertical_order(self, units: Sequence[UnitSize], request: Request) -> Prediction:
        """The same with fp32 sums of the gradients of several micro-batches, where these are added up on a device."""
        if request.uses_host_memory or request.records_on_device or request.num_micro_batches == 1:
            return self
        wider = FP32_BYTES - request.record_format.weight_dtype.itemsize
        more = wider * sum(unit.trainable_numel for unit in units)
        return dataclasses.replace(self, download_bytes=self.download_bytes + more)

    def after(self, num_cycles: int, before: Prediction) -> Prediction:
        """The prediction for ``num_cycles`` more micro-batches; ``before`` is the one for a micro-batch less."""
        # Worked example: 31 micro-batches read 310 MB, 32 read 320. For 100 that is 320 + 68 * (320 - 310) = 1000 MB.
        return Prediction(**tree_map(lambda now, then: now + num_cycles * (now - then), vars(self), vars(before)))


def best_placement(units: Sequence[UnitSize], request: Request, order: Sequence[int]) -> Placement:
    """The best of a few placements by simulated bytes. One of them spends all memory on units that come and go.

    Raises:
        BudgetTooSmallError, ConfigError: see `place`.
    """

    def moved(placement: Placement) -> int:
        return predict(units, request, placement, order, len(units)).moved_bytes

    found = placements(units, request)[: _SIMULATED if len(units) <= _MANY_UNITS else 1]

    def priced(placement: Placement) -> int:
        chunks = price_of_chunks(units, request, placement.chunk_numel, placement.states_in_memory)
        return moved(placement) + chunks

    kept = min(found, key=priced)
    # If few units fit, keeping some of them resident leaves too little room for the others. Then it may be better to
    # keep none.
    try:
        passing = place(units, dataclasses.replace(request, keeps_in_memory=False))
    except BudgetTooSmallError:
        return kept
    return kept if moved(kept) <= moved(passing) else min(*found, passing, key=moved)


def predict(
    units: Sequence[UnitSize], request: Request, placement: Placement, order: Sequence[int], backward_start: int
) -> Prediction:
    """Predict the bytes of a step in which each micro-batch needs the units in ``order``.

    In the vertical order, the micro-batches of a step are one: see `Prediction.in_vertical_order`.
    """
    beyond = request.num_micro_batches - _SIMULATED_CYCLES
    if beyond <= 0:
        return _predict(units, request, placement, order, backward_start)
    before, last = (
        _predict(units, dataclasses.replace(request, num_micro_batches=number), placement, order, backward_start)
        for number in (_SIMULATED_CYCLES - 1, _SIMULATED_CYCLES)
    )
    return last.after(beyond, before)


def _predict(
    units: Sequence[UnitSize], request: Request, placement: Placement, order: Sequence[int], backward_start: int
) -> Prediction:
    sizes = [unit.weight_bytes for unit in units]
    records = spilled = 0
    num_micro_batches = request.num_micro_batches
    is_divided = divides_weights(units)
    # If all weights fit, they stay in memory from step to step, and ranks send each other what they have updated.
    stay = sum(sizes) <= placement.weights_bytes
    # (place in `order`, unit) of each fetch of a step in the steady state, as the parameter cache would do it.
    simulation = simulate(
        order,
        sizes,
        placement.weights_bytes - sum(sizes[index] for index in placement.resident_units),
        prefetches=request.prefetches,
        num_cycles=num_micro_batches,
        staying=placement.resident_units,
        lasting_until=backward_start if is_divided and not stay else None,
    )
    in_step = not request.updates_in_backward
    is_shared = has_shards(units)
    largest = max((unit.trainable_numel for unit in units), default=0) * request.scratch_itemsize
    # Ranks that exchange gradients in backward need room for two units at a time: one is summed, one exchanged. With
    # less, gradients are spilled first, as if there were no update in backward.
    lacks_room = not in_step and is_shared and placement.gradient_bytes < 2 * largest
    fetched = [unit for _, unit in simulation.fetches]
    on_nvme = placement.weights_on_nvme(len(units))
    read = sum(units[unit].stored_weight_bytes for unit in fetched if unit in on_nvme)
    if request.update == "deferred" and request.prefetches:
        # A deferred update runs when forward needs the unit, and writes the new weights to its flat buffer. So the first
        # fetch in a step is no read; later ones are.
        in_forward = {unit for position, unit in simulation.fetches if position < backward_start}
        filled = (units[unit] for unit in in_forward & on_nvme)
        read -= sum(unit.stored_weight_bytes for unit in filled if unit.is_all_trainable)
    weight_itemsize = request.record_format.weight_dtype.itemsize
    # Every trained weight on drives is written once in a step, whatever the order.
    write = sum(request.trainable_bytes(units[index]) for index in on_nvme)
    if request.record_format.needs_weight:
        # With remainders, the model weight is a part of the main weight, so an update needs it. It reads those that are
        # not in memory. An update in backward finds the weights that backward has just used; shards wait for the mean
        # first, and their unit may be evicted meanwhile.
        just_used = set() if in_step or is_shared else set(order[backward_start:])
        # If weights are divided and do not all fit, a unit is evicted before its update.
        goes_before = is_divided and len(simulation.held) < len(units)
        held = frozenset(placement.resident_units) if goes_before else simulation.held
        read += weight_itemsize * sum(units[index].written_numel for index in on_nvme - held.union(just_used))
    if request.optimizer_tier == "nvme":
        # Each record is read and written once, except those that stay in memory.
        records = sum(
            request.record_format.stored_bytes(unit.state_numel - kept, unit.num_states, placement.chunk_numel)
            for unit, kept in zip(units, placement.states_in_memory, strict=True)
        )
    if in_step or lacks_room or num_micro_batches > 1:
        spilled = sum(
            unit.trainable_numel * request.gradient_itemsize
            for index, unit in enumerate(units)
            if index not in placement.gradients_in_memory
        )
        # Each micro-batch reads the sum so far and writes the new one.
        spilled *= request.gradient_moves + lacks_room
    kinds = {"weights": (read, write), "optimizer state": (records, records), "gradients": (spilled, spilled)}
    copied = (0, 0)
    if not request.uses_host_memory:
        # Backward has just used what it updates. Sums of several micro-batches are complete when it has ended.
        in_backward = request.updates_in_backward and num_micro_batches == 1
        there = set(placement.resident_units).union(order[backward_start:] if in_backward else simulation.held)
        copied = _copied(units, request, placement, fetched, there, in_backward=in_backward)
    return Prediction(kinds, *copied)


def _copied(
    units: Sequence[UnitSize],
    request: Request,
    placement: Placement,
    fetched: Sequence[int],
    there: Collection[int],
    *,
    in_backward: bool,
) -> tuple[int, int]:
    """Bytes that go up to the device and down from it, where each of ``fetched`` comes into one of its flat buffers.

    Args:
        there: the units whose weights are in flat buffers when they are updated.
        in_backward: that is while backward runs, so their gradients wait nowhere.
    """
    up = sum(units[index].stored_weight_bytes for index in fetched)
    trained = sum(unit.trainable_numel for unit in units)
    # Gradients of several micro-batches are added up in host memory, each after its backward.
    gradients = request.num_micro_batches * trained * request.record_format.weight_dtype.itemsize
    if request.records_on_device:  # where units are updated: new weights that rest elsewhere go down
        down = sum(request.trainable_bytes(u) for i, u in enumerate(units) if i not in placement.resident_units)
        if placement.gradients_on_device or in_backward:
            return up, down
        return up + trained * request.gradient_itemsize, down + gradients
    updated = sum(request.trainable_bytes(units[index]) for index in there)
    down = updated if request.record_format.needs_weight else 0  # it is one half of each main weight
    return up + updated, down + gradients


def place_for_schedule(
    asked: str, units: Sequence[UnitSize], request: Request, order: Sequence[int]
) -> tuple[Placement, str | None]:
    """Choose the placement, and the order of steps: the reason for the ordinary order, or None for the vertical one.

    Args:
        asked: the config's ``infinity.schedule``.
        units, request: see `place`.
        order: the expected order in which one micro-batch needs its units.

    Raises:
        BudgetTooSmallError, ConfigError: see `infinity.plan.placement.place`.
    """
    reason = "the config asks for it" if asked == "ordinary" else None
    if asked == "auto" and request.num_micro_batches == 1:
        reason = "a step has one micro-batch"
    if reason is None:
        # In the vertical order all micro-batches pass a unit together, so weights and gradients move as with one
        # micro-batch.
        one = dataclasses.replace(request, num_micro_batches=1)
        placement = _with_activations(units, one, order, has_checkpoints=True)
        reason = reason_against(asked, units, request, placement, order)
        if reason is None:
            return placement, None
    return _with_activations(units, request, order, has_checkpoints=False), reason


def _with_activations(
    units: Sequence[UnitSize], request: Request, order: Sequence[int], *, has_checkpoints: bool
) -> Placement:
    # Activations get a share of what is left above the minimum, and the rest is placed with a smaller budget. With
    # "memory", ordinary steps leave activations outside of the budget, and vertical ones have activation checkpoints.
    activations = 0
    is_within = has_checkpoints or request.activations != "memory"
    if is_within and (request.uses_host_memory or request.activations == "cpu"):
        left = request.budget_bytes - place(units, request).minimum_bytes
        activations = left // _ACTIVATIONS_SHARE[request.activations]
    smaller = dataclasses.replace(request, budget_bytes=request.budget_bytes - activations)
    return dataclasses.replace(best_placement(units, smaller, order), activation_bytes=activations)


def reason_against(
    asked: str, units: Sequence[UnitSize], request: Request, placement: Placement, order: Sequence[int]
) -> str | None:
    """The reason for the ordinary order; None if the vertical one is worth computing blocks twice. See
    `place_for_schedule`."""
    # In the ordinary order, a GPU's gradients of each micro-batch are downloaded and summed by the CPU: 4 bytes per
    # parameter and micro-batch over the link. The vertical order sums on the GPU. With 8B parameters and 8 micro-batches
    # that takes 2 s, against 30 s or more.
    sums_on_gpu = request.num_micro_batches > 1 and not request.uses_host_memory and not placement.gradients_on_device
    if asked == "vertical" or sums_on_gpu:
        return None
    before = predict(units, request, placement, order, len(units)).moved_bytes
    one = dataclasses.replace(request, num_micro_batches=1)
    saved = before - predict(units, one, placement, order, len(units)).moved_bytes
    if saved < _LEAST_SAVED_SHARE * before or saved == 0:
        return "it would save hardly any bytes: weights and gradients stay in memory"
    return None
