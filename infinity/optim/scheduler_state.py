"""An lr scheduler of whatever class: how it is stepped after an update, and how its state is saved and restored."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

logger = logging.getLogger(__name__)

_STATE, _CLASS = "lr_scheduler", "lr_scheduler_class"


def state_of_scheduler(scheduler: Any) -> dict[str, Any]:
    """A scheduler's class, and its state if it has a `state_dict`. Empty for None."""
    if scheduler is None:
        return {}
    kept = {_CLASS: type(scheduler).__qualname__}
    return kept | {_STATE: scheduler.state_dict()} if hasattr(scheduler, "state_dict") else kept


def has_state_methods(scheduler: Any) -> bool:
    """Whether a scheduler gives its state and takes it again."""
    return hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")


STATE_NOT_SAVED = (
    "the lr scheduler, a %s, has no state_dict and load_state_dict: it is not saved, and starts from the beginning "
    "in a resumed run. Give its class both methods"
)


@contextlib.contextmanager
def scheduler_with(scheduler: Any, saved: Mapping[str, Any], *, otherwise: str) -> Iterator[None]:
    """Load a saved state into the scheduler; restore the old one if the ``with`` block fails.

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
                "no state of an lr scheduler was saved: this %s keeps its present state. Pass a scheduler with "
                "state_dict to infinity.initialize in each run",
                type(scheduler).__qualname__,
            )
        elif _STATE in saved:
            logger.warning(
                "the state of an lr scheduler (%s) was saved, but this run has no scheduler: the state is ignored. "
                "To load it, pass lr_scheduler= to infinity.initialize",
                saved.get(_CLASS, "of some class"),
            )
        yield
        return
    name, was = type(scheduler).__qualname__, saved.get(_CLASS)
    cure = f"pass the one of that run to infinity.initialize, or {otherwise}"
    # A subclass takes the state of its base: scripts wrap schedulers in classes of their own.
    if was is not None and was not in [each.__qualname__ for each in type(scheduler).__mro__]:
        raise ValueError(f"the saved lr scheduler is a {was}, and this one a {name}: {cure}")
    if not hasattr(scheduler, "load_state_dict"):
        raise ValueError(
            f"the saved lr scheduler cannot be loaded into this {name}, which has no load_state_dict: {cure}"
        )
    # The state before is taken now, and restored if loading or the caller's block fails.
    with contextlib.ExitStack() as undo:
        if hasattr(scheduler, "state_dict"):
            undo.callback(scheduler.load_state_dict, scheduler.state_dict())
        try:
            scheduler.load_state_dict(saved[_STATE])
        except Exception as error:  # whatever its class says
            raise ValueError(f"the saved lr scheduler does not fit this {name} ({error!r}): {cure}") from error
        yield
        undo.pop_all()  # all went well: nothing is undone


def needs_samples(scheduler: Any) -> bool:
    """Whether its ``step`` needs an argument: DeepSpeed gives it the samples of a step, which Megatron's counts.

    ReduceLROnPlateau needs a metric instead.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        return False
    try:
        inspect.signature(scheduler.step).bind()  # called with nothing, as torch's are
    except TypeError:
        return True
    return False


def step_arguments(scheduler: Any, given: Mapping[str, Any], num_samples: int | None) -> inspect.BoundArguments | None:
    """With what it is to be stepped; None: not at all, since there is none, or its owner steps it with a metric.

    Args:
        scheduler: may be None.
        given: what the script passes for it.
        num_samples: of a step, if they are known.

    Raises:
        TypeError: its ``step`` needs others.
    """
    if scheduler is None or (isinstance(scheduler, ReduceLROnPlateau) and not given):
        return None
    positional = (num_samples,) if not given and num_samples is not None and needs_samples(scheduler) else ()
    try:
        return inspect.signature(scheduler.step).bind(*positional, **given)
    except TypeError as error:
        raise TypeError(
            f"{type(scheduler).__name__}.step: {error}. Pass engine.step(lr_kwargs={{...}}), or leave the scheduler out of "
            "infinity.initialize and step it in the script"
        ) from error
