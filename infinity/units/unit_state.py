"""Who holds memory for a unit's weights, and what may happen to it next.

Knows states; must not know units, tensors or when anything happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class UnitState(Enum):
    """Where a unit's weights are, and to whom its flat buffer belongs. See ``infinity.units.unit``."""

    PAGED_OUT = auto()
    """Nobody holds memory: the weights are where they rest. Next: they come into a buffer, or are updated where they rest."""
    ARRIVING = auto()
    """The flat buffer belongs to a read. Next: the weights are there, or their update is asked for, or the read has failed."""
    RESIDENT = auto()
    """The unit holds the flat buffer with its weights. Next: parameters look at it, an update begins, or it is given back."""
    BOUND = auto()
    """The unit and its parameters hold the flat buffer, for modules and operations. Next: that ends; if the user has
    gathered the unit, it may be updated meanwhile."""
    UPDATING_PAGED_OUT = auto()
    """The unit holds nothing, the update's pages hold a chunk at a time. What rests may not be read. Next: the update ends,
    or a buffer is found into which it puts the new weights."""
    UPDATING_ARRIVING = auto()
    """The flat buffer belongs to an update that fills it, or to a read after which the update begins. Next: either ends."""
    UPDATING_RESIDENT = auto()
    """The flat buffer belongs to the update: it reads and writes the weights there. Next: it ends."""
    UPDATING_BOUND = auto()
    """As UPDATING_RESIDENT, while the user keeps the unit gathered; the engine waits for the update at once. Next: it ends,
    or the parameters are cut off all the same (at the end of the engine, or in a forked process)."""


_PAIRS = {
    UnitState.PAGED_OUT: UnitState.UPDATING_PAGED_OUT,
    UnitState.ARRIVING: UnitState.UPDATING_ARRIVING,
    UnitState.RESIDENT: UnitState.UPDATING_RESIDENT,
    UnitState.BOUND: UnitState.UPDATING_BOUND,
}
"""Without and with an update that is pending."""

UNIT_MOVES: Mapping[str, Mapping[UnitState, UnitState]] = {
    "adopt": {UnitState.PAGED_OUT: UnitState.RESIDENT},
    "fetch_into": {
        UnitState.PAGED_OUT: UnitState.ARRIVING,
        UnitState.UPDATING_PAGED_OUT: UnitState.UPDATING_ARRIVING,
    },
    "expect": {UnitState.ARRIVING: UnitState.ARRIVING},
    "land": {
        UnitState.ARRIVING: UnitState.RESIDENT,
        UnitState.UPDATING_ARRIVING: UnitState.UPDATING_RESIDENT,
    },
    "bind": {UnitState.RESIDENT: UnitState.BOUND, UnitState.BOUND: UnitState.BOUND},
    "unbind": {
        **{state: state for pair in _PAIRS.items() for state in pair},
        UnitState.BOUND: UnitState.RESIDENT,
        UnitState.UPDATING_BOUND: UnitState.UPDATING_RESIDENT,
    },
    "begin_update": _PAIRS,
    "end_update": {after: before for before, after in _PAIRS.items()},
    "release": {
        UnitState.ARRIVING: UnitState.PAGED_OUT,
        UnitState.RESIDENT: UnitState.PAGED_OUT,
        UnitState.UPDATING_ARRIVING: UnitState.UPDATING_PAGED_OUT,
    },
}
"""Method of `Unit` -> state before -> state after. See [Note: debug mode] in ``infinity.state_machine``."""
