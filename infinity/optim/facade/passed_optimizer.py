"""The optimizer that a script passed to `initialize`: while the engine lives, it is the engine's optimizer.

Its class and attributes are exchanged for those of the paged optimizer, so that every reference to it works: the script's, a
scheduler's, a trainer's. At the end of the engine it gets its own back. The states are gone then: they may be larger than
memory, so nothing is copied. A script that goes on without them gets an error.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from typing import Any, NoReturn

from torch.optim import Optimizer

from infinity.errors import OptimizerNotPageableError, StepError
from infinity.optim.facade.paged_optimizer import PagedOptimizer

logger = logging.getLogger(__name__)


class PassedOptimizer:
    """Turns a script's optimizer into a paged one, and back."""

    def __init__(self, passed: Any, own: Optimizer, paged: PagedOptimizer) -> None:
        """
        Args:
            passed: what the script has.
            own: has the class and the very attributes of ``passed``, and keeps them meanwhile.
            paged: the engine's, whose attributes both have from now on.

        Raises:
            OptimizerNotPageableError: Python cannot exchange the class.
        """
        self.optimizer = passed
        """The script's, which is a `PagedOptimizer` until `restore`."""
        self._own = own
        name = type(own).__name__  # loggers show it
        try:
            # A class of the same name. `object.__setattr__`, because the script's class may have a __setattr__ of its
            # own.
            object.__setattr__(passed, "__class__", type(name, (PagedOptimizer,), {}))
        except TypeError as error:
            raise OptimizerNotPageableError(
                name,
                f"Python cannot turn the instance into the one that makes the engine's steps ({error})",
                cure="Pass the class, or a functools.partial of it: initialize(optimizer=functools.partial(cls, lr=...))",
            ) from error
        object.__setattr__(passed, "__dict__", vars(paged))
        # torch's schedulers wrap `step` on the instance, and warn if the mark is missing. The script's scheduler has
        # marked its optimizer before: the paged one gets the same mark.
        if hasattr(vars(own).get("step"), "_wrapped_by_lr_sched"):
            step: Any = functools.partial(PagedOptimizer.step, passed)  # it is a PagedOptimizer now
            step._wrapped_by_lr_sched = True
            vars(paged)["step"] = step
        paged.adopt_optimizer(passed)

    def restore(self, *, had_states: bool) -> None:
        """The script's optimizer is what it was, but for what was changed in its groups. May be called again.

        Args:
            had_states: it would have states in plain torch.
        """
        if not isinstance(self.optimizer, PagedOptimizer):
            return
        object.__setattr__(self.optimizer, "__dict__", vars(self._own))
        object.__setattr__(self.optimizer, "__class__", type(self._own))
        # In plain torch the states would be here: an empty dict would let a script start anew without notice.
        if had_states and not self.optimizer.state:
            self.optimizer.state = _Gone()


_GONE = "the engine that held the states of this optimizer is closed, and the states are lost"


class _Gone(defaultdict[Any, Any]):
    """`optimizer.state` after its engine: refuses steps and state dicts, until ``load_state_dict`` puts another in its place."""

    def __getitem__(self, key: Any) -> NoReturn:
        cure = "Call optimizer.state_dict() before engine.close(), and load the result with optimizer.load_state_dict()"
        raise StepError.order("step()", _GONE, cure=cure)

    def items(self) -> NoReturn:
        raise StepError.order("state_dict()", _GONE, cure="Call it before engine.close()")


def begin_anew(optimizer: Optimizer) -> None:
    """An optimizer is passed that may have been passed before."""
    if isinstance(optimizer.state, _Gone):
        optimizer.state = defaultdict(dict)
        logger.warning(
            "the optimizer was passed to an earlier engine, and its states were lost when that engine closed: it "
            "starts without states. To keep them, call optimizer.state_dict() before engine.close() and load the "
            "result"
        )
