"""Whether the vertical schedule saves anything, before the first step.

Pure arithmetic on predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infinity.planning.cost_model import best_placement, predict
from infinity.planning.inputs import Request, UnitSize
from infinity.planning.placement import Placement, place
from infinity.vertical.suitability import Suitability

_ACTIVATIONS_SHARE = 4
"""One part in so many of what the budget leaves is for units' inputs."""
_LEAST_SAVED_SHARE = 0.1
"""Less of a step's bytes than this is not worth computing everything once more."""


def place_for_schedule(
    asked: str, units: Sequence[UnitSize], request: Request, order: Sequence[int]
) -> tuple[Placement, Suitability]:
    """The placement, with room for units' inputs if steps may go vertically, and whether they may.

    Args:
        asked: the config's ``infinity.schedule``.
        units, request: see `infinity.planning.placement.place`.
        order: in which one micro-batch is expected to touch its units.

    Raises:
        BudgetTooSmallError, ConfigValueError: see `infinity.planning.placement.place`.
    """
    if asked == "ordinary" or (asked == "auto" and request.num_micro_batches == 1):
        return best_placement(units, request, order, len(units)), Suitability(asked, "a step has one micro-batch")
    # Gradients take what they take with one micro-batch: they are summed before they go anywhere.
    placement = _with_activations(units, replace(request, num_micro_batches=1), order)
    reason = reason_against(asked, units, request, placement, order)
    if reason is not None:
        placement = best_placement(units, request, order, len(units))
    return placement, Suitability(asked, reason)


def _with_activations(units: Sequence[UnitSize], request: Request, order: Sequence[int]) -> Placement:
    activations = 0
    if request.shares_host_memory:
        activations = (request.budget_bytes - place(units, request).minimum_bytes) // _ACTIVATIONS_SHARE
    smaller = replace(request, budget_bytes=request.budget_bytes - activations)
    return replace(best_placement(units, smaller, order, len(units)), activation_bytes=activations)


def reason_against(
    asked: str, units: Sequence[UnitSize], request: Request, placement: Placement, order: Sequence[int]
) -> str | None:
    """Why steps had better go in the ordinary order; None if the vertical one is worth it.

    Args:
        asked: the config's ``infinity.schedule``.
        units, request, placement: see `infinity.planning.placement`.
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
