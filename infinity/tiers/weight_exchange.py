"""New model weights of the shards that other ranks update, as they come to where this rank keeps its copy.

Knows units, shards and where weights rest; must not know what an update is. Only the thread that trains calls it, in an
order that follows from model and script alone: see [Note: ranks] in ``infinity.distributed.collectives``.

[Note: changing divided weights] Where each rank keeps its shard of a unit alone (`infinity.tiers.divided_weights`), it writes
new weights of that, and sends them to nobody. But others fetch them when they like. (What is in all ranks' memory they bring
each other: `gather_in_memory`.) So all ranks meet before, with no fetch of the unit under way (`before`), and after all have
written (`gather`, `after`): what is fetched is from before, or from after.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from infinity.device.compute import ComputeDevice
from infinity.distributed.collectives import Ranks
from infinity.errors import RankError
from infinity.tiers.divided_weights import DividedWeights
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import Chunk
from infinity.units.shards import Shards
from infinity.units.unit import Unit
from swapper import Handle

logger = logging.getLogger(__name__)

_MOST_PENDING = 4
"""Writes under way, each of one block of one rank."""


class WeightExchange:
    """Each rank's shard of a unit's trainable weights goes to all. Memory: two blocks, see `Ranks.all_gather_parts`."""

    def __init__(
        self,
        ranks: Ranks,
        shards: Shards,
        weights: WeightStore | None,
        device: ComputeDevice,
    ) -> None:
        """
        Args:
            ranks: those that divide states.
            shards: which of them has the weights of which elements.
            weights: where weights rest that do not stay in flat buffers; None if all stay there.
            device: where flat buffers are.
        """
        self.ranks = ranks
        self.shards = shards
        self._weights = weights
        self._device = device
        self._is_replacing = False
        """Whether all ranks replace weights of many units, and meet at the end: inside `replacing`."""

    @contextlib.contextmanager
    def replacing(self, units: Sequence[Unit], agree: Callable[[], None]) -> Iterator[None]:
        """All weights may be replaced inside the ``with`` block, by the same ones on all ranks; then comes `gather`.

        Nothing that is fetched meanwhile may be used. Ranks do not meet inside: one of them may fail.

        Args:
            units: all units.
            agree: called when nothing of them is being fetched any more. Raises if not all ranks come here.
        """
        for unit in units:
            if self.divides(unit):
                self.await_fetch(unit)
        agree()
        if isinstance(self._weights, DividedWeights):
            self._weights.drop_copies()
        self._is_replacing = True
        try:
            yield
        finally:
            self._is_replacing = False

    @property
    def is_divided(self) -> bool:
        """Whether other ranks fetch shards of this one."""
        return isinstance(self._weights, DividedWeights)

    def divides(self, unit: Unit) -> bool:
        """Whether this rank keeps no more of the unit's weights than its shard."""
        return isinstance(self._weights, DividedWeights) and self._weights.holds(unit)

    @contextlib.contextmanager
    def changing(self, unit: Unit) -> Iterator[None]:
        """The unit's weights are replaced inside the ``with`` block, by the same ones on all ranks, which all come here."""
        self.before(unit)
        yield
        self.after([unit])

    def before(self, unit: Unit) -> None:
        """Weights of the unit are about to change where they rest. All ranks come here, where it is divided.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        if self.divides(unit) and not self._is_replacing:
            self.await_fetch(unit)
            self.ranks.all_gather_ints(f"writing to the weights of {unit.name}")

    def await_fetch(self, unit: Unit) -> None:
        """Return when no fetch of the unit is under way here."""
        if unit.arrival is not None:
            unit.arrival.wait()

    def after(self, units: Sequence[Unit]) -> None:
        """All that was to be written to these units has been, on this rank. Where they are divided, all ranks come here."""
        divided = [unit for unit in units if self.divides(unit)]
        if divided and not self._is_replacing:
            self.ranks.all_gather_ints("having written weights", [unit.index for unit in divided])

    def gather(self, units: Sequence[Unit]) -> None:
        """All of the units' trainable weights become what the rank has that updates them, in memory and where they rest.

        No update of them may be pending. All ranks call it at the same point of their scripts.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        for unit in units:
            if not self.divides(unit):
                self._gather(unit, in_memory=True, at_rest=True)
        self.after(units)
        for unit in units:
            self._renew(unit)

    def kept_by_all(self, units: Sequence[Unit]) -> set[Unit]:
        """Those of these divided units that are in the memory of all ranks, which all come here."""
        if not units:
            return set()
        found = self.ranks.all_gather_ints("changing weights in memory", [unit.flat is not None for unit in units])
        return {unit for unit, *kept in zip(units, *found, strict=True) if all(kept)}

    def gather_in_memory(self, unit: Unit) -> None:
        """What is in memory of a divided unit gets what each rank has updated. As `gather`, for one that all ranks keep."""
        self._gather(unit, in_memory=True, at_rest=False)

    def _renew(self, unit: Unit) -> None:
        """What is in memory of a divided unit gets what other ranks have written."""
        if self._weights is not None and self.divides(unit) and unit.flat is not None and not self._is_replacing:
            self._weights.fetch(unit, is_demand=True).wait()
            unit.outdate()

    def wait_for_peers(self) -> None:
        """Return when no other rank needs the shards of this one any more, or one has ended: the engine is being closed.

        At once if an error ends this process.
        """
        if self.is_divided and not self.ranks.has_failed:
            try:
                self.ranks.all_gather_ints("closing the engine")
            except RankError:
                logger.debug("other ranks do not close their engines at the same point", exc_info=True)

    def stop(self) -> None:
        """Other ranks get nothing any more."""
        if isinstance(self._weights, DividedWeights):
            self._weights.stop()

    def _gather(self, unit: Unit, *, in_memory: bool, at_rest: bool) -> None:
        """What each rank has updated goes to all: to what is in memory, or where it rests, or both."""
        if not self.shards.is_divided or unit.layout.trainable is None:
            return
        if unit.arrival is not None:
            unit.arrival.wait()  # what it brings was read before the others' shards are written
        what = f"gathering the weights of {unit.name}"
        spans = self.shards.spans(unit)
        self.ranks.all_gather_ints(what, [number for span in spans for number in span])
        flat = None
        if in_memory and unit.flat is not None:
            flat = unit.trainable_view(unit.flat.tensor())
        rests = self._weights if not unit.is_persistent else None
        pending: deque[tuple[Handle, torch.Tensor]] = deque()

        def read(start: int, target: torch.Tensor) -> None:
            if flat is not None:
                self._copy(target, flat[start : start + target.numel()])
            elif rests is not None:
                handle = rests.read_chunk(unit, _chunk(start, target), target)
                if handle is not None:
                    handle.wait()

        def write(start: int, found: torch.Tensor) -> None:
            if flat is not None:
                self._copy(flat[start : start + found.numel()], found)
            if at_rest and rests is not None:
                copy = found.to("cpu", copy=True)  # the memory it came in is used again
                handle = rests.write_chunk(unit, _chunk(start, copy), copy)
                if handle is not None:
                    pending.append((handle, copy))
            while len(pending) > _MOST_PENDING:
                pending.popleft()[0].wait()

        place = "cpu" if flat is None else flat.device
        dtype = unit.layout.trainable.dtype
        self.ranks.all_gather_parts(what, spans, read, write, dtype=dtype, kind="weights", device=place)
        for handle, _ in pending:
            handle.wait()
        if flat is not None:
            unit.outdate()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the device where both are there, else between it and host memory."""
        if target.device == source.device and target.device.type != "cpu":
            target.copy_(source)
        elif target.device.type == "cpu":
            self._device.synchronize(self._device.download(target, source, self._device.mark()))
        else:
            self._device.synchronize(self._device.upload(target, source, self._device.mark()))


def _chunk(start: int, values: torch.Tensor) -> Chunk:
    return Chunk(0, start, start + values.numel(), ())
