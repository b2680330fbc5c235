"""The state of an lr scheduler, given back to one that may be another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def scheduler_with(scheduler: Any, saved: Mapping[str, Any], *, otherwise: str) -> Iterator[None]:
    """It has the state that was saved, if it takes one; as before where the ``with`` block fails.

    ``otherwise``: what a script can do that has another scheduler, for the message.

    Raises:
        ValueError: the state is another scheduler's, which is as it was.
    """
    if not hasattr(scheduler, "load_state_dict"):
        yield
        return
    with contextlib.ExitStack() as undo:
        if hasattr(scheduler, "state_dict"):
            undo.callback(scheduler.load_state_dict, scheduler.state_dict())
        try:
            scheduler.load_state_dict(saved)
        except Exception as error:  # whatever its class says
            raise ValueError(
                f"the saved lr scheduler does not fit to this {type(scheduler).__name__} ({error!r}): pass the one of that run "
                f"to infinity.initialize, or {otherwise}"
            ) from error
        yield
        undo.pop_all()


__all__ = ["scheduler_with"]
