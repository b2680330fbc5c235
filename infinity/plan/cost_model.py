"""What a step will read from and write to the drives, given what rests where.

Pure arithmetic; must not know tensors or files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from infinity.errors import BudgetTooSmallError
from infinity.paging.prefetch_schedule import simulate
from infinity.plan.placement import Placement, apparent_bytes, place, placements
from infinity.plan.sizes import FP32_BYTES, Request, UnitSize, divides_weights, has_shards

_SIMULATED = 4
"""So many ways to divide the budgets are compared by what they move."""
_MANY_UNITS = 300
"""With more, a simulation takes a good part of a second."""
_SIMULATED_CYCLES = 32
"""From there on each micro-batch moves what the last one did: pages have long been going round."""
_ACTIVATIONS_SHARE = {"memory": 4, "cpu": 2, "nvme": 4}
"""One part in so many of what the budget leaves is for units' inputs, or for all that waits for backward."""
_LEAST_SAVED_SHARE = 0.1
"""Less of a step's bytes than this is not worth computing everything once more."""


@dataclass(frozen=True)
class Traffic:
    """The order of the last step, as far as predictions depend on it."""

    is_vertical: bool = False
    """Whether all micro-batches went through a unit together."""
    spilled_bytes: int = 0
    """Bytes of units' inputs that were written to NVMe, and read again."""
    resumed_bytes: int = 0
    """Bytes of sums of gradients, of units used at several places, that were written before they were complete."""

    @property
    def extra_bytes(self) -> int:
        """What is written and read besides weights, states and complete gradients."""
        return self.spilled_bytes + self.resumed_bytes


@dataclass(frozen=True)
class Prediction:
    """Bytes that the NVMe tier reads and writes in one step, in the steady state, when every parameter gets a gradient."""

    read_bytes: int
    write_bytes: int
    kinds: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    """Of both, those that are "weights", "optimizer state" or "gradients"."""
    upload_bytes: int = 0
    """Copied from host memory to a device with memory of its own. 0 where the CPU computes, as of `download_bytes`."""
    download_bytes: int = 0
    """Copied from there to host memory."""

    def in_vertical_order(self, units: Sequence[UnitSize], request: Request) -> Prediction:
        """The same with fp32 sums of the gradients of several micro-batches, where these are added up on a device."""
        if request.uses_host_memory or request.records_on_device or request.num_micro_batches == 1:
            return self
        wider = FP32_BYTES - request.record_format.weight_dtype.itemsize
        more = wider * sum(unit.trainable_numel for unit in units)
        return dataclasses.replace(self, download_bytes=self.download_bytes + more)

    def after(self, num_cycles: int, before: Prediction) -> Prediction:
        """What so many more micro-batches make of it if each adds what the last one added to ``before``."""

        def at(now: int, then: int) -> int:
            return now + num_cycles * (now - then)

        kinds = {
            name: (at(read, before.kinds[name][0]), at(write, before.kinds[name][1]))
            for name, (read, write) in self.kinds.items()
        }
        return Prediction(
            at(self.read_bytes, before.read_bytes),
            at(self.write_bytes, before.write_bytes),
            kinds,
            at(self.upload_bytes, before.upload_bytes),
            at(self.download_bytes, before.download_bytes),
        )


def best_placement(units: Sequence[UnitSize], request: Request, order: Sequence[int], backward_start: int) -> Placement:
    """The best of a few ways to divide the budgets, or one with all memory for units that come and go if that moves fewer bytes.

    Raises:
        BudgetTooSmallError, ConfigError: see `place`.
    """

    def moved(placement: Placement) -> int:
        prediction = predict(units, request, placement, order, backward_start)
        return prediction.read_bytes + prediction.write_bytes

    found = placements(units, request)[: _SIMULATED if len(units) <= _MANY_UNITS else 1]
    kept = min(found, key=lambda placement: moved(placement) + apparent_bytes(units, request, placement))
    try:
        passing = place(units, dataclasses.replace(request, keeps_in_memory=False))
    except BudgetTooSmallError:
        return kept
    return kept if moved(kept) <= moved(passing) else min(*found, passing, key=moved)


def predict(
    units: Sequence[UnitSize], request: Request, placement: Placement, order: Sequence[int], backward_start: int
) -> Prediction:
    """Bytes per step for a model that touches its units in ``order`` in each micro-batch.

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
    read = records = spilled = 0
    num_micro_batches = request.num_micro_batches
    is_divided = divides_weights(units)
    # Where all fit, units stay in memory, and processes bring each other what they have updated.
    stay = sum(sizes) <= placement.weights_bytes
    simulation = simulate(
        order,
        sizes,
        placement.weights_bytes - sum(sizes[index] for index in placement.resident_units),
        prefetches=request.prefetches,
        num_cycles=num_micro_batches,
        staying=placement.resident_units,
        lasting_until=backward_start if is_divided and not stay else None,
    )
    fetches = simulation.fetches
    in_step = not request.updates_in_backward
    is_shared = has_shards(units)
    largest = max((unit.trainable_numel for unit in units), default=0) * request.scratch_itemsize
    lacks_room = not in_step and is_shared and placement.gradient_bytes < 2 * largest
    filled = (
        {unit for position, unit in fetches if position < backward_start and units[unit].is_all_trainable}
        if request.update == "deferred" and request.prefetches
        else set()
    )
    on_nvme = placement.weights_on_nvme(len(units))
    seen: set[int] = set()
    for position, unit in fetches:
        if in_step and unit in filled and unit not in seen and position < backward_start:
            seen.add(unit)  # its update leaves the new weights in the buffer
            continue
        if unit in on_nvme:
            read += units[unit].stored_weight_bytes
    weight_itemsize = request.record_format.weight_dtype.itemsize
    write = sum(request.trainable_bytes(units[index]) for index in on_nvme)
    if request.record_format.needs_weight:
        # An update reads the weights that are a part of its main weights, unless they are in memory: in backward, they are
        # if backward has just used them.
        just_used = set() if in_step or is_shared else set(order[backward_start:])  # shards wait for their means
        # Where weights are divided and not all fit, a unit makes room before its update.
        goes_before = is_divided and len(simulation.held) < len(units)
        held = frozenset(placement.resident_units) if goes_before else simulation.held
        read += weight_itemsize * sum(units[index].written_numel for index in on_nvme - held.union(just_used))
    if request.optimizer_tier == "nvme":
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
        spilled *= request.gradient_moves + lacks_room
    kinds = {"weights": (read, write), "optimizer state": (records, records), "gradients": (spilled, spilled)}
    if request.uses_host_memory:
        return Prediction(read + records + spilled, write + records + spilled, kinds)
    # Backward has just used what it updates. Sums of several micro-batches are complete when it has ended.
    in_backward = request.updates_in_backward and num_micro_batches == 1
    there = set(placement.resident_units).union(order[backward_start:] if in_backward else simulation.held)
    copied = _copied(units, request, placement, [unit for _, unit in fetches], there, in_backward=in_backward)
    return Prediction(read + records + spilled, write + records + spilled, kinds, *copied)


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
    up, weight_itemsize = (
        sum(units[index].stored_weight_bytes for index in fetched),
        request.record_format.weight_dtype.itemsize,
    )
    trained = sum(unit.trainable_numel for unit in units)
    # Gradients of several micro-batches are added up in host memory, each after its backward.
    gradients = request.num_micro_batches * trained * weight_itemsize
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
    """The placement, with room for activations if they may be spilled, and why steps go in the ordinary order (None: vertically).

    Args:
        asked: the config's ``infinity.schedule``.
        units, request: see `place`.
        order: in which one micro-batch is expected to touch its units.

    Raises:
        BudgetTooSmallError, ConfigError: see `infinity.plan.placement.place`.
    """
    if asked == "ordinary":
        return _for_ordinary_steps(units, request, order), "the config asks for it"
    if asked == "auto" and request.num_micro_batches == 1:
        return _for_ordinary_steps(units, request, order), "a step has one micro-batch"
    # Gradients take what they take with one micro-batch: they are summed before they go anywhere.
    placement = _with_activations(units, dataclasses.replace(request, num_micro_batches=1), order)
    reason = reason_against(asked, units, request, placement, order)
    if reason is not None:
        placement = _for_ordinary_steps(units, request, order)
    return placement, reason


def _for_ordinary_steps(units: Sequence[UnitSize], request: Request, order: Sequence[int]) -> Placement:
    if request.activations != "memory":
        return _with_activations(units, request, order)
    return best_placement(units, request, order, len(units))


def _with_activations(units: Sequence[UnitSize], request: Request, order: Sequence[int]) -> Placement:
    activations = 0
    if request.uses_host_memory or request.activations == "cpu":
        left = request.budget_bytes - place(units, request).minimum_bytes
        activations = left // _ACTIVATIONS_SHARE[request.activations]
    smaller = dataclasses.replace(request, budget_bytes=request.budget_bytes - activations)
    return dataclasses.replace(best_placement(units, smaller, order, len(units)), activation_bytes=activations)


def sums_gradients_on_host(request: Request, placement: Placement) -> bool:
    """Whether each micro-batch's gradients would leave a GPU, and the CPU would add them up: 4 bytes down the link for each.

    The vertical order adds them up where they are made. With 8B parameters and 8 micro-batches that is 2 s against 30 or more.
    """
    return request.num_micro_batches > 1 and not request.uses_host_memory and not placement.gradients_on_device


def reason_against(
    asked: str, units: Sequence[UnitSize], request: Request, placement: Placement, order: Sequence[int]
) -> str | None:
    """Why steps had better go in the ordinary order; None if the vertical one is worth it.

    Args:
        asked: the config's ``infinity.schedule``.
        units, request, placement: see `infinity.plan.placement`.
        order: in which one micro-batch is expected to touch its units.
    """
    if asked == "vertical" or sums_gradients_on_host(request, placement):
        return None
    ordinary = predict(units, request, placement, order, len(units))
    vertical = predict(units, dataclasses.replace(request, num_micro_batches=1), placement, order, len(units))
    before = ordinary.read_bytes + ordinary.write_bytes
    saved = before - vertical.read_bytes - vertical.write_bytes
    if saved < _LEAST_SAVED_SHARE * before or saved == 0:
        return "it would save hardly any bytes: weights and gradients stay in memory"
    return None
