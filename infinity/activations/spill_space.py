"""Room on NVMe for what exceeds the memory for activations.

Knows swappers and extents; must not know tensors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from infinity.activations.refusal import Refusal
from infinity.errors import BudgetTooSmallError, StorageError
from swapper import Extent, OutOfSpaceError, Swapper, SwapperError

logger = logging.getLogger(__name__)
_FIRST_BYTES = 64 << 20
BLOCK_BYTES = 4096
"""Direct I/O moves whole blocks of so many bytes."""


class SpillSpace:
    """Extents in volumes that are opened when they are needed: how much is needed shows in the first step.

    Extents of one size are used again and again, from step to step.
    """

    def __init__(self, open_swapper: Callable[[int], Swapper]) -> None:
        """``open_swapper`` opens a volume of a number of bytes; whoever it belongs to closes it."""
        self._open_swapper = open_swapper
        self._swappers: list[Swapper] = []
        self._free: dict[int, list[tuple[Swapper, Extent]]] = {}
        self._sizes: set[int] = set()
        """Of the extents taken since the last `tidy`."""

    def take(self, num_bytes: int) -> tuple[Swapper, Extent]:
        """An extent of ``num_bytes``.

        Raises:
            Refusal: there is no NVMe tier, or its directories have no room.
        """
        self._sizes.add(num_bytes)
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        for swapper in self._swappers:
            try:
                return swapper, swapper.allocate(num_bytes, "activations")
            except OutOfSpaceError:
                continue
        swapper = self._grow(num_bytes)
        return swapper, swapper.allocate(num_bytes, "activations")

    def _grow(self, num_bytes: int) -> Swapper:
        present = sum(swapper.capacity_bytes for swapper in self._swappers)
        rounded = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        wished = max(rounded, present, _FIRST_BYTES)
        try:
            try:
                swapper = self._open_swapper(wished)
            except StorageError:
                swapper = self._open_swapper(rounded)  # little room is better than none
        except BudgetTooSmallError as error:
            raise Refusal(
                "the inputs of units need more memory than infinity.host_memory_budget leaves, and no NVMe tier takes them"
            ) from error
        except StorageError as error:
            logger.warning("no room for the inputs of units: %s", error)
            raise Refusal(f"the inputs of units need more memory than the budget leaves, and {error}") from error
        self._swappers.append(swapper)
        return swapper

    def give_back(self, num_bytes: int, place: tuple[Swapper, Extent]) -> None:
        """The extent is free again."""
        self._free.setdefault(num_bytes, []).append(place)

    def discard(self, place: tuple[Swapper, Extent]) -> None:
        """The extent is not to be used again: a request on it has failed. Its space comes back when that has ended."""
        swapper, extent = place
        with contextlib.suppress(SwapperError):
            swapper.free(extent)

    def tidy(self) -> None:
        """A step has ended: free the extents of sizes that it did not use."""
        for num_bytes in [size for size in self._free if size not in self._sizes]:
            for swapper, extent in self._free.pop(num_bytes):
                swapper.free(extent)
        self._sizes.clear()
