"""Main gradients that are averaged over ranks: as an all-reduce, or as a reduce-scatter of the shards that ranks update.

See [Note: ranks] in ``infinity.distributed.collectives``.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from infinity.device.compute import gradient_norm
from infinity.distributed.collectives import Ranks
from infinity.errors import AccessError, RankError
from infinity.gradients.gradient_exchange import GradientExchange, ShardUpdates, UnitExchange
from infinity.gradients.main_gradients import FP32_BYTES, GradientBuffer, UnitGrads
from infinity.gradients.store import GradientStore
from infinity.threads.denormals import flushes_denormals
from infinity.units.layout import Slot
from infinity.units.shards import Shards, runs_of
from infinity.units.unit import Unit
from swapper.sync.interrupts import POLL_SECONDS, uninterrupted
from swapper.sync.lifetimes import call_when_collected

# How long a backward waits for other ranks in all, rather than spill gradients: in the step it would wait for them,
# too. Not longer, as their scripts may wait for this one.
_TIMEOUT_SECONDS = 1.0
Key = tuple[int, int]
"""Unit index, slot index."""


@dataclass(frozen=True)
class NewGradients:
    """A unit's gradients that are new on any rank since the last average.

    Attributes:
        unit: whose.
        slots: of which parameters, in the order of the layout.
        is_unscaled: whether any rank has taken the loss scale out.
    """

    unit: Unit
    slots: list[Slot]
    is_unscaled: bool


@dataclass(eq=False, repr=False)
class ReducedGradients(GradientStore):
    """A `GradientStore` that averages gradients over ranks, and knows which are not averaged yet.

    As with DDP, the whole accumulated gradient is averaged; averaging a mean of an earlier backward again does not change
    it. A parameter with a gradient on some ranks has one on all ranks afterwards: the others contribute zeros.

    If `holds_back` is true, no mean is computed before the step. The step then calls `new_of_all`, and `average_these` or
    `replacing`.

    [Note: means for owners] Where each rank updates its shard of a unit, it needs the mean of that alone. That takes
    half of the exchange, and the other half is then free for the new weights. The mean must be of all that the step has
    accumulated, or its bits would be others. So it is computed in the last ``engine.backward`` of a step
    (`begin_means`), as units become complete (`offer`), in the order in which backwards mostly reach them: the last
    unit first. What is left is done in the step (`average_for_update`). Meanwhile another thread has the memory of
    units that are being exchanged (`infinity.gradients.gradient_exchange`). A complete unit for which there is no room
    to wait is spilled, as ever, and exchanged in the step.

    If somebody looks at a gradient between that backward and the step, or replaces one, or another backward comes before the
    step, parts are put together to whole means, which all ranks do at the same point of their scripts; so they do if they drop
    gradients whose exchange has begun, before the next ones are added. In a plain loop gradients are whole after each backward.
    """

    # Example, 2 ranks, units 0 1 2. Backward completes 2, 1, 0. Rank 0 has unit 2 first: its thread sends it and waits
    # for rank 1, while backward goes on. Unit 1 is queued behind it if it stays in RAM, else it is spilled. In
    # `average_for_update` all ranks meet, and exchange what is left.

    _: KW_ONLY
    ranks: Ranks
    """The processes with the same part of the model."""
    holds_back: Callable[[], bool]
    """Whether no mean is computed before the step."""
    wire: torch.dtype
    """See `Ranks.reduce`."""
    exchange: GradientExchange | None = None
    """Where ranks divide states; None: each rank needs all means."""

    def __post_init__(self, units: Sequence[Unit], in_memory: Iterable[int]) -> None:
        super().__post_init__(units, in_memory)
        if self.exchange is not None:
            call_when_collected(self, self.exchange.stop)
        self._shards = Shards() if self.exchange is None else self.exchange.shards
        self._is_deferred = False
        """Whether a mean that would have been computed was not: from then until the step."""
        self._new: set[tuple[int, int]] = set()
        """(unit index, slot index) of gradients that were added since the last `average`."""
        self.agreed_norms: dict[tuple[int, int], torch.Tensor] = {}
        """(unit index, slot index) -> 2-norm of the whole mean, the same on all ranks. This rank may have only its
        shard of the mean, or none after an update. From `average_for_update` until the next step's, or `clear`."""
        self._step: int | None = None
        """The step whose means are being computed: from `begin_means`, or `average_last`, until all ranks have them."""
        self._is_last_over = False
        """Whether its last backward has ended."""
        self._updates: ShardUpdates | None = None
        """Updates units as their means arrive: set from `begin_means`, until all ranks have them."""
        self._dropped_step: int | None = None
        """The step whose gradients were dropped during their exchange; set until that exchange has ended."""
        self._due: deque[UnitGrads] = deque()
        """Units that are yet to be exchanged, in the order of all ranks."""
        self._whole: set[int] = set()
        """Indices of units that have all gradients of the step, and so may be exchanged."""
        self._under_way: deque[UnitExchange] = deque()
        """Units that were given to the exchange's thread, in the same order."""
        self._timeout_seconds = 0.0
        """How long the present backward may yet wait for room."""
        self._owned: dict[Key, tuple[UnitGrads, Slot, int]] = {}
        """Of which the mean of this rank's shard is here, or in an update: whose, and the bits of its fp32 2-norm on the rank
        that takes it, on others -1. Bits of norms are never negative: those of NaN, if they are, lose their sign."""
        self._late: dict[Unit, list[Mapping[Slot, torch.Tensor]]] = {}
        """Gradients that backward delivered for units under way: added when the units are back."""

    # ------------------------------------------------------------------------------------------- beside a backward

    def begin_means(self, step: int, updates: ShardUpdates | None = None) -> bool:
        """The last ``engine.backward`` of a step begins. `offer` then announces each unit whose gradients are complete.

        Returns whether ``updates`` will hear of means before the step.
        """
        self.average_postponed()
        self._end_dropped()
        if self.exchange is None:  # each rank needs whole means
            return False
        self._step, self._is_last_over, self._timeout_seconds = step, False, _TIMEOUT_SECONDS
        self._updates = updates
        # The order of the exchange, the same on all ranks: roughly that of a backward.
        self._due.extend(grads for grads in reversed(self._grads) if grads.unit.layout.trainable_numel)
        return updates is not None

    def expect_whole(self, unit: Unit) -> None:
        """Allocate memory for the unit's sum: the next `add` brings its last gradients of the step."""
        if self._step is not None:
            self.open_sum(unit)

    def open_sum(self, unit: Unit) -> None:
        grads = self._grads[unit.index]
        # A unit under way may return its memory soon: wait for that, within the limit, rather than spill another unit.
        if self._step is not None and not grads.stays_in_ram and grads.buffer is None:
            while self._under_way and not self._has_room(1) and self._timeout_seconds > 0:
                begin = time.monotonic()
                self._under_way[0].done.wait(min(POLL_SECONDS, self._timeout_seconds))  # short: Ctrl-C gets through
                self._timeout_seconds -= time.monotonic() - begin
                self._advance()
        super().open_sum(unit)

    def offer(self, unit: Unit) -> bool:
        """Allow the exchange of the unit, which has all gradients of the step: see [Note: means for owners].

        Returns whether it will be exchanged before the step. If so, its gradients may stay in the memory of `open_sum`.
        """
        if self._step is not None:
            self._whole.add(unit.index)
            self._advance()
        return self._step is not None

    def average_last(self, step: int) -> None:
        """The last ``engine.backward`` of a step has ended: as `average`, at once or by the time the step needs it."""
        if self.exchange is None:  # each rank needs whole means
            self.average(step)
            return
        if self._step is None:
            self.begin_means(step)
        self._is_last_over = True
        # Backward is over: units without a gradient are complete, too, for other ranks may have one.
        self._whole.update(grads.unit.index for grads in self._due)
        self._advance()

    @property
    def is_in_parts(self) -> bool:
        """Whether a parameter without a gradient here may have a mean, of which this rank has a shard, or will have.

        So it is from the end of the step's last backward until all means are there.
        """
        return self._step is not None and self._is_last_over

    def _advance(self, *, is_in_time: bool = True) -> None:
        """Start the exchanges that may start, and take finished ones back. ``is_in_time``: only if nothing has to wait."""
        while self._under_way and self._under_way[0].done.is_set():
            self._on_exchanged(self._under_way.popleft())
        exchange = self.exchange
        # Strictly in order: the first unit that is not complete stops all behind it, even if those are.
        while exchange and self._due and self._due[0].unit.index in self._whole and exchange.thread.error is None:
            grads = self._due[0]
            if is_in_time and not (self.have_arrived(grads.unit) and self._has_room_beside(grads)):
                return
            updates = self._updates
            # The exchange also starts the unit's update, if all ranks vote for it: not while this rank's backward may
            # still need the present weights.
            if updates is not None and not updates.may_be_announced(grads.unit, is_over=self._is_last_over):
                return
            # From here until it is `done`, the unit's memory is the exchange thread's.
            buffer, slots = self.open(grads.unit), grads.unit.layout.slots
            new = frozenset(slot.index for slot in slots if (grads.unit.index, slot.index) in self._new)
            given = UnitExchange(
                exchange,
                self._what(),
                grads,
                buffer,
                present=frozenset(grads.present),
                new=new,
                is_unscaled=grads.is_unscaled,
                unscaling=1.0 / self.scaler.scale,
                flushes_denormals=flushes_denormals(),
                # A parameter whose mean was computed before (no new gradient) cannot be updated by this exchange: no
                # word.
                word=updates.word(grads.unit, new) if updates is not None and new == grads.present else 0,
            )
            self._start_exchange(given)

    def _start_exchange(self, given: UnitExchange) -> None:
        """Begin to exchange the first unit that is due."""
        with uninterrupted():  # other ranks wait for it, too
            # In both lists or in none: an interrupt in between would leave other ranks waiting.
            self._under_way.append(given)
            self._due.popleft()
            given.by.thread.put(given)

    def _has_room_beside(self, grads: UnitGrads) -> bool:
        """Whether the exchange may use the unit's memory for an unlimited time."""
        if grads.stays_in_ram:
            return True
        # The exchange may take as long as other ranks like. So only one unit at a time may have memory that is needed
        # elsewhere, and only if there is room for the largest unit besides. Memory that can be spilled counts as free.
        waiting = sum(
            each.buffer.flat.num_bytes
            for each in self._grads
            if each.buffer is not None and not (each.stays_in_ram or each is grads or each.buffer.is_referenced)
        )
        is_alone = all(each.grads.stays_in_ram for each in self._under_way)
        return is_alone and self._has_room(1 if grads.buffer is not None else 2, waiting)  # 2: its own memory, too

    def _has_room(self, num: int, waiting_bytes: int = 0) -> bool:
        """Whether there is room for the largest of the units whose memory is taken for a time, so many times.

        ``waiting_bytes``: of memory that units have which can be spilled.
        """
        self._retire()
        largest = max(each.unit.layout.trainable_numel for each in self._grads if not each.stays_in_ram) * FP32_BYTES
        return self.pool.used_bytes - waiting_bytes + num * largest <= self.pool.capacity_bytes

    def _on_exchanged(self, exchange: UnitExchange) -> None:
        """Take an exchanged unit back: keep the mean of this rank's shard, and add what has come since."""
        if exchange.buffer is not None:
            self._keep_mean(exchange, exchange.buffer)
        # Gradients of a backward that went on meanwhile: now the memory is this thread's again.
        for gradients in self._late.pop(exchange.grads.unit, ()):
            super().add(exchange.grads.unit, gradients)
            self._new.update((exchange.grads.unit.index, slot.index) for slot in gradients)

    def _keep_mean(self, exchange: UnitExchange, buffer: GradientBuffer) -> None:
        grads = exchange.grads
        # Failed, or dropped meanwhile: the memory is all that is left.
        if exchange.error is not None or self._dropped_step is not None:
            if not grads.stays_in_ram and not grads.present and grads.buffer is buffer:
                self._release(grads.detach_buffer())
            return
        grads.is_unscaled = exchange.is_unscaled
        if exchange.found:
            grads.on_change()
        for slot, norm_rank in zip(exchange.found, exchange.norm_ranks, strict=True):
            grads.present.add(slot.index)
            # A norm has torch's bits only if one processor takes it of the whole gradient: one rank has it
            # (`_collect`).
            norm = gradient_norm(buffer.view(slot)).detach().cpu().float() if norm_rank == self._shards.index else None
            # Norms are exchanged as the bits of fp32, of which `average_for_update` takes the maximum: -1 is "not
            # here".
            bits = -1 if norm is None else int(norm.view(torch.int32)) & 0x7FFFFFFF  # the sign of a NaN is dropped
            self._owned[grads.unit.index, slot.index] = grads, slot, bits
            self._new.discard((grads.unit.index, slot.index))
        if exchange.is_final and self._updates is not None:
            self._update(grads, self._updates)
            return
        # Only this rank's shard holds a mean; the rest of the buffer is not needed, and not spilled.
        keeps_whole = any(slot not in exchange.found for slot in grads.slots())
        self.close_sum(grads.unit, None if keeps_whole else self._shards.span(grads.unit))

    def _update(self, grads: UnitGrads, updates: ShardUpdates) -> None:
        """Submit the update of a unit of whose mean this rank has its shard."""
        self._detach_users_views(grads)
        slots, scale = grads.slots(), 1.0 if grads.is_unscaled else self.scaler.scale
        source = self._as_source(grads.detach_buffer(), slots)
        grads.drop(set(grads.present))
        try:
            updates.update(grads.unit, source, scale)
        except BaseException:
            if grads.unit.update is None:  # else it is under way, and releases them by itself
                source.release()
            raise

    def _is_in_exchange(self, grads: UnitGrads) -> bool:
        # The exchange's thread reads and writes the unit's buffer until it is done.
        return any(each.grads is grads for each in self._under_way)

    def _await_exchange(self) -> bool:
        if not self._under_way:
            return False
        first = self._under_way[0]
        with self._clock.waiting("ranks"):
            first.done.wait()
        if self._under_way and self._under_way[0] is first:
            self._on_exchanged(self._under_way.popleft())
        return True

    def _finish(self, due: Iterable[UnitGrads] = ()) -> None:
        """Exchange all remaining units, and those that are ``due``. A collective call."""
        self._due.extend(due)
        self._whole.update(grads.unit.index for grads in self._due)
        while self._due or self._under_way:
            self._advance(is_in_time=False)
            self._await_exchange()
            if self.exchange is not None and self.exchange.thread.error is not None:
                raise self.exchange.thread.error
        self._whole.clear()  # all are exchanged; `_advance` reads the set again in the next step

    def _wait_for_ranks(self, what: str) -> None:
        """Meet, and use meanwhile what has been exchanged."""
        errors: list[Exception] = []

        def go_on() -> None:
            try:
                if not errors:
                    self._advance()
            except Exception as error:  # when all have met: the others have nothing to do with it
                errors.append(error)

        has_begun = [found for (found,) in self.ranks.all_gather_ints(what, [self._step is not None], meanwhile=go_on)]
        if errors:
            raise errors[0]
        if len({*has_begun}) > 1:  # those that have begun would wait for the others
            names = self.ranks.names(rank for rank, found in enumerate(has_begun) if not found)
            problem = f"the last backward of the step has averaged none on rank {names}, as inside engine.no_sync()"
            cure = "Enter engine.no_sync() on all ranks, or on none"
            raise RankError(what, problem, rank=self.ranks.number, cure=cure)

    def _what(self) -> str:
        step = self._step if self._dropped_step is None else self._dropped_step
        return f"averaging gradients for the owners in step {step}"

    # --------------------------------------------------------------------------------------------- before the step

    def average_for_update(self, step: int) -> None:
        """As `average`; an update of all comes next. Where shards are updated, all get the norms."""
        if self.exchange is None:  # each rank needs whole means
            self.average(step)
            return
        self.agreed_norms.clear()
        self._end_dropped()
        self._wait_for_ranks(f"averaging gradients for the owners in step {step}")
        self._finish()
        # Gradients that came to units after they had been exchanged: these units go once more, with all ranks.
        found = self.new_of_all(step, "averaging gradients for the owners")
        self._new.update((new.unit.index, slot.index) for new in found for slot in new.slots)
        self._step, self._updates = step, None
        self._finish(self._grads[new.unit.index] for new in found)
        self._step = None
        if not self._owned:
            return
        keys = sorted(self._owned)
        # Exactly one rank has each norm, the others say -1: the maximum is the norm. One collective for all of them.
        of_sharers = self.ranks.all_gather_ints(f"norms in step {step}", [self._owned[key][2] for key in keys])
        bits = [max(of_ranks) for of_ranks in zip(*of_sharers, strict=True)]
        norms = torch.tensor(bits, dtype=torch.int64, device="cpu").to(torch.int32).view(torch.float32)
        self.agreed_norms.update(zip(keys, norms, strict=True))
        self._owned.clear()

    def average(self, step: int) -> None:
        """All-reduce: new gradients of any rank become the whole mean over all ranks, on all of them.

        All ranks call it at the same point of their scripts.

        Args:
            step: the number of the present step.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        with uninterrupted():  # else other ranks would go on with an exchange that this one has left
            self.agreed_norms.clear()
            self._end_dropped()
            if self._step is not None:
                what = f"putting gradients together in step {self._step}"
                self._end(what)
                # Means of which this rank has its shard: each rank sends its own, and gets those of the others.
                here = {key: owned for key, owned in self._owned.items() if key[1] in owned[0].present}
                with self._clock.waiting("ranks"):
                    for grads in {grads: None for grads, _, _ in here.values()}:
                        self._put_together(what, grads, [slot for other, slot, _ in here.values() if other is grads])
                for key in here:
                    del self._owned[key]
            if self.holds_back():
                self._is_deferred = True
            else:
                self.average_these(self.new_of_all(step), step)

    def _put_together(self, what: str, grads: UnitGrads, slots: Sequence[Slot]) -> None:
        buffer = self.open(grads.unit)
        grads.on_change()
        # Means were rounded to the dtype of the exchange, so sending them in it loses nothing.
        dtype = buffer.dtype if self.wire == torch.float32 else self.wire
        for start, stop in runs_of(slots):
            parts = self._shards.parts(grads.unit, start, stop)
            self.ranks.all_gather_in_memory(what, buffer.values, parts, kind="gradients", dtype=dtype)
        self.close_sum(grads.unit)

    def average_postponed(self) -> None:
        """Compute the whole mean now, if that has not been done, because gradients are used before the step."""
        if self._step is not None and self.is_in_parts:
            self.average(self._step)

    def _end_dropped(self) -> None:
        """End an exchange whose gradients were dropped in the middle. All ranks have dropped them."""
        if self._dropped_step is not None:
            self._end(f"dropping gradients of step {self._dropped_step}")

    def _end(self, what: str, *, gives_up: bool = False) -> None:
        """End the present exchange. A collective call with the same label. ``gives_up``: with only the announced units."""
        self.ranks.all_gather_ints(what)
        # What has not been announced yet is announced as "nothing": other ranks wait for the unit in this place.
        while gives_up and self._due and self.exchange is not None:
            self._start_exchange(UnitExchange(self.exchange, self._what(), self._due[0]))
        self._finish()
        self._step = self._updates = self._dropped_step = None

    def finish_shard_updates(self) -> None:
        """Give up a step whose last backward has begun. A collective call: when it returns, exactly those units are updated
        that all ranks had passed to `ShardUpdates`."""
        if self._step is not None:
            self._end(f"giving up step {self._step}", gives_up=True)

    def new_of_all(self, step: int, what: str = "averaging gradients") -> list[NewGradients]:
        """Return the new gradients of any rank, by unit, for the caller to continue with. See `average`."""
        self._is_deferred = False
        if self.ranks.num == 1:
            return []
        # Gradients on their way from a GPU count as present, and may not arrive after the flags were sent.
        self._wait_for_arrivals()
        flags: list[int] = []
        for grads in self._grads:
            flags += [(grads.unit.index, slot.index) in self._new for slot in grads.unit.layout.slots]
            flags.append(grads.is_unscaled)
        # Any rank's flag counts.
        merged = map(any, zip(*self.ranks.all_gather_ints(f"{what} in step {step}", flags), strict=True))
        self._new.clear()
        found = []
        for grads in self._grads:  # reads as many flags as it has written
            new = [slot for slot in grads.unit.layout.slots if next(merged)]
            found.append(NewGradients(grads.unit, new, is_unscaled=next(merged)))
        return [each for each in found if each.slots]

    def average_these(self, found: Sequence[NewGradients], step: int) -> None:
        """As `average`, for ``found`` alone."""
        what = f"averaging gradients in step {step}"
        for new in found:
            with self._clock.waiting("ranks"):
                buffer, runs = self._prepare(new)
                for start, stop in runs:
                    self.ranks.average(what, buffer.values[start:stop], self.wire)
                self.close_sum(new.unit)

    @contextlib.contextmanager
    def replacing(self, new: NewGradients) -> Iterator[tuple[GradientBuffer, float]]:
        """The unit's gradients in memory, and the loss scale they have. The ``with`` block puts what has none in their place."""
        with self._clock.waiting("ranks"):
            buffer, _ = self._prepare(new)
            yield buffer, self.scale_of(new.unit)
            self._grads[new.unit.index].is_unscaled = True
            self.close_sum(new.unit)

    def _prepare(self, new: NewGradients) -> tuple[GradientBuffer, list[tuple[int, int]]]:
        """The unit's gradients in memory, zeros where there are none, and the elements in which the new ones lie."""
        grads = self._grads[new.unit.index]
        # One rank without the loss scale: all take it out, so that the sum has one scale.
        buffer = self.show(grads.unit) if new.is_unscaled else self.open(grads.unit)
        grads.on_change()
        for slot in new.slots:
            if slot.index not in grads.present:
                buffer.view(slot).zero_()
                grads.present.add(slot.index)
        return buffer, runs_of(new.slots)

    # ------------------------------------------------------------------------------------------- what others touch

    def add(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        if self.exchange is not None:
            self.average_postponed()
            self._end_dropped()
            # Not waited for here: the exchange needs the other ranks, and they may wait for this backward to end.
            if self._is_in_exchange(self._grads[unit.index]):
                self._late.setdefault(unit, []).append(gradients)
                return
        super().add(unit, gradients)
        for slot in gradients:
            self._new.add((unit.index, slot.index))

    def set_gradient(self, unit: Unit, slot: Slot, gradient: torch.Tensor | None) -> None:
        """See `GradientStore.set_gradient`. It is taken as it is: whoever sets one does so on all ranks."""
        self.average_postponed()
        self._end_dropped()
        while self._is_in_exchange(self._grads[unit.index]):
            self._await_exchange()
        super().set_gradient(unit, slot, gradient)
        self._new.discard((unit.index, slot.index))
        self._owned.pop((unit.index, slot.index), None)

    def clear(self, kept: Collection[Key] = ()) -> None:
        if kept:
            self.average_postponed()
        # Other ranks may be in the middle of the exchange, and collectives cannot be taken back: it is ended later.
        if self._step is not None:
            self._dropped_step, self._step, self._updates = self._step, None, None
        self._owned.clear()
        self._late.clear()
        super().clear(kept)
        self._new.intersection_update(kept)
        self._is_deferred = False
        self.agreed_norms.clear()

    def close(self) -> None:
        # A thread that hangs in a collective may still write: its memory is not returned to the pool.
        if self.exchange is not None and not self.exchange.close():
            for exchange in self._under_way:
                if exchange.buffer is not None and exchange.grads.buffer is exchange.buffer:
                    exchange.grads.detach_buffer()  # the thread's, for good
        super().close()

    def norms_of(self, unit: Unit) -> dict[int, torch.Tensor]:
        if not self.agreed_norms:
            return super().norms_of(unit)
        slots = unit.layout.slots
        agreed = {s.index: norm for s in slots if (norm := self.agreed_norms.get((unit.index, s.index))) is not None}
        is_all = agreed.keys() >= {slot.index for slot in self.slots_with_gradient(unit)}
        return agreed if is_all else {**super().norms_of(unit), **agreed}

    def make_whole(self, unit: Unit, slot: Slot) -> None:
        """Put means together before a user looks at the gradient. All ranks call it at the same point.

        Raises:
            AccessError: no mean of it is computed before the step, or the backward that does so goes on.
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        key = unit.index, slot.index
        if self._is_deferred and key in self._new:
            raise AccessError.of_gradient(
                slot.spec.fqn,
                reason="OneBitAdam's warm-up is over: each process has its own gradients, and in the step their momenta are "
                "exchanged",
                cure='Clip by "gradient_clipping" in the config; to look at gradients, train with Adam',
            )
        self.average_postponed()
        if self._step is not None and (key in self._owned or self._is_in_exchange(self._grads[unit.index])):
            raise AccessError.of_gradient(
                slot.spec.fqn,
                reason=f"this backward averages it over {self.ranks.num} processes, of which each keeps a part of the mean",
                cure="Look at gradients between engine.backward() and engine.step(), on all processes",
            )
