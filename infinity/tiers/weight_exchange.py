"""New model weights of the shards that other ranks update, as they come to where this rank keeps its copy.

Only the thread that trains calls it, in an order that follows from model and script alone: see [Note: ranks] in
``infinity.distributed.collectives``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from infinity.device.compute import ComputeDevice
from infinity.distributed.collectives import Ranks
from infinity.tiers.divided_weights import DividedWeights
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import Chunk
from infinity.units.shards import Shards
from infinity.units.unit import Unit
from swapper import Handle

_MOST_PENDING = 4
"""Writes under way, each of one block of one rank."""


@dataclass(eq=False)
class WeightExchange:
    """Each rank's shard of a unit's trainable weights goes to all. Memory: two blocks, see `Ranks.all_gather_parts`.

    Attributes:
        ranks: those that divide states.
        shards: which of them has the weights of which elements.
    """

    ranks: Ranks = field(default_factory=Ranks)
    shards: Shards = field(default_factory=Shards)
    _weights: WeightStore | None = None
    """Where weights are stored that do not stay in flat buffers; None if all stay there."""
    _device: ComputeDevice = field(default_factory=ComputeDevice)
    """Where flat buffers are."""

    @property
    def is_divided(self) -> bool:
        """Whether this rank keeps no more of some units' weights than its shards."""
        return isinstance(self._weights, DividedWeights)

    def divides(self, unit: Unit) -> bool:
        """Whether this rank keeps no more of the unit's weights than its shard."""
        return isinstance(self._weights, DividedWeights) and self._weights.holds(unit)

    def before(self, unit: Unit) -> None:
        """Weights of the unit are about to be written to by the script. All ranks come here, where it is divided.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        if self.divides(unit):
            self.ranks.all_gather_ints(f"writing to the weights of {unit.name}")

    def gather(self, unit: Unit) -> None:
        """The unit's trainable weights in memory, and where they rest, become what the rank has that updates them.

        Where they are divided, those in memory do: of units that all ranks have there. No update of it may be pending. All
        ranks call it at the same point of their scripts.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        if not self.shards.is_divided or unit.layout.trainable is None:
            return
        if unit.arrival is not None:
            unit.arrival.wait()  # what it brings was read before the others' shards are written
        what = f"gathering the weights of {unit.name}"
        self.ranks.all_gather_ints(what)
        flat = None if unit.flat is None else unit.trainable_view(unit.flat.tensor())
        rests = self._weights if not unit.is_persistent else None
        is_written = rests is not None and not self.divides(unit)
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
            if is_written and rests is not None:
                copy = found.to("cpu", copy=True)  # the memory it came in is used again
                handle = rests.write_chunk(unit, _chunk(start, copy), copy)
                if handle is not None:
                    pending.append((handle, copy))
            while len(pending) > _MOST_PENDING:
                pending.popleft()[0].wait()

        place = "cpu" if flat is None else flat.device
        dtype = unit.layout.trainable.dtype
        self.ranks.all_gather_parts(
            what, self.shards.spans(unit), read, write, dtype=dtype, kind="weights", device=place
        )
        for handle, _ in pending:
            handle.wait()
        if flat is not None:
            unit.outdate()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the device where both are there, else between it and host memory."""
        if target.device == source.device and target.device.type != "cpu":
            target.copy_(source)
        else:
            copy = self._device.download if target.device.type == "cpu" else self._device.upload
            self._device.synchronize(copy(target, source, self._device.mark()))


def _chunk(start: int, values: torch.Tensor) -> Chunk:
    return Chunk(0, start, start + values.numel(), ())
