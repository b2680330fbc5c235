"""A unit's gradients on their way to the ranks that update them, beside the backward.


[Note: the exchange's thread] One thread of each rank exchanges units in an order that is the same on all, through
process groups of its own, whatever the script, or the engine's other threads, exchange meanwhile. A rank comes to a
unit when all of its gradients are there, or the backward has ended: the other ranks' threads wait for that, their
scripts do not. The thread ends when the owner of the exchange stops it, or is garbage-collected.

[Note: updates of shards] As in one process, a unit may be updated when no backward needs its weights any more and all of its
gradients have come; here, on all ranks. A rank leaves a unit to that when both hold for itself, and its word is final: from then
on it counts as updated, so what is an error afterwards does not depend on which rank was faster. Ranks tell each other when they
average the unit (`ShardUpdates.word`), and update it if all have left the same gradients of it, with the same
hyperparameters. All else waits for the step, where differences are named.

Where ranks keep parts of the weights, too, none may fetch a unit while another writes to it. So a unit that is left to its update
is not fetched again. What is in memory of it goes at once or, where all units fit, stays, and gets what others have updated
when the step ends, if it is in the memory of all ranks. After the step's last update all ranks meet, see
[Note: changing divided weights] in ``infinity.tiers.weight_exchange``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from infinity.device.compute import ComputeDevice
from infinity.distributed.collectives import Ranks
from infinity.distributed.world import Numbered
from infinity.errors import EngineClosedError
from infinity.gradients.sources import GradientBuffer, GradientSource
from infinity.gradients.unit_grads import UnitGrads
from infinity.threads.denormals import flush_denormals
from infinity.threads.openmp import use_threads
from infinity.units.layout import Slot
from infinity.units.shards import Shards, clipped, runs_of
from infinity.units.unit import Unit
from swapper import Latch
from swapper.sync.lifetimes import EXIT_SECONDS, LiveObjects
from swapper.sync.limits import start_threads

IS_NEW, IS_UNSCALED = 1, 2  # flags as integers: ranks exchange them by `all_gather_ints`
_CLOSE_SECONDS = 5.0  # `close` waits so long for a collective under way; then its memory is given up, as ranks may hang


class ShardUpdates:
    """The units that the present step updates in backward, when their means are there."""

    def __init__(
        self, stop_fetches: Callable[[Unit], None], update: Callable[[Unit, GradientSource, float], None]
    ) -> None:
        """
        Args:
            stop_fetches: sees to it that nothing fetches the unit until the step is over.
            update: starts the update of this rank's shard, by gradients of that loss scale.
        """
        self._stop_fetches = stop_fetches
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
        """Whether all ranks may hear of the unit: its weights are not fetched from then on, if it is one of those.

        ``is_over``: the backward has ended, so none needs them.
        """
        if unit.index not in self._left:
            return True
        may_be_announced = unit.unbind_unused() or is_over
        if may_be_announced:
            self._stop_fetches(unit)
        return may_be_announced


@dataclass(eq=False)
class UnitExchange:
    """Of one unit. The exchange's thread has its memory from `GradientExchange.begin` until it is ``done``.

    Attributes:
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
        owners: of each of ``found``, which of those that divide states has the whole mean, for its norm.
        is_final: whether all ranks had the same gradients, and the same ``word``, which was not 0.
        error: why there are no means.
    """

    what: str
    grads: UnitGrads
    buffer: GradientBuffer | None
    present: frozenset[int]
    new: frozenset[int]
    is_unscaled: bool
    unscaling: float
    flushes_denormals: bool
    word: int = 0
    found: list[Slot] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    is_final: bool = False
    error: Exception | None = None
    done: Latch = field(default_factory=Latch)


class GradientExchange:
    """Exchanges units in the order in which they begin; see [Note: the exchange's thread], which has it until `stop`."""

    def __init__(
        self, ranks: Ranks, numbered: Numbered, shards: Shards, wire: torch.dtype, device: ComputeDevice
    ) -> None:
        """
        Args:
            ranks: who divides states, in a process group that nobody else uses.
            numbered: names that group.
            shards: which of them has which elements.
            wire: see `Ranks.reduce`.
            device: for the thread to enter; all memory is the host's.
        """
        self._device = device
        self._ranks = ranks
        self._numbered = numbered
        self.shards = shards
        self._wire = wire
        # No limit: at most one entry per unit and step. Nobody waits to put one.
        self._queue: queue.SimpleQueue[UnitExchange | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._moving = threading.Lock()
        """Held by the thread while it uses a unit's memory."""
        self.error: Exception | None = None
        """The first error, after which nothing is exchanged. The thread sets it."""

    def begin(self, exchange: UnitExchange) -> None:
        """Queue a unit, in the order of all ranks. Returns at once. A second call for it does nothing."""
        # Started late: only runs that average shards beside a backward need the thread.
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-gradients", daemon=True)
            start_threads(self._thread)
            _open.add(self)
        self._queue.put(exchange)

    def stop(self) -> None:
        """End the thread, when it waits for nobody. Takes no lock."""
        self._is_closed = True
        self._queue.put(None)
        if self._thread is None:
            self._numbered.end()

    def close(self) -> bool:
        """Exchange nothing more. Returns whether all memory has been released: ranks may hang."""
        self.stop()
        is_released = self._moving.acquire(timeout=_CLOSE_SECONDS)
        if is_released:
            self._moving.release()
        return is_released

    def end(self) -> None:
        """Return when the thread has ended, or waits for ranks for longer than a moment."""
        self.stop()
        if self._thread is not None:
            self._thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        use_threads(1)  # see [Note: one pool] in infinity.threads.openmp
        with self._device.background():
            while self._do_next():  # keeps nothing of it
                pass
        if self.error is None:  # else one of them may be under way on other ranks
            self._numbered.end()

    def _do_next(self) -> bool:
        each = self._queue.get()
        if each is None:
            return False
        # After an error the rest is only marked as done. What was queued twice is done already.
        if self.error is None and not each.done.is_set():
            try:
                self._exchange(each)
            except Exception as error:
                self.error = error
        each.error = self.error
        each.done.set()
        return True

    def _exchange(self, each: UnitExchange) -> None:
        # Example, 2 ranks, slots a and b, the same word 7. Rank 0 has new gradients of a and b: [1, 1, 7, 0]; rank 1 of
        # a: [1, 0, 7, 0]. Averaged is the minimum: a. Not final, as the lists differ; b waits for the step.
        slots = each.grads.unit.layout.slots
        flags = [IS_NEW * (slot.index in each.new) for slot in slots]
        told = self._ranks.all_gather_ints(each.what, [*flags, each.word, IS_UNSCALED * each.is_unscaled])
        *are_new, word, _ = (min(of_ranks) for of_ranks in zip(*told, strict=True))
        scaling = max(of_rank[-1] for of_rank in told)  # one rank without the scale: all take it out
        each.is_final = word != 0 and all(of_rank[:-1] == [*flags, word] for of_rank in told)
        buffer = each.buffer
        if buffer is None:
            return  # nothing is new on all ranks then
        # Locked against `close`, which frees the memory afterwards.
        with self._moving:
            if self._is_closed:
                raise EngineClosedError.after_close("averaging gradients")
            flush_denormals(each.flushes_denormals)
            if scaling == IS_UNSCALED and not each.is_unscaled:
                for slot in slots:
                    if slot.index in each.present:
                        buffer.view(slot).mul_(each.unscaling)
                each.is_unscaled = True
            each.found = [slot for slot, flag in zip(slots, are_new, strict=True) if flag]
            for slot in each.found:
                if slot.index not in each.present:
                    buffer.view(slot).zero_()
            spans = self.shards.spans(each.grads.unit)
            # Neighbouring slots in one collective. Each rank gets the mean of its shard's part of the run.
            for start, stop in runs_of(each.found):
                parts = [clipped(span, start, stop) for span in spans]
                self._ranks.reduce(each.what, buffer.values, parts, self._wire)
            each.owners = [self._collect(each, buffer, slot, spans) for slot in each.found]

    def _collect(self, each: UnitExchange, buffer: GradientBuffer, slot: Slot, spans: list[tuple[int, int]]) -> int:
        """One rank gets the whole mean of a parameter: one that has a part as large as any, in turns. Returns which."""
        parts = [clipped(span, slot.start, slot.stop) for span in spans]
        sizes = [stop - start for start, stop in parts]
        largest = [rank for rank, size in enumerate(sizes) if size == max(sizes)]
        owner = largest[(each.grads.unit.index + slot.index) % len(largest)]
        self._ranks.collect(each.what, buffer.values, parts, owner)
        return owner


# See [Note: how a group ends] in infinity.distributed.process_groups.
_open: LiveObjects[GradientExchange] = LiveObjects(at_exit=GradientExchange.end)
