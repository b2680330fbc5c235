"""Divides the host memory budget, and that of a GPU. Pure arithmetic on sizes.

    host memory budget
    | flat buffers: resident units, and room for the others | staging | gradients | weights and states kept |
With a GPU, flat buffers are in its memory. The host budget has a few small staging buffers for uploads in their place.
If ranks divide weights, it has two as large as the largest shard, on the CPU as well.

[Note: how it is divided]
A byte of memory can do two things. It can keep something off the drives: a unit's weights, read twice per micro-batch and
written once, save most, then gradients, then states (``keep_in_memory``). Or it can let drives and model work at the
same time, by staging buffers in flight and room to fetch ahead. The first is measured in bytes that a step does not
move. The second has no such measure. And the more units are resident, the less room the others need, down to none. So
the best choice for one unit more may not be the best for all of them. Hence:
  1. `_Planner.options`: some numbers of units that stay, with and without all states in memory. Each costs what all else
     needs at least: room for the two largest of the other units, three staging buffers, the gradients of the largest unit.
  2. `_Planner.divide`, for each, with staging buffers of some sizes: at most half of what is left goes to staging (staging
     buffers first, see `_Planner._staged`), all else keeps things off the drives, each kind as much as fits.
  3. The option with the highest score is taken: bytes saved, less what its chunks cost. An engine simulates the first few.
Eight units of 8 Mi parameters in bf16 with remainders: weights of 16 MiB, states of 80, gradients of 32 (fp32, one
micro-batch, updates in backward). Keeping the weights of one saves 48 MiB in a step. A budget of 200, in MiB:

    units that stay |  least: flat + staging + gradients | staging | kept with the rest      | saved | chunks      | score
                 0  |    67:   32  +   3   +    32     |  66.5   | 4 units (64), states 2.5 |  197  | 248 (-124)  |   73
                 8  |   163:  128  +   3   +    32     |  18.5   | states 18.5              |  421  | 480 (-240)  |  181

A budget of 60 is refused, and the message names 67. With 100, not all 8 can be resident.
The parts never exceed the budget. The minimum in the message is that of the cheapest option.
An earlier version sized staging in proportion to its wishes. Staging buffers became so small that Python's time per
chunk was the larger loss. So staging buffers come first now, and each chunk has a price (`price_of_chunks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from infinity.errors import BudgetTooSmallError, format_bytes
from infinity.plan.keep_in_memory import (
    most_gradients,
    order_of_weights,
    select_gradients,
    select_states,
    select_weights,
)
from infinity.plan.sizes import FP32_BYTES, Request, UnitSize, divides_weights, has_shards, needed_together
from infinity.plan.staging_sizes import FEWEST_BUFFERS, GOOD_STAGING_BYTES, StagingSizes, price_of_chunks

HOST_KEY = "infinity.host_memory_budget"
DEVICE_KEY = "infinity.device_memory_budget"
_UPLOAD_BUFFER_BYTES = 4 << 20  # 4 MiB: a read and a copy per buffer
_UPLOAD_BUFFERS = 2, 8  # the fewest (one is read, one copied), and the most that are asked for
NUM_SHARD_BUFFERS = 2  # the same if ranks divide weights, and each buffer holds a shard: one is read, one is sent
_GRANULE = 4096  # bytes, as of direct I/O
_LEAST_LANDING_BYTES = 8 << 20  # pinned memory for gradients that a GPU sends: two blocks of 4 MiB
_LANDING_GAP_BYTES = 4096  # the most that alignment wastes per unit
_UNITS_LANDING = 2  # so many units' gradients may be on their way from a GPU, if there is room
_UNITS_AHEAD = 2  # besides the two units that are needed: one being fetched, one being updated
_MOST_OPTIONS = 48  # numbers of resident units that are tried: bounds the time to plan
# Gradients in GPU memory: one unit's that autograd makes, and two whose update has not fetched them yet.
_UNITS_OF_GRADIENTS = 3
# With shards: one unit's gradients are summed, one's exchanged, and one's are in the update.
_UNITS_ON_THE_WAY = 3
_CHUNKS_ON_DEVICE = 2  # chunks with working memory on a GPU that runs updates
# Unpacking 8 bytes, in forward and backward, counts as much as one byte read: so weights stored packed in RAM are worth
# less than unpacked ones in flat buffers.
_UNPACKED_PER_READ = 8
# The part of a GPU's remaining memory that weights get. The rest is for activations, which are unknown before a step.
_SHARE_OF_DEVICE = 0.65


@dataclass(frozen=True)
class Placement:
    """The division of the budget."""

    weights_bytes: int
    """Capacity for flat buffers, in GPU memory if there is a GPU; includes `resident_units`."""
    staging_buffer_bytes: int
    num_staging_buffers: int
    chunk_numel: int
    upload_buffer_bytes: int
    num_upload_buffers: int
    gradient_bytes: int
    """For main gradients, or gradients on their way into an update in backward."""
    gradient_scratch_bytes: int
    gradients_in_memory: tuple[int, ...]
    """Units whose main gradients stay in memory; those of the others are spilled."""
    resident_units: frozenset[int]
    """Units whose weights are stored in their flat buffers only."""
    hosted_units: frozenset[int]
    """Units whose weights, or this process's shard of them, are stored in host memory outside of flat buffers."""
    states_in_memory: tuple[int, ...]
    """For each unit, the number of elements whose states are in host memory: the first ones of this process's shard."""
    kept_bytes: int
    """Host memory for weights (outside of flat buffers) and states that are stored there."""
    minimum_bytes: int
    spills: bool
    """Whether some main gradients go to NVMe."""
    landing_bytes: int = 0
    """Pinned memory for gradients on their way from a GPU."""
    gradients_on_device: bool = False
    """Whether `gradient_bytes` are GPU memory, where updates run. Otherwise they are host memory."""
    activation_bytes: int = 0
    """For activation checkpoints, or all spilled activations."""

    def weights_on_nvme(self, num_units: int) -> frozenset[int]:
        """Units whose weights are stored on NVMe."""
        return frozenset(range(num_units)) - self.resident_units - self.hosted_units

    def host_bytes(self, request: Request) -> int:
        """The sum of all parts in host memory."""
        staging = self.staging_buffer_bytes * self.num_staging_buffers
        uploads = self.upload_buffer_bytes * self.num_upload_buffers
        flats = self.weights_bytes if request.uses_host_memory else 0
        gradients = self.landing_bytes + (0 if self.gradients_on_device else self.gradient_bytes)
        return flats + staging + uploads + gradients + self.kept_bytes + self.activation_bytes

    def budget_of_weights(self, request: Request) -> tuple[str, int]:
        """The config key of the budget that flat buffers belong to, and its value."""
        if request.uses_host_memory:
            return HOST_KEY, request.budget_bytes
        return DEVICE_KEY, request.device_budget_bytes or self.weights_bytes


class _Needs(NamedTuple):
    """The least bytes of host memory that an option needs, by purpose."""

    flat: int
    staging_buffers: int
    uploads: int
    """Pinned memory in which weights wait for their copy to a GPU."""
    landing: int
    """Pinned memory for gradients on their way from a GPU: `Placement.landing_bytes`."""
    gradients: int
    kept: int
    """Weights outside of flat buffers, and states."""
    map: int
    """See `Request.map_bytes`, and the method of the next name."""
    update: int


@dataclass(frozen=True)
class _Option:
    """One way to divide: the units that are resident from the start, and the least that everything else needs."""

    residents: frozenset[int]
    """Indices of units whose weights stay in their flat buffers."""
    hosts_all: bool
    """Whether all other units, or this process's shards of them, are stored in host memory."""
    keeps_all_records: bool
    """Whether the optimizer state of all units is stored in host memory."""
    needs: _Needs

    @property
    def cost_bytes(self) -> int:
        return sum(self.needs)


def place(units: Sequence[UnitSize], request: Request) -> Placement:
    """Divide the budgets: see `placements`."""
    return placements(units, request)[0]


def placements(units: Sequence[UnitSize], request: Request) -> list[Placement]:
    """Ways to divide the budgets, the best first by an estimate without simulation.

    Raises:
        BudgetTooSmallError: names the minimum.
        ConfigError: ``staging_buffer_bytes`` is too small for one chunk.
    """
    planner = _Planner(units, request)
    planner.divide_device_memory()
    options = list(planner.options())
    least = min(options, key=lambda option: option.cost_bytes)
    if request.budget_bytes < least.cost_bytes:
        raise BudgetTooSmallError(
            HOST_KEY,
            budget_bytes=request.budget_bytes,
            minimum_bytes=least.cost_bytes,
            reason=_explain(units, request, least),
        )
    found = [pair for option in options for pair in planner.divide(option, least.cost_bytes)]
    return [placement for _, placement in sorted(found, key=lambda pair: pair[0], reverse=True)]


def with_codes_on_device(units: Sequence[UnitSize], request: Request) -> list[UnitSize]:
    """Let packed weights rest in GPU memory, of as many units as there is room for, and of no others.

    Raises:
        BudgetTooSmallError: the units that are needed together do not fit.
    """
    return _Planner([replace(unit, keeps_codes=False) for unit in units], request).with_codes_on_device()


class _Planner:
    def __init__(self, units: Sequence[UnitSize], request: Request) -> None:
        self._units = units
        self._request = request
        self._order = order_of_weights(units, request)
        self._sizes = [unit.weight_bytes for unit in units]
        self._total = sum(self._sizes)
        self._largest_numel = max(unit.trainable_numel for unit in units)
        self._records = sum(request.record_bytes(unit) for unit in units)
        widest = max((unit.num_states for unit in units), default=0)
        self._staging_sizes = StagingSizes(request, widest, self._largest_numel)
        self._all_gradients = sum(unit.trainable_numel for unit in units) * request.scratch_itemsize
        self._gradients_on_device = request.records_on_device and request.is_alone and self._has_room_for_gradients()
        self._is_divided = has_shards(units)
        self._is_packed = any(unit.packed_bytes is not None for unit in units) and not divides_weights(units)
        """Whether some unit takes less memory stored than in use."""
        self._device_bytes = self._total
        self._is_gathered = divides_weights(units)
        """Whether a unit is gathered from all ranks, each of which reads its shard."""
        self._upload_buffer_bytes, self._num_upload_buffers = _UPLOAD_BUFFER_BYTES, _UPLOAD_BUFFERS
        if self._is_gathered:
            largest = max((unit.weight_shard_bytes or 1 for unit in units), default=1)
            self._upload_buffer_bytes = -(-largest // _GRANULE) * _GRANULE
            self._num_upload_buffers = NUM_SHARD_BUFFERS, NUM_SHARD_BUFFERS
        self._on_device: frozenset[int] = frozenset()

    # ------------------------------------------------------------------------------------------------------ the device

    def with_codes_on_device(self) -> list[UnitSize]:
        """The units, of which some keep their packed weights on a GPU."""
        # A layer of 70B in bf16 has 1.7 GB, and 0.48 GB in NF4. With a budget of 15 GB, 3 * (1.7 + 0.48) = 6.6 GB are
        # for the layer in use and two on their way, and the packed weights of 17 of the 80 layers fit into the rest.
        units, request = self._units, self._request
        packed = [index for index in self._order if units[index].codes_bytes]
        # A durable run has all its weights in its files.
        is_possible = request.param_tier != "none" and request.keeps_in_memory and not request.num_versions
        if request.uses_host_memory or self._is_gathered or not packed or not is_possible:
            return [*units]
        budget, beside = self._device_budget()
        if budget >= self._total:
            return [*units]  # unpacked, they need not be unpacked in each forward and backward
        needed = max(self._in_use_and_coming(self._order), needed_together(units, request, self._order))
        kept, _ = select_weights([unit.codes_bytes for unit in units], packed, budget - int(needed * (1 + beside)))
        return [replace(unit, keeps_codes=index in kept) for index, unit in enumerate(units)]

    def divide_device_memory(self) -> None:
        """Decide which units are resident on a GPU.

        Raises:
            BudgetTooSmallError: the units that are needed together do not fit.
        """
        request = self._request
        if request.uses_host_memory:
            return
        budget, beside = self._device_budget()
        budget -= sum(unit.codes_on_device for unit in self._units)
        self._device_bytes = min(self._total, budget if budget >= self._total else int(budget / (1 + beside)))
        if request.param_tier == "none":
            self._on_device = frozenset(self._order)
        elif request.keeps_in_memory:
            kept = [self._residents_in(prefix, self._device_bytes) for prefix in self._prefixes()]
            residents = max(kept, key=lambda residents: sum(self._sizes[index] for index in residents))
            self._on_device = frozenset(index for index in residents if not self._units[index].keeps_codes)

    def _device_budget(self) -> tuple[int, float]:
        """GPU memory for weights; and how much more than its size a unit takes while it is unpacked."""
        request = self._request
        least = self._total if request.param_tier == "none" else needed_together(self._units, request, self._order)
        # Packed weights are uploaded to memory beside the flat buffer, and unpacked into it. So a unit needs up to (1 +
        # beside) times its size, with the largest ratio of all units.
        packed = max((unit.packed_bytes / unit.weight_bytes for unit in self._units if unit.packed_bytes), default=0.0)
        beside = packed if request.param_tier != "none" else 0.0
        least = int(least * (1 + beside))
        budget = request.device_budget_bytes
        if budget is None:
            return self._automatic_device_budget(least), beside
        if budget < least:
            raise BudgetTooSmallError(
                DEVICE_KEY,
                budget_bytes=budget,
                minimum_bytes=least,
                reason="The two largest units must be resident together",
            )
        return budget, beside

    def _has_room_for_gradients(self) -> bool:
        """Whether all main gradients fit into GPU memory, besides all weights."""
        request = self._request
        if request.device_budget_bytes is not None:
            return self._total + self._all_gradients <= request.device_budget_bytes
        if request.device_free_bytes is None:
            return True
        left = request.device_free_bytes - self._beside_weights() - self._all_gradients
        return self._total <= int(_SHARE_OF_DEVICE * left)

    def _beside_weights(self) -> int:
        """Bytes of GPU memory that the engine needs besides weights and main gradients."""
        request = self._request
        itemsize = request.record_format.weight_dtype.itemsize
        # The second one is for a norm in fp32.
        others = (_UNITS_OF_GRADIENTS * itemsize + FP32_BYTES) * self._largest_numel
        if request.records_on_device:
            chunk_numel, _, _ = self._staging_sizes.cut(0, keeps_all_records=True)
            working_bytes = chunk_numel * (FP32_BYTES + request.record_format.weight_dtype.itemsize)
            others += self._records + _CHUNKS_ON_DEVICE * working_bytes
        return others

    def _automatic_device_budget(self, least_bytes: int) -> int:
        request = self._request
        if request.device_free_bytes is None:
            return self._total
        others = self._beside_weights() + (self._all_gradients if self._gradients_on_device else 0)
        left = request.device_free_bytes - others
        if left < least_bytes:
            raise BudgetTooSmallError(
                DEVICE_KEY,
                budget_bytes=max(left, 0),
                minimum_bytes=least_bytes,
                reason=f"The device has {format_bytes(request.device_free_bytes)} free, of which gradients"
                f"{' and optimizer states' if request.records_on_device else ''} take {format_bytes(others)}, and "
                f"{format_bytes(least_bytes)} of weights must be there together",
                cure="Free memory on the device, offload more (offload_param, offload_optimizer), or name smaller "
                "modules in infinity.units",
            )
        return max(least_bytes, int(_SHARE_OF_DEVICE * left))

    def _residents_in(self, prefix: frozenset[int], capacity_bytes: int) -> frozenset[int]:
        # The prefix, and of the others those that fit, once there is room for the one in use and two more on their way.
        rest = [index for index in self._order if index not in prefix]
        room = capacity_bytes - sum(self._sizes[index] for index in prefix) - self._in_use_and_coming(rest)
        if room < 0:
            return frozenset()
        fits = self._bytes_of(rest) <= room
        steady = [index for index in rest if fits or not self._units[index].is_routed]
        return prefix.union(select_weights(self._sizes, steady, room)[0])

    def _in_use_and_coming(self, indices: Sequence[int]) -> int:
        """Bytes for the one unit that is used and those that are on their way."""
        largest = max((self._sizes[index] for index in indices), default=0)
        return min((1 + _UNITS_AHEAD) * largest, self._bytes_of(indices))

    def _bytes_of(self, indices: Sequence[int]) -> int:
        return sum(self._sizes[index] for index in indices)

    def _prefixes(self) -> Iterator[frozenset[int]]:
        """Yield the first n units in the order of keeping, for each n that changes the room that the others need."""
        # That room depends on the largest of the others. With equal units it is the same for all n but the last two, so
        # they are tried only: 0, 7 and 8 of 8. How many more fit, `_kept_weights` finds out.
        order, sizes = self._order, self._sizes
        count = len(order)
        steady = sum(not self._units[index].is_routed for index in order)
        borders = [n for n in range(1, count) if sizes[order[n]] != sizes[order[n - 1]] or n == count - 1]
        borders = [n for n in borders if n <= steady]
        step = -(-len(borders) // _MOST_OPTIONS) if borders else 1
        for length in sorted({0, count, *borders[::step]}):
            yield frozenset(order[:length])

    # -------------------------------------------------------------------------------------------------------- the host

    def _option(self, residents: frozenset[int], *, hosts_all: bool, records: bool) -> _Option:
        request = self._request
        moving = [index for index in self._order if index not in residents]
        flat_bytes = upload_bytes = 0
        kept_bytes = request.shards_in_memory(self._units) or 0
        if request.uses_host_memory:
            flat_bytes = self._bytes_of([*residents]) + needed_together(self._units, request, moving)
        if hosts_all and request.shards_in_memory(self._units) is None:
            kept_bytes = sum(self._units[index].stored_weight_bytes for index in moving)
        if moving and (self._is_gathered or not (request.uses_host_memory or hosts_all)):
            upload_bytes = self._num_upload_buffers[0] * self._upload_buffer_bytes
        if records:
            kept_bytes += self._records
        numel = self._largest_numel if request.can_spill else sum(unit.trainable_numel for unit in self._units)
        num_staging_buffers = 0 if request.records_on_device else FEWEST_BUFFERS
        needs = _Needs(
            flat=flat_bytes,
            staging_buffers=self._staging_sizes.smallest_bytes * num_staging_buffers,
            uploads=upload_bytes,
            landing=min(self._wished_landing(), _LEAST_LANDING_BYTES),
            # Even with updates in backward, the first step keeps all gradients: nothing is known of the model yet.
            gradients=0 if self._gradients_on_device else numel * request.scratch_itemsize,
            kept=kept_bytes,
            map=request.map_bytes(self._units),
            update=request.update_bytes(self._units),
        )
        return _Option(residents, hosts_all, records, needs)

    def options(self) -> Iterator[_Option]:
        """Yield all options: with and without all records, and with the possible numbers of resident units."""
        request = self._request
        records = {request.keeps_all_records, request.keeps_all_records or self._may_keep_records()}
        for keeps_records in sorted(records, reverse=True):
            if not request.uses_host_memory:
                always, may = request.param_tier == "cpu", request.param_tier == "nvme" and request.keeps_in_memory
                for hosts_all in sorted({always, may or always}, reverse=True):
                    yield self._option(self._on_device, hosts_all=hosts_all, records=keeps_records)
            elif request.shards_in_memory(self._units) is not None:
                yield self._option(frozenset(), hosts_all=True, records=keeps_records)
            elif request.keeps_all_weights:
                yield self._option(frozenset(self._order), hosts_all=False, records=keeps_records)
                if self._is_packed:
                    yield self._option(frozenset(), hosts_all=True, records=keeps_records)
            else:
                for prefix in self._prefixes() if request.keeps_in_memory else [frozenset[int]()]:
                    yield self._option(prefix, hosts_all=False, records=keeps_records)
                if self._is_packed and request.keeps_in_memory:
                    yield self._option(frozenset(), hosts_all=True, records=keeps_records)

    def _may_keep_records(self) -> bool:
        return self._request.keeps_in_memory and self._request.optimizer_tier == "nvme"

    def divide(self, option: _Option, minimum_bytes: int) -> Iterator[tuple[tuple[int, int], Placement]]:
        """Yield the placements of ``option``, each with its score; none if the budget is too small."""
        if option.cost_bytes <= self._request.budget_bytes:
            for enough in self._staging_sizes.enough_bytes(keeps_all_records=option.keeps_all_records):
                yield self._divided(option, minimum_bytes, enough)

    def _divided(
        self, option: _Option, minimum_bytes: int, enough_staging_bytes: int
    ) -> tuple[tuple[int, int], Placement]:
        units, request = self._units, self._request
        moving = [index for index in self._order if index not in option.residents]
        given = self._staged(option, moving, enough_staging_bytes)
        left = request.budget_bytes - sum(given)
        chunk_numel, staging_buffer_bytes, num_staging_buffers = self._staging_sizes.cut(
            given.staging_buffers, keeps_all_records=option.keeps_all_records
        )

        # What is left is spent on weights, then gradients, then states.
        taken, packed, left, saved = self._kept_weights(option, moving, left)
        capacity = self._all_gradients if self._gradients_on_device else given.gradients
        if request.gradient_moves:
            spare = self._wished_gradients() - capacity
            capacity += max(min(spare, left if request.keeps_in_memory else left // 2), 0)
        states = tuple(unit.state_numel if option.keeps_all_records else 0 for unit in units)
        choices = list(select_gradients(units, request, capacity))
        chosen = most_gradients(choices)
        if self._may_keep_records() and not option.keeps_all_records:
            rooms = [(left - max(each.num_bytes - given.gradients, 0), each) for each in choices]
            # More gradients in memory leave less room for states. The bound assumes that all the room saves 2 bytes per
            # byte; choices are tried from the highest bound on, until no bound can beat the best.
            most = [each.saved_bytes + 2 * min(room, self._records) for room, each in rooms]
            best = (-1, 0)
            for number in sorted(range(len(rooms)), key=lambda number: -most[number]):
                if most[number] < best[0]:
                    break
                room, candidate = rooms[number]
                kept, rest = select_states(units, request, room)
                if (gain := (candidate.saved_bytes + 2 * (room - rest), -number)) > best:
                    best, chosen, states = gain, candidate, kept
        saved += chosen.saved_bytes + 2 * self._kept_records(states)
        kept_bytes = given.kept + (0 if option.keeps_all_records else self._kept_records(states))
        left -= kept_bytes - given.kept
        gradient_bytes = max(chosen.num_bytes, given.gradients)
        if not self._gradients_on_device:
            left -= gradient_bytes - given.gradients

        is_resident = request.uses_host_memory and not option.hosts_all
        hosted = frozenset(packed if is_resident else taken)
        # Then no unit is read from a drive on its way to a GPU, and no upload buffers are needed.
        hosts_others = not self._is_gathered and len(hosted) == len(moving)
        residents = option.residents.union(taken) if is_resident else option.residents
        weights_bytes = self._device_bytes
        if request.uses_host_memory:
            base = given.flat + (self._bytes_of(taken) if is_resident else 0)
            kept_bytes += sum(units[index].stored_weight_bytes for index in packed)
            weights_bytes = min(base + left, self._total)
            left -= max(weights_bytes - base, 0)
        elif not option.hosts_all:  # else `_Option.needs` has counted these weights
            kept_bytes += sum(units[index].stored_weight_bytes for index in taken)
        if not request.uses_host_memory or weights_bytes == self._total:
            # Spare memory goes to gradients: a loop with `optimizer.step()` of its own keeps all of them until then.
            more = max(min(left, self._all_gradients - gradient_bytes), 0)
            left -= more
            gradient_bytes += more
        chosen = most_gradients(select_gradients(units, request, gradient_bytes))
        placement = Placement(
            weights_bytes=weights_bytes,
            staging_buffer_bytes=staging_buffer_bytes,
            num_staging_buffers=num_staging_buffers,
            chunk_numel=chunk_numel,
            upload_buffer_bytes=self._upload_buffer_bytes,
            num_upload_buffers=0 if hosts_others else given.uploads // self._upload_buffer_bytes,
            landing_bytes=given.landing,
            gradient_bytes=gradient_bytes,
            gradients_on_device=self._gradients_on_device,
            gradient_scratch_bytes=chosen.scratch_bytes,
            gradients_in_memory=chosen.units,
            resident_units=residents,
            hosted_units=hosted,
            states_in_memory=states,
            kept_bytes=kept_bytes,
            minimum_bytes=minimum_bytes,
            spills=chosen.num_units < len(chosen.by_size),
        )
        return (saved - price_of_chunks(units, request, chunk_numel, states), left), placement

    def _kept_weights(self, option: _Option, moving: list[int], left: int) -> tuple[list[int], list[int], int, int]:
        """Choose which of the other units are kept: (kept, kept packed, room left, bytes saved in a step by all kept
        ones)."""
        units, request = self._units, self._request
        saved = sum(request.saved_by_weights(units[index]) for index in option.residents)
        taken: list[int] = moving if option.hosts_all else []
        packed: list[int] = []
        """With a CPU, units that are kept in RAM in their packed form."""
        if request.keeps_in_memory and not option.hosts_all:
            stored = [unit.stored_weight_bytes for unit in units]
            sizes = self._sizes if request.uses_host_memory else stored
            # Unless all experts fit, none is made resident: in shared memory, those that are used most stay by
            # themselves.
            fits = sum(sizes[index] for index in moving) <= left
            steady = [index for index in moving if fits or not units[index].is_routed]
            if self._is_packed and request.uses_host_memory and not fits:
                packed, left = select_weights(stored, [i for i in steady if units[i].packed_bytes is not None], left)
            taken, left = select_weights(sizes, [index for index in steady if index not in set(packed)], left)
        saved += sum(request.saved_by_weights(units[index]) for index in (*taken, *packed))
        if request.uses_host_memory:
            unpacked = [index for index in (*packed, *taken) if units[index].packed_bytes is not None]
            saved -= sum(self._sizes[i] for i in unpacked if i in packed or option.hosts_all) // _UNPACKED_PER_READ
        return taken, packed, left, saved

    def _kept_records(self, numels: Sequence[int]) -> int:
        record_bytes = self._request.record_format.record_bytes
        return sum(record_bytes(numel, unit.num_states) for numel, unit in zip(numels, self._units, strict=True))

    def _wished_gradients(self) -> int:
        # More memory for gradients than this is of no use. With updates in backward and one micro-batch: two units (or
        # three with shards) on their way into the update. Otherwise all of them, and bf16 ones need a scratch for one
        # fp32 sum.
        request = self._request
        numel = sum(unit.trainable_numel for unit in self._units)
        if request.gradient_moves == 0 and self._is_divided:
            return min(_UNITS_ON_THE_WAY * self._largest_numel, numel) * request.scratch_itemsize
        if request.gradient_moves == 0:
            return 2 * self._largest_numel * request.gradient_itemsize
        if request.gradient_itemsize < request.scratch_itemsize:
            narrow = numel * request.gradient_itemsize + self._largest_numel * request.scratch_itemsize
            return min(narrow, numel * request.scratch_itemsize)
        return numel * request.scratch_itemsize

    def _wished_landing(self) -> int:
        """Bytes for gradients that a GPU sends: in the compute dtype, or fp32 sums of several micro-batches."""
        request = self._request
        if request.uses_host_memory or self._gradients_on_device or not self._largest_numel:
            return 0
        itemsize = request.record_format.weight_dtype.itemsize if request.num_micro_batches == 1 else FP32_BYTES
        return _UNITS_LANDING * (self._largest_numel * itemsize + _LANDING_GAP_BYTES)

    def _staged(self, option: _Option, moving: Sequence[int], enough_staging_bytes: int) -> _Needs:
        """The least needs of ``option``, raised by at most half of what the budget leaves."""
        # Staging buffers come first, up to a good size, then gradients that shards need. The rest is divided in
        # proportion to the wishes: with 30 granted, wishes of 40 and 20 get 20 and 10.
        request, needs = self._request, option.needs
        wished = dict.fromkeys(("staging_buffers", "flat", "uploads", "gradients", "landing"), 0)
        if needs.staging_buffers and not (request.staging_buffer_bytes is not None and option.keeps_all_records):
            wished["staging_buffers"] = max(enough_staging_bytes - needs.staging_buffers, 0)
        if request.uses_host_memory:
            ahead = _UNITS_AHEAD * max((self._sizes[index] for index in moving), default=0)
            room = needs.flat - self._bytes_of([*option.residents])
            wished["flat"] = max(min(ahead, self._bytes_of(moving) - room), 0)
        elif needs.uploads:
            fewest, most = self._num_upload_buffers
            wished["uploads"] = (most - fewest) * self._upload_buffer_bytes
        if request.gradient_moves == 0 and not self._gradients_on_device:
            wished["gradients"] = max(self._wished_gradients() - needs.gradients, 0)
        wished["landing"] = self._wished_landing() - needs.landing
        granted = min((request.budget_bytes - option.cost_bytes) // 2, sum(wished.values()))
        first = {"staging_buffers": min(wished["staging_buffers"], granted // 2, GOOD_STAGING_BYTES)}
        # With less than one more unit's gradients, no shard could be updated in backward.
        if self._is_divided and request.updates_in_backward:
            least = self._largest_numel * request.scratch_itemsize
            first["gradients"] = min(wished["gradients"], granted - first["staging_buffers"], least)
        rest = {name: wish - first.get(name, 0) for name, wish in wished.items()}
        left, total = granted - sum(first.values()), sum(rest.values())
        given = {name: first.get(name, 0) + (left * wish // total if total else 0) for name, wish in rest.items()}
        given["uploads"] -= given["uploads"] % self._upload_buffer_bytes
        return needs._replace(**{name: getattr(needs, name) + more for name, more in given.items()})


def _explain(units: Sequence[UnitSize], request: Request, least: _Option) -> str:
    needs, shard_bytes = least.needs, request.shards_in_memory(units)
    largest = sorted(units, key=lambda unit: -unit.weight_bytes)[:2]
    # Where the CPU computes (`uses_host_memory`), weights are in RAM anyway: offload_param keeps nothing more there.
    keys = ["offload_param"] if request.param_tier == "cpu" and not request.uses_host_memory else []
    keys += ["offload_optimizer"] if least.keeps_all_records else []
    kept = f'what {" and ".join(keys)} keeps in RAM (device "nvme" would page it)' if keys else "the weights"
    flat = f"the weights of {' and '.join(unit.name for unit in largest)}"
    if request.keeps_all_weights and shard_bytes is None:
        flat = f'all weights (offload_param.device is "{request.param_tier}")'
    whose = "the largest unit" if request.can_spill else "all units (the config names no drive for them)"
    parts = (
        (shard_bytes or 0, "for this process's shard of the weights"),
        (needs.kept - (shard_bytes or 0), f"for {kept}"),
        (needs.flat, f"for {flat}"),
        (needs.staging_buffers + needs.uploads, "for staging buffers"),
        (needs.gradients + needs.landing, f"for the gradients of {whose}"),
        (needs.map, "for the map of the durable run"),
        (needs.update, "to update the largest unit as a whole, as this optimizer requires"),
    )
    told = "It must hold " + ", ".join(f"{format_bytes(num_bytes)} {what}" for num_bytes, what in parts if num_bytes)
    if (layer := largest[0].layer) is None or request.updates_whole_parameters:
        return told
    return (
        f"{told}. '{layer[0]}' alone has {format_bytes(layer[1])}: infinity.tile_above cuts it into tiles that are "
        "read one by one"
    )
