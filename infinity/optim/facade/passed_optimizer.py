"""The optimizer that a script passed to `initialize`: while the engine lives, it is the engine's optimizer.

Its class and attributes are exchanged for those of the paged optimizer, so that every reference to it works: the script's, a
scheduler's, a trainer's. At the end of the engine it gets its own back. The states are gone then: they may be larger than
memory, so nothing is copied. Whoever goes on without them is stopped.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

from torch.optim import Optimizer

from infinity.errors import OptimizerNotPageableError, StepError
from infinity.optim.facade.paged_optimizer import PagedOptimizer

logger = logging.getLogger(__name__)


class PassedOptimizer:
    """Turns a script's optimizer into a paged one, and back."""

    def __init__(self, passed: Optimizer, own: Optimizer, paged: PagedOptimizer) -> None:
        """
        Args:
            passed: what the script has.
            own: has the class and the very attributes of ``passed``, and keeps them meanwhile.
            paged: the engine's, whose attributes both have from now on.

        Raises:
            OptimizerNotPageableError: Python cannot exchange the class.
        """
        self._passed = passed
        self._own = own
        name = type(own).__name__  # loggers show it
        try:
            object.__setattr__(passed, "__class__", type(name, (PagedOptimizer,), {}))
        except TypeError as error:
            raise OptimizerNotPageableError(
                name,
                f"Python cannot turn the instance into the one that makes the engine's steps ({error})",
                cure="Pass the class, or a functools.partial of it: initialize(optimizer=functools.partial(cls, lr=...))",
            ) from error
        object.__setattr__(passed, "__dict__", vars(paged))
        if hasattr(vars(own).get("step"), "_wrapped_by_lr_sched"):  # the mark by which a scheduler knows its own
            step: Any = functools.partial(PagedOptimizer.step, self.optimizer)  # it is one now
            step._wrapped_by_lr_sched = True
            vars(paged)["step"] = step
        paged.note_passed(passed)

    @property
    def optimizer(self) -> Any:
        """The script's, which is a `PagedOptimizer` until `give_back`."""
        return self._passed

    def give_back(self, *, had_states: bool) -> None:
        """The script's optimizer is what it was, but for what was changed in its groups. May be called again.

        Args:
            had_states: it would have states in plain torch.
        """
        if not isinstance(self._passed, PagedOptimizer):
            return
        object.__setattr__(self._passed, "__dict__", vars(self._own))
        object.__setattr__(self._passed, "__class__", type(self._own))
        if had_states and not self._passed.state:
            _refuse_until_loaded(self._passed)


_without_states: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
"""Optimizers whose states went with their engines, and the handles of the hooks that refuse to go on without."""


_GONE = "the states of the optimizer that was passed to infinity.initialize went with its engine, which is closed"


def _refuse_until_loaded(optimizer: Optimizer) -> None:
    """Refuse steps and state dicts until it gets other states."""
    reference = weakref.ref(optimizer)  # the optimizer of the next engine has the same hooks

    def refusing(what: str, cure: str) -> Any:
        def refuse(caller: Optimizer, *_: Any) -> None:
            if caller is reference() and not caller.state:
                raise StepError.order(what, _GONE, cure=cure)

        return refuse

    def end(caller: Optimizer) -> None:
        if caller is reference():
            _end_refusal(caller)

    cure = "Load into it what its state_dict() gave before engine.close(), to go on"
    _without_states[optimizer] = [
        optimizer.register_step_pre_hook(refusing("step()", cure)),
        optimizer.register_state_dict_pre_hook(refusing("state_dict()", "Call it before engine.close()")),
        optimizer.register_load_state_dict_post_hook(end),
    ]


def _end_refusal(optimizer: Optimizer) -> bool:
    handles = _without_states.pop(optimizer, [])
    for handle in handles:
        handle.remove()
    return bool(handles)


def begin_anew(optimizer: Optimizer) -> None:
    """An optimizer is passed that may have been passed before."""
    if _end_refusal(optimizer) and not optimizer.state:
        logger.warning(
            "the states of the optimizer went with the engine that it was passed to before: it begins anew. Load what "
            "optimizer.state_dict() gave before engine.close() to go on"
        )
