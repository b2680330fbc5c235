"""Which units are in memory: what comes next is fetched early, what is needed last makes room.

One call at a time comes here (see [Note: engine lock] in ``infinity.threads.engine_lock``). A lock keeps its threads apart,
which in backward may be two.

[Note: the same units on all ranks] Where ranks keep shards of the weights, all of them gather the same units in the same order
(``infinity.tiers.divided_weights``). So what is fetched, and what makes room, follows there from what the script has used, from
sizes, and from the smallest budget of all ranks. What is late on one rank is waited for. Ranks agree on the experts that they
use (``infinity.units.experts``). What a step changes leaves memory at its end, or is gathered again (`gather_weights`). A
script that goes another way on one rank ends with an error on all, which names what each rank was about to gather.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from infinity.device.flat_pool import FlatPool
from infinity.errors import EngineBusyError, ModelError, format_bytes
from infinity.metrics.clock import StepClock
from infinity.paging.prefetch_schedule import PrefetchSchedule
from infinity.paging.weights_budget import WeightsBudget, moving_bytes_of
from infinity.threads.engine_lock import refuse_reentry
from infinity.tiers.divided_weights import WeightExchange
from infinity.tiers.user_copies import PutAside
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import Slot
from infinity.units.unit import Arrival, PendingUpdate, SimpleArrival, Unit
from swapper import ReentryError
from swapper.sync.lifetimes import LiveObjects

if TYPE_CHECKING:
    from infinity.device.compute import FlatBuffer


_TIMEOUT_SECONDS = 1.0
_HANG_SECONDS = 0.02


class WeightWriter(Protocol):
    """Stores what others than the engine write into weights."""

    def needs_before(self, unit: Unit, slot: Slot) -> bool:
        """Whether what the weights were before a write can be found nowhere else, and is needed to store them."""

    def is_urgent(self, unit: Unit) -> bool:
        """Whether what has been written has to be stored before anything else is written to the unit."""

    def store_written(self, unit: Unit) -> None:
        """Store the slots in ``unit.dirty`` from the unit's flat buffer."""


class ParameterCache:
    """Keeps at most ``pool.capacity_bytes`` of flat buffers and decides which."""

    def __init__(
        self,
        units: Sequence[Unit],
        pool: FlatPool,
        source: WeightStore | None,
        clock: StepClock,
        *,
        prefetches: bool,
        guess: Sequence[int],
        budget: tuple[str, int],
        writer: WeightWriter | None = None,
        exchange: WeightExchange | None = None,
        experts: Mapping[int, int] | None = None,
    ) -> None:
        """
        Args:
            units: all units, by index.
            pool: memory for flat buffers, those of units that stay resident included.
            source: where weights come from; None if all units stay resident.
            clock: counts the waiting.
            prefetches: fetch ahead of need.
            guess: the order of need before the first micro-batch is recorded.
            budget: the config key that the pool is a part of, and its value, for messages.
            writer: stores what was written into weights; None: that is refused.
            experts: unit of an expert -> a number for the experts of its layer.
            exchange: brings what other ranks have updated; None: there are no others. Where ranks keep shards of the
                weights, what is in memory is outdated by a step.
        """
        self.units = list(units)
        self.pool = pool
        self.clock = clock
        self.lock = threading.RLock()
        """Held while units are moved, bound or unbound."""
        self._is_changing = False
        """Whether a unit may be half way between two states, where a signal handler cannot go on. Under the lock."""
        self._experts = experts or {}
        self.training_schedule = PrefetchSchedule(guess, experts)
        self.eval_schedule = PrefetchSchedule(sorted(set(guess)), experts)
        self.schedule = self.training_schedule
        """That of the present forward, or of the last one: from its beginning on."""
        self._usual_writer = writer
        self._writer = writer
        """Another one than the usual: from `write_by` to the next."""
        self._source = source
        self._prefetches = prefetches
        self.exchange = exchange or WeightExchange()
        self.is_divided = self.exchange.is_divided
        """Whether ranks keep shards of the weights, and gather units together."""
        self._around_fetch: Callable[[Unit], AbstractContextManager[None]] = lambda unit: nullcontext()
        """What each unit's fetch begins in: see `announcing`."""
        self._budget = WeightsBudget(*budget, pool.capacity_bytes)
        self.unit_at: dict[int, Unit] = {}
        """Address of a flat buffer -> the unit that has it: from `place` until it is given back. Under the lock."""
        self.due: set[int] = set()
        """Indices of units of which an update is about to be created, and needs what is in their buffers: from their touch in
        a backward that micro-batches share until its moment ends."""
        self._aside: dict[int, torch.Tensor] = {}
        """Unit index -> its weights, of resident units that `page_out_all` has paged out."""
        self._sizes = [unit.num_bytes for unit in self.units]
        self._persistent = frozenset(unit.index for unit in self.units if unit.is_persistent)
        self.room_bytes = pool.capacity_bytes - sum(self._sizes[index] for index in self._persistent)
        """Bytes of flat buffers for units that are not persistent."""
        self.holds_all = source is None or sum(self._sizes) <= pool.capacity_bytes
        """Whether all units can be resident together, so that none has to make room for another."""
        self.fills = source is not None and prefetches
        """Whether an update may wait until its unit is wanted, to leave the new weights in the unit's buffer."""
        self._filled: tuple[object, int | None] | None = None
        """Forecast and place in it of the last `pump`, if all that is wanted there is in memory or on its way. None for a
        place: so is all of the forecast."""
        self._idle: list[int] = []
        """See `_idle_experts`; the next one to leave is the last."""
        self._idle_at: tuple[PrefetchSchedule, int] | None = None
        """When those were found."""
        _parameter_caches.add(self)

    def group_of(self, unit: Unit) -> int:
        """The number that stands for the experts of the layer, of which the unit is one."""
        return self._experts[unit.index]

    def begin_micro_batch(self, *, is_training: bool) -> None:
        """A forward begins, whose units are recorded. What the last one needed is the forecast."""
        if self.schedule is self.training_schedule and self.schedule.has_backward:
            self.schedule.commit()
        self.schedule = self.training_schedule if is_training else self.eval_schedule
        self.schedule.begin()

    def reset_after_fork(self) -> None:
        """This is a forked child, where memory of the parent's must not be touched, and no other thread holds the lock."""
        self.lock = threading.RLock()
        for unit in self.units:
            unit.unbind()

    def make_resident(self, unit: Unit) -> None:
        """Return when the unit's weights are in its flat buffer, and no update of it is pending. Under the lock."""
        # A signal handler that comes while something is waited for uses units, too, and may take this one's buffer.
        while unit.flat is None or unit.arrival is not None or unit.update is not None:
            self.check_unchanging()
            with self._change():
                if unit.flat is None and not self._attach(unit, is_demand=True):
                    self.await_update(unit)
                    flat = self._allocate_now(unit)
                    if flat is not None:
                        self._begin_fetch(unit, flat, is_demand=True)
            self._wait_for_arrival(unit)
            self.await_update(unit)

    def check_unchanging(self) -> None:
        """Raise `EngineBusyError` in a signal handler that came into a change of a unit."""
        if self._is_changing:
            refuse_reentry("using weights")

    def write_by(self, writer: WeightWriter | None) -> None:
        """``writer`` stores what is written into weights from now on; None: the usual one."""
        self._writer = writer or self._usual_writer

    def prepare_update(self, unit: Unit) -> None:
        """An update of ``unit`` is about to be created: nobody computes with it, and no earlier update is under way."""
        unit.unbind()
        if self.is_divided:  # what is being read of it is what the update writes to
            with self.lock:
                self._wait_for_arrival(unit)
        self.await_update(unit)

    def store_changes(self, unit: Unit) -> None:
        """What others than the engine have written into the unit's buffer goes where its weights rest, if anything has.

        Raises:
            ModelError: it cannot be stored. It is forgotten as far as it is known what was there before.
        """
        unit.detect_writes()
        if not unit.dirty:
            return
        writer = self._writer
        if unit.flat is None or writer is None:
            fqn = unit.layout.slots[min(unit.dirty)].spec.fqn
            self.forget_changes(unit)
            cure = "Change weights inside `with infinity.GatheredParameters(...)` between steps instead"
            raise ModelError(f"parameter '{fqn}' was written to where that cannot be stored", cure=cure, fqn=fqn)
        writer.store_written(unit)

    def forget_changes(self, unit: Unit) -> Slot | None:
        """What was written into the unit's buffer never happened. Returns a parameter for which that cannot be."""
        if unit.flat is not None:
            unit.undo_writes()
        unknown = unit.dirty - unit.before.keys()
        unit.forget_changes()
        if unknown and unit.flat is not None:
            if unit.is_persistent or unit.flat.has_views or unit.num_active:
                return unit.layout.slots[min(unknown)]
            self.evict(unit)
        return None

    def remember(self, unit: Unit, slot: Slot) -> None:
        """The parameter may be written to from now on: keep what it is, if nobody could tell afterwards."""
        if slot.index in unit.before or slot.index in unit.dirty or unit.flat is None:
            return
        writer = self._writer
        if writer is not None and writer.needs_before(unit, slot):
            unit.detect_writes()  # by a view that was kept, say: then it is too late
            if slot.index not in unit.dirty:
                unit.save_before(slot)

    def unit_behind(self, tensor: torch.Tensor) -> Unit | None:
        """The unit whose memory a strided tensor looks at."""
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # as of FakeTensors
            return None
        return self.unit_at.get(storage.data_ptr())

    def collect_all(self) -> None:
        """Take note of everything that has arrived."""
        with self.lock, self._change():
            for unit in self.units:
                if not unit.num_active:  # what is in use is stored when that ends
                    self.store_changes(unit)
                self._collect(unit)

    def close(self) -> None:
        """Give all flat buffers back. Errors of what is still on its way are of no interest any more."""
        for unit in self.units:
            unit.unbind()
            if unit.update is not None:
                unit.end_update()
            if unit.flat is not None:
                self.pool.release(unit.release())
        self.unit_at.clear()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Inside the ``with`` block units go from one state to the next."""
        was_changing, self._is_changing = self._is_changing, True
        try:
            yield
        finally:
            self._is_changing = was_changing

    def _wait_for(self, awaited: Arrival | PendingUpdate, what: str) -> None:
        if not awaited.done():
            awaited.promote()
        try:
            self.clock.wait_for(awaited, what)
        except ReentryError:
            refuse_reentry(f"waiting for an {what}" if what == "update" else f"waiting for a {what}")
            raise

    def _wait_for_arrival(self, unit: Unit) -> None:
        """Return when what is on its way into the unit's buffer is there."""
        arrival = unit.arrival
        if arrival is not None:
            try:
                self._wait_for(arrival, "update" if arrival is unit.update else "read")
            except EngineBusyError:
                raise  # it is still on its way
            except Exception:
                if arrival is unit.arrival and arrival is not unit.update:
                    self._displace(unit)  # what came is not the weights
                raise
            with self._change():
                if arrival is unit.arrival:  # else a signal handler came while it was waited for, and has seen to that
                    unit.on_arrival()

    def await_update(self, unit: Unit) -> None:
        """Return when no update of ``unit`` is pending."""
        update = unit.update
        if update is not None:
            self._wait_for(update, "update")
            with self._change():
                if update is unit.update:  # see `_wait_for_arrival`
                    unit.end_update()

    def _attach(self, unit: Unit, *, is_demand: bool, keep: Collection[int] = ()) -> bool:
        """Let the pending update of ``unit`` fill a fresh flat buffer, which saves a read."""
        update = unit.update
        if update is None or not self.fills or not update.accepts_buffer:
            return False
        flat = self._allocate(unit, is_demand=is_demand, keep=keep)
        if flat is None:
            return False
        self.place(unit, flat, update)
        if not update.attach(flat, self.pool.mark()):  # it began a moment ago
            self._displace(unit)
            return False
        return True

    def attach_wanted(self, only: Unit | None = None) -> None:
        """Let pending updates of the units that are needed first fill their buffers, as far as there is room now.

        Args:
            only: consider this one, and no other.
        """
        is_done = len(self.unit_at) == len(self.units) if only is None else only.flat is not None or only.update is None
        if is_done:
            return
        with self.lock, self._change():
            targets, _ = self.wanted()
            for index in targets if only is None else (only.index,):
                unit = self.units[index]
                if unit.flat is None and unit.update is not None and index in targets:
                    self._attach(unit, is_demand=False, keep=targets)

    def _begin_fetch(self, unit: Unit, flat: FlatBuffer, *, is_demand: bool) -> None:
        # An interruption here must not leave a buffer that looks as if it held the weights: whoever waits for them then
        # begins the fetch.
        self.place(unit, flat, SimpleArrival(lambda: self._fetch(unit, is_demand=True).wait(), is_done=False))
        unit.expect(self._fetch(unit, is_demand=is_demand))

    def _displace(self, unit: Unit) -> None:
        """``unit`` gives its buffer back, whatever was to come into it."""
        self._filled = None
        flat = unit.release()
        self.unit_at.pop(flat.address, None)
        self.pool.release(flat)

    def place(self, unit: Unit, flat: FlatBuffer, arrival: Arrival | None = None) -> None:
        """``flat`` is the unit's memory from now on; its weights come with ``arrival``, or are put there by the caller."""
        if arrival is None:
            unit.adopt(flat)
        else:
            unit.fetch_into(flat, arrival)
        self.unit_at[flat.address] = unit

    def _fetch(self, unit: Unit, *, is_demand: bool) -> Arrival:
        if unit.index in self._aside:
            unit.memory.copy_(self._aside[unit.index])
            return SimpleArrival(lambda: None)
        if self._source is None:
            raise RuntimeError(f"unit {unit.name} has no place to be fetched from")
        with self._around_fetch(unit):
            return self._source.fetch(unit, is_demand=is_demand)

    def wanted(self) -> tuple[list[int], bool]:
        """The units to hold now, next first; and whether these are all of the forecast."""
        if not self.fills:
            return [], False
        # Behind a backward there may be a step, after which what was fetched for the next forward would be fetched again.
        is_around = not self.is_divided or not self.schedule.has_backward
        return self.schedule.wanted(self._sizes, self.room_bytes, self._persistent, is_around=is_around)

    def pump(self) -> None:
        """Start fetching what is wanted, evicting what is not."""
        self.check_unchanging()
        if len(self.unit_at) == len(self.units):
            return  # all are there
        order, position = self.schedule.place
        if self._filled is not None and self._filled[0] is order and self._filled[1] in (position, None):
            return
        with self.lock, self._change():
            (targets, has_all), is_done = self.wanted(), not self.is_divided
            leaving = self._leaving(is_demand=False, keep=targets)
            for index in targets:
                unit = self.units[index]
                if unit.update is not None and unit.update.done():
                    self._collect(unit)
                if unit.flat is not None:
                    continue
                if self.is_divided:
                    self.await_update(unit)
                if unit.update is not None:
                    # Its stored weights are about to change: nothing may be read before the update has written them.
                    is_done = self._attach(unit, is_demand=False, keep=targets) and is_done
                    continue
                flat = self._allocate(unit, is_demand=False, keep=targets, leaving=leaving)
                if flat is None:
                    return
                self._begin_fetch(unit, flat, is_demand=False)
            self._filled = (order, None if has_all else position) if is_done else None

    def _collect(self, unit: Unit) -> None:
        """Take note of what has arrived at ``unit``; raises what went wrong on the way."""
        if unit.arrival is not None and unit.arrival.done():
            self._wait_for_arrival(unit)
        if unit.update is not None and unit.update.done():
            self.await_update(unit)

    def _allocate(
        self, unit: Unit, *, is_demand: bool, keep: Collection[int] = (), leaving: Iterator[Unit] | None = None
    ) -> FlatBuffer | None:
        """``leaving``: those that make room, if several buffers are allocated one after the other."""
        leaving = self._leaving(is_demand=is_demand, keep=keep) if leaving is None else leaving
        while True:
            flat = self.pool.allocate(unit.num_bytes)
            if flat is not None:
                return flat
            victim = next(leaving, None)
            if victim is None:
                return self.pool.allocate(unit.num_bytes) if self.pool.reclaim() else None
            self.evict(victim)

    def _allocate_now(self, unit: Unit) -> FlatBuffer | None:
        """A buffer for a unit that is needed now; None if a signal handler has got one for it meanwhile.

        A view of another unit's buffer may outlive its reader for a moment: in an I/O thread that is just completing a
        request, or in a reference cycle until the garbage collector runs. So this waits shortly before it raises, and
        longer if abandoned requests still use buffers.

        Raises:
            StallError: such a request hangs.
        """
        flat = self._allocate(unit, is_demand=True)
        began = time.monotonic()
        has_collected = False
        while flat is None:
            if has_collected:
                waited_seconds = time.monotonic() - began
                is_soon = waited_seconds > _HANG_SECONDS and self.pool.awaits_requests()
                if waited_seconds > _TIMEOUT_SECONDS and not is_soon:
                    raise self._budget.no_room(unit, self.units, self.pool.used_bytes, self.room_bytes)
                time.sleep(0.001)
            else:
                has_collected = True
                gc.collect()
            if unit.flat is not None:
                return None
            flat = self._allocate(unit, is_demand=True)
        return flat

    def _leaving(self, *, is_demand: bool, keep: Collection[int]) -> Iterator[Unit]:
        """Units that may leave, the one first that is needed last. A prefetch waits for nothing and takes nothing wanted."""
        if self._experts and self._prefetches:
            yield from self._idle_experts()
        candidates: list[tuple[int, int, int]] = []
        for unit in tuple(self.unit_at.values()):  # of those that are there: all there are may be many more
            if unit.is_persistent or unit.num_active or unit.index in keep:
                continue
            if not self.is_divided and (unit.arrival is not None or unit.update is not None):
                self._collect(unit)
            is_busy = self._is_busy(unit)
            if is_demand or not is_busy:
                # Without prefetch the choice has to be the predicted one, even if that means to wait for an update.
                goes_last = is_busy and self._prefetches
                candidates.append((0 if goes_last else 1, self.schedule.next_use(unit.index), -unit.index))
        for _, _, index in sorted(candidates, reverse=True):
            unit = self.units[-index]
            unit.unbind()
            if self.is_divided and unit.flat is not None:
                self._wait_for_arrival(unit)  # what brings it looks at its memory
            if unit.flat is not None and (self._is_busy(unit) or not unit.flat.has_views):
                yield unit

    def _idle_experts(self) -> Iterator[Unit]:
        """Experts in memory that the forecast does not name, those first that were used least: of thousands, sorted once a
        micro-batch. Those that a router has chosen since, or that are in use or busy, are left to `_leaving`."""
        schedule = self.schedule
        if self._idle_at != (schedule, schedule.num_commits):
            self._idle_at = schedule, schedule.num_commits
            there = [unit.index for unit in self.unit_at.values() if unit.index in self._experts]
            uses = [(schedule.next_use(index), -index) for index in there if not schedule.is_forecast(index)]
            self._idle = [-index for _, index in sorted(uses)]  # `pop` gives the least used, of equals the lowest
        while self._idle:
            unit = self.units[self._idle.pop()]
            if unit.flat is None or unit.is_persistent or unit.num_active or schedule.is_routed(unit.index):
                continue
            unit.unbind()
            if self.is_divided:
                self._wait_for_arrival(unit)  # as in `_leaving`: what makes room follows from no rank's time
            if not self._is_busy(unit) and self._is_unseen(unit):
                yield unit

    @staticmethod
    def _is_unseen(unit: Unit) -> bool:
        """Whether the unit has a buffer, and nobody holds views of it."""
        return unit.flat is not None and not unit.flat.has_views

    def _is_busy(self, unit: Unit) -> bool:
        if self.is_divided:  # the others may differ from rank to rank
            return unit.index in self.due
        return unit.arrival is not None or unit.update is not None or unit.index in self.due

    def evict(self, unit: Unit) -> None:
        """Page ``unit`` out, unless it stays. What is on its way into its buffer has to arrive first."""
        if unit.flat is None or (unit.is_persistent and unit.index not in self._aside):
            return
        self.quiesce(unit)
        self._displace(unit)

    def page_out_all(self, put_aside: PutAside) -> None:
        """Page out all units, resident ones as far as ``put_aside`` takes their weights, and release the free buffers.

        Nothing is in use. A unit stays whose weights user code holds tensors of: that memory would not be free.
        """
        with self.lock:
            for unit in tuple(self.unit_at.values()):
                self.quiesce(unit)
                if unit.num_active or unit.flat is None or unit.flat.has_views:
                    continue
                if unit.is_persistent and unit.index not in self._aside:
                    kept = put_aside(unit.memory)
                    if kept is None:
                        continue
                    self._aside[unit.index] = kept
                self.evict(unit)
            self.pool.release_free()

    def page_in_residents(self) -> None:
        """Bring back the resident units that `page_out_all` has paged out."""
        with self.lock:
            for unit in self.units:
                if unit.index in self._aside:
                    self.make_resident(unit)
                    del self._aside[unit.index]  # the flat buffer is the only place of the weights again

    def quiesce(self, unit: Unit) -> None:
        """Return when nothing comes into the unit's buffer, no update of it is pending, and what was written is stored."""
        unit.unbind()
        self._wait_for_arrival(unit)
        self.await_update(unit)
        self.store_changes(unit)

    def is_in_use(self, unit: Unit) -> bool:
        """Whether somebody may look at the unit's buffer, however it changes."""
        if unit.flat is None:
            return False
        self._wait_for_arrival(unit)
        if not unit.num_active:
            unit.unbind()
        return unit.num_active > 0 or unit.flat.has_views

    def refetch(self, unit: Unit) -> None:
        """Fetch the unit's present weights into the buffer that it has."""
        self.await_update(unit)
        self._fetch(unit, is_demand=True).wait()
        unit.outdate()

    @contextmanager
    def announcing(self, around_fetch: Callable[[Unit], AbstractContextManager[None]]) -> Iterator[None]:
        """Inside the ``with`` block each unit's fetch begins in what ``around_fetch`` returns for it."""
        before, self._around_fetch = self._around_fetch, around_fetch
        try:
            yield
        finally:
            self._around_fetch = before

    def fetch_anew(self, unit: Unit) -> None:
        """Return when the unit has come once more: another rank fetches it."""
        with self.lock:
            self.evict(unit)
            self.make_resident(unit)

    def has_room(self, units: Collection[Unit]) -> bool:
        """Whether the units can be in memory together."""
        return moving_bytes_of(units) <= self.room_bytes

    def check_room(self, units: Collection[Unit]) -> None:
        """Raise `BudgetTooSmallError` if the units cannot be in memory together."""
        moving_bytes = moving_bytes_of(units)
        if moving_bytes > self.room_bytes:
            raise self._budget.too_small(
                moving_bytes - self.room_bytes,
                f"{len(units)} units are gathered at once, of which {format_bytes(moving_bytes)} have to be fetched: gather "
                "fewer parameters at a time",
            )

    def unbind_unused(self, units: Iterable[Unit] | None = None) -> None:
        """Unbind those of the units, or of all, that no module or operation holds.

        What was written into them is stored (see `store_changes`), unless that can wait until they leave or are updated.
        """
        for unit in self.units if units is None else units:
            if unit.num_active == 0 and (unit.is_bound or unit.dirty or unit.before):
                with self.lock:
                    writer = self._writer
                    unit.unbind()
                    if not unit.dirty:
                        unit.forget_changes()
                    elif writer is None or writer.is_urgent(unit):
                        self.store_changes(unit)


_parameter_caches: LiveObjects[ParameterCache] = LiveObjects(in_child=ParameterCache.reset_after_fork)
