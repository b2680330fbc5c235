"""How an lr scheduler of whatever class is stepped after an update.

Knows signatures; must not know engines.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau


def needs_samples(scheduler: Any) -> bool:
    """Whether its ``step`` needs an argument: DeepSpeed gives it the samples of a step, which Megatron's counts.

    ReduceLROnPlateau needs a metric instead.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        return False
    try:
        inspect.signature(scheduler.step).bind()
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
