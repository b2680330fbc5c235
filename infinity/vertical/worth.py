"""Whether the vertical schedule saves anything, before the first step.

Pure arithmetic on predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infinity.placement import Placement, Request, UnitSize, place, predict
from infinity.vertical.suitability import Suitability

_LEAST_SAVED_SHARE = 0.1
"""Less of a step's bytes than this is not worth computing everything once more."""


def place_for_schedule(
    asked: str, units: Sequence[UnitSize], request: Request, order: Sequence[int]
) -> tuple[Placement, Suitability]:
    """The placement, with room for units' inputs if steps may go vertically, and whether they may.

    Args:
        asked: the config's ``infinity.schedule``.
        units, request: see `infinity.placement.place`.
        order: in which one micro-batch is expected to touch its units.

    Raises:
        BudgetTooSmallError, ConfigValueError: see `infinity.placement.place`.
    """
    if asked == "ordinary" or (asked == "auto" and request.num_micro_batches == 1):
        return place(units, request), Suitability(asked, "a step has one micro-batch")
    # Gradients take what they take with one micro-batch: they are summed before they go anywhere.
    vertical = replace(request, keeps_activations=request.shares_host_memory, num_micro_batches=1)
    placement = place(units, vertical)
    reason = reason_against(asked, units, request, placement, order)
    return placement if reason is None else place(units, request), Suitability(asked, reason)


def reason_against(
    asked: str, units: Sequence[UnitSize], request: Request, placement: Placement, order: Sequence[int]
) -> str | None:
    """Why steps had better go in the ordinary order; None if the vertical one is worth it.

    Args:
        asked: the config's ``infinity.schedule``.
        units, request, placement: see `infinity.placement`.
        order: in which one micro-batch is expected to touch its units.
    """
    if asked == "vertical":
        return None
    ordinary = predict(units, request, placement, order, len(units))
    vertical = predict(units, replace(request, num_micro_batches=1), placement, order, len(units))
    before = ordinary.read_bytes + ordinary.write_bytes
    saved = before - vertical.read_bytes - vertical.write_bytes
    if saved < _LEAST_SAVED_SHARE * before or saved == 0:
        return "it would save hardly any bytes: weights and gradients stay in memory"
    return None
