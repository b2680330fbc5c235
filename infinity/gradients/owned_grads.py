"""Main gradients of which each rank needs the mean of its share alone: of the part that it updates.

Knows units, gradients and ranks; must not know when a backward has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from infinity.device.compute import gradient_norm
from infinity.distributed.meshes import Division
from infinity.distributed.world import Numbered
from infinity.errors import AccessError
from infinity.gradients.averaged_grads import AveragedGradients
from infinity.gradients.gradient_exchange import GradientExchange, UnitExchange
from infinity.gradients.share_updates import ShareUpdates
from infinity.gradients.sources import FP32_BYTES, GradientBuffer
from infinity.gradients.unit_grads import UnitGrads
from infinity.threads.denormals import flushes_denormals
from infinity.units.layout import Slot
from infinity.units.shares import Shares, clipped, runs_of
from infinity.units.unit import Unit
from swapper.sync.interrupts import POLL_SECONDS, uninterrupted
from swapper.sync.lifetimes import when_gone

_PATIENCE_SECONDS = 1.0
"""So long a backward waits for others in all rather than spill gradients, for in the step it would wait for them, too. Not
longer: their scripts may wait for this one."""
Key = tuple[int, int]
"""Unit index, slot index."""


class OwnedGradients(AveragedGradients):
    """`AveragedGradients` where states are divided.

    [Note: means for owners] Where each rank updates its share of a unit, it needs the mean of that alone, which takes half of
    the exchange, and the other half is then free for the new weights. The mean must be of all that the step has accumulated,
    or its bits would be others. So it is computed in the last ``engine.backward`` of a step (`begin_means`), as units become
    complete (`offer`), in the order in which backwards mostly reach them: the last unit first. What is still to be done when
    the step comes is done then (`average_for_update`). Meanwhile another thread has the memory of units that are being
    exchanged (`infinity.gradients.gradient_exchange`). It may have to wait for ranks that are late, so of units whose memory is
    taken for a time it has one, and only while there is room for the largest besides. What is whole and finds no room to wait in
    is spilled, as ever, and exchanged in the step.

    What only some ranks have of a unit by then may yet come on others, as of a parameter that fires unexpectedly: its mean waits
    for the step. What `ShareUpdates` is told of is updated as it comes back.

    Whoever looks at a gradient between that backward and the step would see parts of a mean, and gets an error instead. If
    another backward comes before the step, or the user replaces a gradient, parts are put together to whole means, which all
    ranks do at the same point of their scripts; so they do if they drop gradients whose exchange has begun, before the next
    ones are added. In a plain loop gradients are whole after each backward.

    A norm has the bits of torch's only if one processor takes it of the whole gradient. So the parts of a parameter that lies
    in several shares go to the rank with the largest, and ranks tell each other the norms: at most a quarter of the model.
    """

    def __init__(
        self, *args: Any, division: Division, apart: Division, numbered: Numbered, shares: Shares, **kwargs: Any
    ) -> None:
        """As `AveragedGradients` of the ``ranks`` of ``division``.

        Args:
            args, kwargs: for `AveragedGradients`.
            division: who divides states.
            apart: the same, in process groups that nobody else uses.
            numbered: names those groups.
            shares: which of them has what.
        """
        super().__init__(*args, ranks=division.ranks, **kwargs)
        self._sharers = division.sharers
        self._shares = shares
        self._exchange = GradientExchange(apart, numbered, shares, self._wire, self._device)
        when_gone(self, self._exchange.stop)
        self._step: int | None = None
        """The step whose means are being computed: from `begin_means`, or `average_last`, until all ranks have them."""
        self._is_last_over = False
        """Whether its last backward has ended."""
        self._updates: ShareUpdates | None = None
        """Who updates units as their means come: from `begin_means`, until all ranks have them."""
        self._dropped_step: int | None = None
        """One whose gradients were dropped while they were exchanged: from then until the exchange has been ended."""
        self._due: deque[UnitGrads] = deque()
        """Units that are yet to be exchanged, in the order of all ranks."""
        self._whole: set[int] = set()
        """Indices of those that may be, for they have all gradients of the step."""
        self._under_way: deque[UnitExchange] = deque()
        """Those that its thread has, in the same order."""
        self._patience_seconds = 0.0
        """How long the present backward may yet wait for room."""
        self._owned: dict[Key, tuple[UnitGrads, Slot, int]] = {}
        """Of which the mean of this rank's share is here, or in an update: whose, and the bits of its fp32 2-norm on the rank
        that takes it, on others -1. Bits of norms are never negative: those of NaN, if they are, lose their sign."""
        self._late: list[tuple[Unit, Mapping[Slot, torch.Tensor]]] = []
        """What came in backward for units that are being exchanged: until those are taken back."""

    # ------------------------------------------------------------------------------------------------- beside a backward

    def begin_means(self, step: int, updates: ShareUpdates | None = None) -> bool:
        self.average_postponed()
        self._end_dropped()
        if self._hook is not None:
            return False
        self._step, self._is_last_over, self._patience_seconds = step, False, _PATIENCE_SECONDS
        self._updates = updates
        self._due.extend(grads for grads in reversed(self._grads) if grads.unit.layout.trainable_numel)
        return updates is not None

    def expect_whole(self, unit: Unit) -> None:
        if self._step is not None:
            self.open_sum(unit)

    def open_sum(self, unit: Unit) -> None:
        grads = self._grads[unit.index]
        if self._step is not None and not grads.stays and grads.buffer is None:
            while self._under_way and not self._has_room(1) and self._patience_seconds > 0:
                begin = time.monotonic()
                self._under_way[0].done.wait(min(POLL_SECONDS, self._patience_seconds))
                self._patience_seconds -= time.monotonic() - begin
                self._go_on()
        super().open_sum(unit)

    def offer(self, unit: Unit) -> bool:
        if self._step is not None:
            self._whole.add(unit.index)
            self._go_on()
        return self._step is not None

    def average_last(self, step: int) -> None:
        if self._hook is not None:
            self.average(step)
            return
        if self._step is None:
            self.begin_means(step)
        self._is_last_over = True
        self._whole.update(grads.unit.index for grads in self._due)
        self._go_on()

    @property
    def is_in_parts(self) -> bool:
        return self._step is not None and self._is_last_over

    def _go_on(self, *, is_in_time: bool = True) -> None:
        """Begin to exchange what may be, and take back what has been. ``is_in_time``: only if nobody has to wait."""
        while self._under_way and self._under_way[0].done.is_set():
            self._take_back(self._under_way.popleft())
        while self._due and self._due[0].unit.index in self._whole and self._exchange.error is None:
            grads = self._due[0]
            if is_in_time and not (self.have_arrived(grads.unit) and self._has_room_beside(grads)):
                return
            updates = self._updates
            if updates is not None and not updates.is_settled(grads.unit, is_over=self._is_last_over):
                return
            buffer, slots = self.open(grads.unit), grads.unit.layout.slots
            new = frozenset(slot.index for slot in slots if (grads.unit.index, slot.index) in self._new)
            exchange = UnitExchange(
                self._what(),
                grads,
                buffer,
                present=frozenset(grads.present),
                new=new,
                is_unscaled=grads.is_unscaled,
                unscaling=1.0 / self.scaler.scale,
                flushes_denormals=flushes_denormals(),
                word=updates.word(grads.unit, new) if updates is not None and new == grads.present else 0,
            )
            self._hand_over(exchange)

    def _hand_over(self, exchange: UnitExchange) -> None:
        with uninterrupted():  # other ranks wait for it, too
            self._under_way.append(exchange)
            self._due.popleft()
            self._exchange.begin(exchange)

    def _has_room_beside(self, grads: UnitGrads) -> bool:
        """Whether the exchange may have the unit's memory for as long as it likes."""
        if grads.stays:
            return True
        waiting = sum(
            each.buffer.flat.num_bytes
            for each in self._grads
            if each.buffer is not None and not (each.stays or each is grads or each.buffer.is_lent)
        )
        is_alone = all(each.grads.stays for each in self._under_way)
        return is_alone and self._has_room(1 if grads.buffer is not None else 2, waiting)

    def _has_room(self, num: int, waiting_bytes: int = 0) -> bool:
        """Whether there is room for the largest of the units whose memory is taken for a time, so many times.

        ``waiting_bytes``: of memory that units have which can be spilled.
        """
        self._retire()
        largest = max(each.unit.layout.trainable_numel for each in self._grads if not each.stays) * FP32_BYTES
        return self._pool.used_bytes - waiting_bytes + num * largest <= self._pool.capacity_bytes

    def _take_back(self, exchange: UnitExchange) -> None:
        """It has been exchanged: keep the mean of this rank's share, and what has come since."""
        if exchange.buffer is not None:
            self._keep_mean(exchange, exchange.buffer)
        late = [gradients for unit, gradients in self._late if unit is exchange.grads.unit]
        self._late = [each for each in self._late if each[0] is not exchange.grads.unit]
        for gradients in late:
            super().add(exchange.grads.unit, gradients)

    def _keep_mean(self, exchange: UnitExchange, buffer: GradientBuffer) -> None:
        grads = exchange.grads
        if exchange.error is not None or self._dropped_step is not None:
            if not grads.stays and not grads.present and grads.buffer is buffer:
                self._give_back(grads.take())
            return
        grads.is_unscaled = exchange.is_unscaled
        if exchange.found:
            grads.note_change()
        for slot, owner in zip(exchange.found, exchange.owners, strict=True):
            grads.present.add(slot.index)
            norm = gradient_norm(buffer.view(slot)).detach().cpu().float() if owner == self._shares.index else None
            bits = -1 if norm is None else int(norm.view(torch.int32)) & 0x7FFFFFFF
            self._owned[grads.unit.index, slot.index] = grads, slot, bits
            self._new.discard((grads.unit.index, slot.index))
        if exchange.is_final and self._updates is not None:
            self._update(grads, self._updates)
            return
        keeps_whole = any(slot not in exchange.found for slot in grads.slots())
        self.close_sum(grads.unit, None if keeps_whole else self._shares.span(grads.unit))

    def _update(self, grads: UnitGrads, updates: ShareUpdates) -> None:
        """The unit's gradients, of which this rank has its share, go into the update."""
        self._tell_of_end(grads)
        slots, scale = grads.slots(), 1.0 if grads.is_unscaled else self.scaler.scale
        source = self._lend_to_update(grads.take(), slots)
        grads.drop(set(grads.present))
        try:
            updates.update(grads.unit, source, scale)
        except BaseException:
            if grads.unit.update is None:  # else it is under way, and lets go of them by itself
                source.release()
            raise

    def _is_held(self, grads: UnitGrads) -> bool:
        return any(each.grads is grads for each in self._under_way)

    def _await_holder(self) -> bool:
        if not self._under_way:
            return False
        first = self._under_way[0]
        with self._clock.waiting("ranks"):
            first.done.wait()
        if self._under_way and self._under_way[0] is first:
            self._take_back(self._under_way.popleft())
        return True

    def _finish(self, due: Iterable[UnitGrads] = ()) -> None:
        """Exchange all that is left, and what is ``due`` besides: all ranks have come here, or will."""
        self._due.extend(due)
        self._whole.update(grads.unit.index for grads in self._due)
        while self._due or self._under_way:
            self._go_on(is_in_time=False)
            self._await_holder()
            if self._exchange.error is not None:
                raise self._exchange.error
        self._whole.clear()

    def _meet(self, what: str) -> None:
        """Meet, and use meanwhile what has been exchanged."""
        errors: list[Exception] = []

        def go_on() -> None:
            try:
                if not errors:
                    self._go_on()
            except Exception as error:  # when all have met: the others have nothing to do with it
                errors.append(error)

        self._ranks.meet(what, meanwhile=go_on)
        if errors:
            raise errors[0]

    def _what(self) -> str:
        step = self._step if self._dropped_step is None else self._dropped_step
        return f"averaging gradients for the owners in step {step}"

    # --------------------------------------------------------------------------------------------------- before the step

    def average_for_update(self, step: int) -> None:
        """See `AveragedGradients.average_for_update`. Each rank gets the mean of its share, and all get the norms."""
        if self._hook is not None:
            self.average(step)
            return
        self.agreed_norms.clear()
        self._end_dropped()
        self._meet(f"averaging gradients for the owners in step {step}")
        self._finish()
        # What came to units that had been exchanged.
        found = self.new_of_all(step, "averaging gradients for the owners")
        self._new.update((new.unit.index, slot.index) for new in found for slot in new.slots)
        self._step, self._updates = step, None
        self._finish(self._grads[new.unit.index] for new in found)
        self._step = None
        if not self._owned:
            return
        owned = [self._owned[key] for key in sorted(self._owned)]
        of_sharers = self._sharers.meet(f"norms in step {step}", [bits for _, _, bits in owned])
        bits = [max(of_ranks) for of_ranks in zip(*of_sharers, strict=True)]
        norms = torch.tensor(bits, dtype=torch.int64, device="cpu").to(torch.int32).view(torch.float32)
        for (grads, slot, _), norm in zip(owned, norms, strict=True):
            self.agreed_norms[grads.unit.index, slot.index] = norm
        self._owned.clear()

    def average(self, step: int) -> None:
        """See `AveragedGradients.average`. What is owned in parts becomes whole."""
        self.agreed_norms.clear()
        self._end_dropped()
        if self._step is not None:
            what = f"putting gradients together in step {self._step}"
            self._ranks.meet(what)
            self._finish()
            self._step = self._updates = None
            here = {key: owned for key, owned in self._owned.items() if key[1] in owned[0].present}
            with self._clock.waiting("ranks"):
                for grads in {grads: None for grads, _, _ in here.values()}:
                    self._put_together(what, grads, [slot for other, slot, _ in here.values() if other is grads])
            for key in here:
                del self._owned[key]
        super().average(step)

    def _put_together(self, what: str, grads: UnitGrads, slots: Sequence[Slot]) -> None:
        buffer = self.open(grads.unit)
        grads.note_change()
        dtype = buffer.dtype if self._wire == torch.float32 else self._wire
        spans = self._shares.spans(grads.unit)
        for start, stop in runs_of(slots):
            parts = [clipped(span, start, stop) for span in spans]
            self._sharers.gather_in_memory(what, buffer.values, parts, kind="gradients", dtype=dtype)
        self.close_sum(grads.unit)

    def average_postponed(self) -> None:
        if self._step is not None and self.is_in_parts:
            self.average(self._step)

    def _end_dropped(self) -> None:
        """End an exchange whose gradients were dropped in the middle. All ranks have dropped them."""
        if self._dropped_step is not None:
            self._ranks.meet(f"dropping gradients of step {self._dropped_step}")
            self._finish()
            self._dropped_step = None

    def end_updates(self) -> None:
        if self._step is None:
            return
        self._ranks.meet(f"giving up step {self._step}")
        nothing: frozenset[int] = frozenset()
        while self._due:
            grads = self._due[0]
            exchange = UnitExchange(
                self._what(), grads, None, nothing, nothing, is_unscaled=False, unscaling=1.0, flushes_denormals=False
            )
            self._hand_over(exchange)
        self._finish()
        self._step = self._updates = None

    # ------------------------------------------------------------------------------------------------- what others touch

    def add(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        self.average_postponed()
        self._end_dropped()
        if self._is_held(self._grads[unit.index]):  # till others come there, who may wait for the end of this backward
            self._late.append((unit, gradients))
        else:
            super().add(unit, gradients)

    def set_gradient(self, unit: Unit, slot: Slot, gradient: torch.Tensor | None) -> None:
        self.average_postponed()
        self._end_dropped()
        while self._is_held(self._grads[unit.index]):
            self._await_holder()
        super().set_gradient(unit, slot, gradient)
        self._owned.pop((unit.index, slot.index), None)

    def clear(self, kept: Collection[Key] = ()) -> None:
        if kept:
            self.average_postponed()
        if self._step is not None:
            self._dropped_step, self._step, self._updates = self._step, None, None
        self._owned.clear()
        self._late.clear()
        super().clear(kept)
        self.agreed_norms.clear()

    def close(self) -> None:
        if not self._exchange.close():
            for exchange in self._under_way:
                if exchange.buffer is not None and exchange.grads.buffer is exchange.buffer:
                    exchange.grads.take()  # the thread's, for good
        super().close()

    def norms_of(self, unit: Unit) -> dict[int, torch.Tensor]:
        slots = self._grads[unit.index].unit.layout.slots
        agreed = {
            slot.index: self.agreed_norms[unit.index, slot.index]
            for slot in slots
            if (unit.index, slot.index) in self.agreed_norms
        }
        is_all = agreed.keys() >= {slot.index for slot in self.slots_with_gradient(unit)}
        return agreed if is_all else {**super().norms_of(unit), **agreed}

    def check_averaged(self, unit: Unit, slot: Slot) -> None:
        super().check_averaged(unit, slot)
        key = unit.index, slot.index
        is_new = self._is_last_over and key in self._new
        if self._step is not None and (is_new or key in self._owned or self._is_held(self._grads[unit.index])):
            raise AccessError.of_gradient(
                slot.spec.fqn,
                reason=f"engine.step() averages it over {self._ranks.num} processes, of which each keeps a part of the mean",
                cure="Set zero_optimization.stage to 0 to look at gradients before engine.step(), or call loss.backward() and "
                "optimizer.step()",
            )
