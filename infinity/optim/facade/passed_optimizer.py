"""The optimizer that a script passed to `initialize`, and may go on calling in place of the one that it got.

It has the same groups, but no states: those lie with the paged one. So a state dict of either is that of the paged one, a
state dict that is loaded into either goes there, and a step of the passed one, which would begin anew, is refused. As long as
nobody steps the paged one and loads nothing, the passed one is an ordinary optimizer with states of its own in memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

from torch.optim import Optimizer

from infinity.errors import StepOrderError
from infinity.optim.facade.paged_optimizer import PagedOptimizer

logger = logging.getLogger(__name__)
_WHAT = "the optimizer that was passed to infinity.initialize"


class PassedOptimizer:
    """Hooks on it. Torch calls hooks of either for both, since their dictionaries are shared: each looks whose call it is."""

    def __init__(self, passed: Optimizer, paged: PagedOptimizer) -> None:
        """Both are the caller's; neither is kept alive."""
        self._passed = weakref.ref(passed)
        self._paged: Callable[[], PagedOptimizer | None] = weakref.ref(paged)
        self._is_used = False
        """Whether the paged one has had states."""
        self._handles = [
            passed.register_step_pre_hook(self._before_step),
            passed.register_step_post_hook(self._note_use),
            passed.register_state_dict_post_hook(self._after_state_dict),
            passed.register_load_state_dict_pre_hook(self._before_load),
            passed.register_load_state_dict_post_hook(self._note_use),
        ]
        _known[passed] = self

    def remove(self) -> None:
        """Another engine gets it."""
        for handle in self._handles:
            handle.remove()
        self.forget_engine()

    def forget_engine(self) -> None:
        """The engine ends: what is loaded from now on is the passed optimizer's own."""
        self._paged = lambda: None

    @property
    def lacks_states(self) -> bool:
        """Whether the states that it would have in plain torch lie, or lay, with the paged one."""
        passed = self._passed()
        return self._is_used and passed is not None and not passed.state

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is self._passed() and self.lacks_states:
            raise StepOrderError(
                "step()",
                f"{_WHAT} has no states: they lie with the one that it returned, and go with the engine",
                cure="Call step() of the one that was returned. After engine.close(), load what its state_dict() gave before",
            )

    def _note_use(self, optimizer: Optimizer, *_: Any) -> None:
        self._is_used = self._is_used or isinstance(optimizer, PagedOptimizer)

    def _after_state_dict(self, optimizer: Optimizer, _: dict[str, Any]) -> dict[str, Any] | None:
        if optimizer is not self._passed() or not self.lacks_states:
            return None
        paged = self._paged()
        if paged is None:
            raise StepOrderError(
                "state_dict()",
                f"the states of {_WHAT} went with its engine",
                cure="Call it before engine.close()",
            )
        return paged.state_dict()

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        paged = self._paged()
        if optimizer is not self._passed() or paged is None or optimizer.state:
            return None
        paged.load_state_dict(state_dict)
        numbers = count()
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]
        return {"state": {}, "param_groups": groups}


_known: weakref.WeakKeyDictionary[Optimizer, PassedOptimizer] = weakref.WeakKeyDictionary()


def let_go(optimizer: Optimizer) -> None:
    """An optimizer is passed that may have been passed before."""
    before = _known.pop(optimizer, None)
    if before is None:
        return
    if before.lacks_states:
        logger.warning(
            "the states of the optimizer went with the engine that it was passed to before: it begins anew. Load what "
            "optimizer.state_dict() gave before engine.close() to go on"
        )
    before.remove()
