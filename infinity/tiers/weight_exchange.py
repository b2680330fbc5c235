"""New model weights of the shares that other ranks update, as they come to where this rank keeps its copy.

Knows units, shares and where weights rest; must not know what an update is. Only the thread that trains calls it, in an
order that follows from model and script alone: see [Note: ranks] in ``infinity.distributed.collectives``.
"""

from __future__ import annotations

from collections import deque

import torch

from infinity.device.compute import ComputeDevice
from infinity.distributed.collectives import Ranks
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import Chunk
from infinity.units.shares import Shares
from infinity.units.unit import Unit
from swapper import Handle

_MOST_PENDING = 4
"""Writes under way, each of one block of one rank."""


class WeightExchange:
    """Each rank's share of a unit's trainable weights goes to all. Memory: two blocks, see `Ranks.gather_parts`."""

    def __init__(self, ranks: Ranks, shares: Shares, weights: WeightStore | None, device: ComputeDevice) -> None:
        """
        Args:
            ranks: who exchanges.
            shares: which rank has the weights of which elements.
            weights: where weights rest that do not stay in flat buffers; None if all stay there.
            device: where flat buffers are.
        """
        self.ranks = ranks
        self.shares = shares
        self._weights = weights
        self._device = device

    def gather(self, unit: Unit) -> None:
        """All of the unit's trainable weights become what the rank has that updates them, in memory and where they rest.

        No update of the unit may be pending. All ranks call it at the same point of their scripts.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        if not self.shares.is_divided or unit.layout.trainable is None:
            return
        if unit.arrival is not None:
            unit.arrival.wait()  # what it brings was read before the others' shares are written
        what = f"gathering the weights of {unit.name}"
        spans = self.shares.spans(unit)
        self.ranks.meet(what, [number for span in spans for number in span])
        flat = unit.trainable_view(unit.flat.tensor()) if unit.flat is not None else None
        rests = self._weights if not unit.stays_resident else None
        pending: deque[tuple[Handle, torch.Tensor]] = deque()

        def read(start: int, target: torch.Tensor) -> None:
            if flat is not None:
                source = flat[start : start + target.numel()]
                self._device.synchronize(self._device.download(target, source, self._device.mark()))
            elif rests is not None:
                handle = rests.read_chunk(unit, _chunk(start, target), target)
                if handle is not None:
                    handle.wait()

        def write(start: int, found: torch.Tensor) -> None:
            if flat is not None:
                self._device.synchronize(
                    self._device.upload(flat[start : start + found.numel()], found, self._device.mark())
                )
            if rests is not None:
                copy = found.clone()  # the memory it came in is used again
                handle = rests.write_chunk(unit, _chunk(start, copy), copy)
                if handle is not None:
                    pending.append((handle, copy))
            while len(pending) > _MOST_PENDING:
                pending.popleft()[0].wait()

        self.ranks.gather_parts(what, spans, read, write, dtype=unit.layout.trainable.dtype, kind="weights")
        for handle, _ in pending:
            handle.wait()


def _chunk(start: int, values: torch.Tensor) -> Chunk:
    return Chunk(0, start, start + values.numel(), ())
