"""The weights in memory of several ranks: gathered after updates, and the same units on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinity.distributed.collectives import Ranks
from infinity.tiers.weight_exchange import WeightExchange
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.paging.parameter_cache import ParameterCache


class RankWeights:
    """Brings what other ranks have updated into a parameter cache. All ranks make the same calls."""

    def __init__(self, cache: ParameterCache, exchange: WeightExchange | None) -> None:
        """``exchange``: None if this process updates all; then nothing is to be done."""
        self._cache = cache
        self._exchange = exchange

    def gather(self, units: Sequence[Unit]) -> None:
        """What the ranks have updated of these units becomes the weights of all.

        That is done unit by unit, beside the updates of those that follow. See `WeightExchange.gather` for what is raised.
        """
        if self._exchange is None:
            return
        cache, divides = self._cache, self._exchange.divides
        divided = [unit for unit in units if divides(unit)]
        kept = self._unify(divided, self._exchange.ranks, keeps=cache.holds_all)
        for unit in units:
            cache.await_update(unit)
            if unit in kept or not divides(unit):
                with cache.clock.waiting("ranks"):
                    self._exchange.gather(unit)

    def align(self) -> None:
        """Have the same units in memory on all ranks: one may have fetched others, because another told it to."""
        if self._exchange is not None and self._exchange.is_divided:
            units = [unit for unit in self._cache.units if self._exchange.divides(unit)]
            self._unify(units, self._exchange.ranks, keeps=True)

    def _unify(self, units: Sequence[Unit], ranks: Ranks, *, keeps: bool) -> list[Unit]:
        """See to it that all ranks have the same of these divided units in memory, and their present weights.

        If ``keeps``, those in the memory of all ranks stay as they are, and are returned: there each rank has the present
        weights of its shard. Of the others, what is in use on some rank is gathered anew, and the rest leaves.
        """
        if not units:
            return []
        cache = self._cache
        with cache.lock:
            # 0: not in memory, 1: in memory, 2: in use.
            states = [(unit.flat is not None) + cache.is_in_use(unit) for unit in units]
            with cache.clock.waiting("ranks"):
                found = ranks.all_gather_ints("changing weights in memory", states)
            kept = []
            for unit, *of_ranks in zip(units, *found, strict=True):
                if keeps and all(of_ranks):
                    kept.append(unit)
                elif max(of_ranks) < 2:
                    cache.evict(unit)
                elif unit.flat is None:
                    cache.make_resident(unit)
                else:
                    cache.refetch(unit)
        return kept
