"""What becomes of a model's weights when its engine is closed.

They go back into the model, which is an ordinary one again, if there is room for them: whoever leaves a ``with engine:`` block
expects the model to be there. If there is not, and nobody has saved them, that is said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from infinity.device.host_memory import free_bytes
from infinity.errors import format_bytes
from infinity.units.unit import Unit

logger = logging.getLogger(__name__)
_SHARE = 2
"""No more than one of so many parts of the memory that is free is taken without being asked."""


def leave(
    units: Sequence[Unit],
    device: torch.device,
    flush: Callable[[], None],
    restore: Callable[[], None],
    *,
    is_wanted: bool | None,
    has_unsaved: bool,
) -> None:
    """Finish what is pending, and give the weights back.

    Args:
        units: all.
        device: where the model computes, and gets its weights back.
        flush: finishes what is pending.
        restore: makes the model an ordinary one.
        is_wanted: whether to give them back; None: if they take half of the free memory at most. Where they are wanted, what
            goes wrong is raised.
        has_unsaved: whether there were steps since the weights were saved.
    """
    if is_wanted:
        flush()
        restore()
        return
    if is_wanted is False:
        _finish_pending(flush)
        return
    num_bytes = sum(unit.num_bytes for unit in units)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
    if num_bytes <= free // _SHARE:
        _finish_pending(flush, restore)
        return
    _finish_pending(flush)
    if has_unsaved:
        logger.warning(
            "the trained weights go with the engine: they take %s, and of %s that are free no more than half is taken for "
            "them. Next time save them before (engine.save_16bit_model), or close with engine.close(restore_weights=True)",
            format_bytes(num_bytes),
            format_bytes(free),
        )


def _finish_pending(*steps: Callable[[], None]) -> None:
    """Let ``steps`` finish what is pending. What fails then is logged: the states go anyway."""
    try:
        for step in steps:
            step()
    except Exception:
        logger.warning("an update or write that was still pending failed while the engine was closed", exc_info=True)
