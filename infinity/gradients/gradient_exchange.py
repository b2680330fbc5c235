"""A unit's gradients on their way to the ranks that update them, beside the backward.

[Note: updates of shards] As in one process, a unit may be updated when no backward needs its weights any more and all of its
gradients have come; here, on all ranks. A rank leaves a unit to that when both hold for itself, and its word is final: from then
on it counts as updated, so what is an error afterwards does not depend on which rank was faster. Ranks tell each other when they
average the unit (`ShardUpdates.word`), and update it if all have left the same gradients of it, with the same
hyperparameters. All else waits for the step, where differences are named.

Where ranks keep parts of the weights, too, what is in memory of such a unit has old weights of other ranks. When the step ends
it is paged out or, where all units fit, gets what others have updated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from infinity.distributed.collective_thread import CollectiveThread
from infinity.distributed.collectives import Ranks
from infinity.errors import EngineClosedError
from infinity.gradients.main_gradients import GradientBuffer, GradientSource, UnitGrads
from infinity.threads.denormals import flush_denormals
from infinity.units.layout import Slot
from infinity.units.shards import Shards, runs_of
from infinity.units.unit import Unit
from swapper import Latch

_CLOSE_SECONDS = 5.0  # `close` waits so long for a collective under way; then its memory is given up, as ranks may hang


class ShardUpdates:
    """The units that the present step updates in backward, when their means are there."""

    def __init__(self, update: Callable[[Unit, GradientSource, float], None]) -> None:
        """``update`` starts the update of this rank's shard, by gradients of that loss scale."""
        self.update = update
        self.digest = 0
        """Checksum of the hyperparameters: from `begin` until `end`. 0: nothing is updated before the step."""
        self._left: dict[int, frozenset[int]] = {}
        """Unit index -> slot indices of its gradients."""

    def begin(self, digest: int) -> None:
        """The last backward of a step begins."""
        self.digest = digest
        self._left.clear()

    def end(self) -> None:
        """The step is over."""
        self.begin(0)

    def add(self, unit: Unit, slots: Iterable[Slot]) -> None:
        """This rank has all gradients of the step for the unit: those of these parameters."""
        self._left[unit.index] = frozenset(slot.index for slot in slots)

    def word(self, unit: Unit, slots: frozenset[int]) -> int:
        """This rank's vote on the unit's update, exchanged with its gradients; ``slots``: that have gradients here.

        It is updated if all ranks send the same number above 0: the checksum of their hyperparameters.
        """
        # Hyperparameters, unless the gradients are others than when the rank left the unit to its update.
        return self.digest if self._left.get(unit.index) == slots else 0

    def may_be_announced(self, unit: Unit, *, is_over: bool) -> bool:
        """Whether all ranks may hear of the unit. ``is_over``: the backward has ended, so none needs its weights."""
        return unit.index not in self._left or unit.unbind_unused() or is_over


@dataclass(eq=False)
class UnitExchange:
    """The exchange of one unit's gradients. Its thread uses their memory from `CollectiveThread.put` until ``done``.

    Attributes:
        by: who averages it.
        what: for messages.
        grads: whose.
        buffer: all of the unit's gradients that this rank has; None if it gives none.
        present: slot indices of those.
        new: slot indices of those that are to be averaged.
        is_unscaled: whether they are without the loss scale. Once ``done``: whether those of any rank were, and now all are.
        unscaling: the factor that takes it out.
        flushes_denormals: whether the training thread does so.
        word: this rank's vote on an update by these gradients, see `ShardUpdates.word`.
        found: what was averaged: parameters of which all ranks had something new. Of others one may yet get its gradient.
        norm_ranks: of each of ``found``, which of those that divide states has the whole mean, for its norm.
        is_final: whether all ranks had the same gradients, and the same ``word``, which was not 0.
        error: why there are no means.
    """

    by: GradientExchange
    what: str
    grads: UnitGrads
    buffer: GradientBuffer | None = None
    present: frozenset[int] = frozenset()
    new: frozenset[int] = frozenset()
    is_unscaled: bool = False
    unscaling: float = 1.0
    flushes_denormals: bool = False
    word: int = 0
    found: list[Slot] = field(default_factory=list)
    norm_ranks: list[int] = field(default_factory=list)
    is_final: bool = False
    error: Exception | None = None
    done: Latch = field(default_factory=Latch)

    def run(self, ranks: Ranks) -> None:
        """For the thread: average it."""
        if not self.done.is_set():  # what was queued twice is done already
            self.by.exchange(ranks, self)

    def finish(self, error: Exception | None) -> None:
        """For the thread: it is over."""
        self.error = error
        self.done.set()


class GradientExchange:
    """Averages units in a `CollectiveThread`, in the order in which they are put there."""

    def __init__(self, thread: CollectiveThread, shards: Shards, wire: torch.dtype) -> None:
        """
        Args:
            thread: of those that divide states. Nothing is exchanged any more once it has an error.
            shards: which of them has which elements.
            wire: see `Ranks.reduce`.
        """
        self.thread = thread
        self.shards = shards
        self._wire = wire
        self._is_closed = False
        self._moving = threading.Lock()
        """Held by the thread while it uses a unit's memory."""

    def stop(self) -> None:
        """End the thread, when it waits for nobody. Takes no lock."""
        self._is_closed = True
        self.thread.stop()

    def close(self) -> bool:
        """Exchange nothing more. Returns whether all memory has been released: ranks may hang."""
        self.stop()
        is_released = self._moving.acquire(timeout=_CLOSE_SECONDS)
        if is_released:
            self._moving.release()
        return is_released

    def exchange(self, ranks: Ranks, each: UnitExchange) -> None:
        """For the thread: average one."""
        # Example, 2 ranks, slots a and b, the same word 7. Rank 0 has new gradients of a and b: [1, 1, 7, 0]; rank 1 of
        # a: [1, 0, 7, 0]. Averaged is the minimum: a. Not final, as the lists differ; b waits for the step.
        slots = each.grads.unit.layout.slots
        flags = [slot.index in each.new for slot in slots]
        told = ranks.all_gather_ints(each.what, [*flags, each.word, each.is_unscaled])
        *are_new, word, _ = (min(of_ranks) for of_ranks in zip(*told, strict=True))
        each.is_final = word != 0 and all(of_rank[:-1] == [*flags, word] for of_rank in told)
        buffer = each.buffer
        if buffer is None:
            return  # nothing is new on all ranks then
        # Locked against `close`, which frees the memory afterwards.
        with self._moving:
            if self._is_closed:
                raise EngineClosedError.after_close("averaging gradients")
            flush_denormals(each.flushes_denormals)
            if any(of_rank[-1] for of_rank in told) and not each.is_unscaled:  # one without the scale: all take it out
                for slot in slots:
                    if slot.index in each.present:
                        buffer.view(slot).mul_(each.unscaling)
                each.is_unscaled = True
            each.found = [slot for slot, flag in zip(slots, are_new, strict=True) if flag]
            for slot in each.found:
                if slot.index not in each.present:
                    buffer.view(slot).zero_()
            # Neighbouring slots in one collective. Each rank gets the mean of its shard's part of the run.
            for start, stop in runs_of(each.found):
                parts = self.shards.parts(each.grads.unit, start, stop)
                ranks.reduce(each.what, buffer.values, parts, self._wire)
            each.norm_ranks = [self._collect(ranks, each, buffer, slot) for slot in each.found]

    def _collect(self, ranks: Ranks, each: UnitExchange, buffer: GradientBuffer, slot: Slot) -> int:
        """One rank gets the whole mean of a parameter: one that has a part as large as any, in turns. Returns which."""
        parts = self.shards.parts(each.grads.unit, slot.start, slot.stop)
        sizes = [stop - start for start, stop in parts]
        largest = [rank for rank, size in enumerate(sizes) if size == max(sizes)]
        owner = largest[(each.grads.unit.index + slot.index) % len(largest)]
        ranks.collect(each.what, buffer.values, parts, owner)
        return owner
