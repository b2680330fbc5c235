"""The state of an lr scheduler, kept with the name of its class and given back to one that may be another."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

_STATE, _CLASS = "lr_scheduler", "lr_scheduler_class"


def state_of_scheduler(scheduler: Any) -> dict[str, Any]:
    """What is kept of one (None: there is none): its state if it gives one, and its class."""
    if scheduler is None:
        return {}
    kept = {_CLASS: type(scheduler).__qualname__}
    return kept | {_STATE: scheduler.state_dict()} if hasattr(scheduler, "state_dict") else kept


def can_be_kept(scheduler: Any) -> bool:
    """Whether a scheduler gives its state and takes it again."""
    return hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")


NOT_KEPT = (
    "the lr scheduler, a %s, has no state_dict and load_state_dict: it is not saved, and begins anew when the training goes "
    "on. Give its class both"
)


@contextlib.contextmanager
def scheduler_with(scheduler: Any, saved: Mapping[str, Any], *, otherwise: str) -> Iterator[None]:
    """It has the state that was saved; as before where the ``with`` block fails.

    Args:
        scheduler: None: there is none, and what was saved is left out.
        saved: with what `state_of_scheduler` gave.
        otherwise: what a script can do that has another scheduler, for the message.

    Raises:
        ValueError: the state is another scheduler's, or this one takes none; it is as it was.
    """
    if _STATE not in saved or scheduler is None:
        if scheduler is not None:
            logger.warning(
                "no state of an lr scheduler was saved: this %s goes on as it is. Pass the scheduler to infinity.initialize in "
                "each run, of a class with state_dict",
                type(scheduler).__qualname__,
            )
        elif _STATE in saved:
            logger.warning(
                "the state of an lr scheduler (%s) was saved, and there is none now: it is left out. Pass it as lr_scheduler= to "
                "infinity.initialize to go on with it",
                saved.get(_CLASS, "of some class"),
            )
        yield
        return
    name, was = type(scheduler).__qualname__, saved.get(_CLASS)
    cure = f"pass the one of that run to infinity.initialize, or {otherwise}"
    if was is not None and was not in [each.__qualname__ for each in type(scheduler).__mro__]:
        raise ValueError(f"the saved lr scheduler is a {was}, and this one a {name}: {cure}")
    if not hasattr(scheduler, "load_state_dict"):
        raise ValueError(
            f"the saved lr scheduler cannot be given back to this {name}, which has no load_state_dict: {cure}"
        )
    with contextlib.ExitStack() as undo:
        if hasattr(scheduler, "state_dict"):
            undo.callback(scheduler.load_state_dict, scheduler.state_dict())
        try:
            scheduler.load_state_dict(saved[_STATE])
        except Exception as error:  # whatever its class says
            raise ValueError(f"the saved lr scheduler does not fit to this {name} ({error!r}): {cure}") from error
        yield
        undo.pop_all()
