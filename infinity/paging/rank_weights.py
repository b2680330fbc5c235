"""The weights in memory of several ranks: gathered after updates, and the same units on all of them.

All ranks make the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.paging.parameter_cache import ParameterCache
from infinity.units.unit import Unit


def gather_weights(cache: ParameterCache, units: Sequence[Unit]) -> None:
    """Gather the new weights of these units, of which each rank has updated its shard. A collective call.

    Units are gathered one by one, while later ones are still updated. See `WeightExchange.gather` for errors.
    """
    exchange = cache.exchange
    kept = _unify(cache, units, keeps=cache.holds_all)
    for unit in units:
        cache.await_update(unit)
        if unit in kept or not exchange.divides(unit):
            with cache.clock.waiting("ranks"):
                exchange.gather(unit)


def sum_over_ranks(cache: ParameterCache, what: str, counts: Sequence[int]) -> list[int]:
    """Add up each of these numbers over all ranks. A collective call; the label is equal on all."""
    with cache.clock.waiting("ranks"):
        return [sum(of_ranks) for of_ranks in zip(*cache.exchange.ranks.all_gather_ints(what, counts), strict=True)]


def align_ranks(cache: ParameterCache) -> None:
    """Make the same units resident on all ranks. They can differ if ranks fetched units at another rank's request."""
    _unify(cache, cache.units, keeps=True)


def _unify(cache: ParameterCache, units: Sequence[Unit], *, keeps: bool) -> list[Unit]:
    """Make the same divided units resident on all ranks, with their present weights.

    With ``keeps``, units that are resident on all ranks stay and are returned: each rank has the present weights of its own
    shard there. Of the other units, those in use on some rank are gathered anew, and the rest is evicted.
    """
    divided = [unit for unit in units if cache.exchange.divides(unit)]
    if not divided:
        return []
    with cache.lock:
        # 0: not in memory, 1: in memory, 2: in use.
        states = [(unit.flat is not None) + cache.is_in_use(unit) for unit in divided]
        with cache.clock.waiting("ranks"):
            found = cache.exchange.ranks.all_gather_ints("changing weights in memory", states)
        kept = []
        for unit, *of_ranks in zip(divided, *found, strict=True):
            if keeps and all(of_ranks):
                kept.append(unit)
            elif max(of_ranks) < 2:
                cache.evict(unit)
            elif unit.flat is None:
                cache.make_resident(unit)
            else:
                cache.refetch(unit)
    return kept
