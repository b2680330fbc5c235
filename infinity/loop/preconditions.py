"""What has to be so before a model is used, and what is settled first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity.loop.backward import Backwards
from infinity.loop.load_hooks import OpenLoads
from infinity.loop.phase import PhaseGuard
from infinity.metrics.reporter import Reporter
from infinity.updates.step_groups import StepGroups


class Preconditions:
    """Raises what went wrong in the background, or why the call that begins makes no sense now."""

    def __init__(
        self,
        checks: Sequence[Callable[[], None]],
        guard: PhaseGuard,
        backwards: Backwards,
        groups: StepGroups,
        loads: OpenLoads,
        reporter: Reporter,
    ) -> None:
        """``checks``: of the parts, in this order; each raises what it has to say against any call."""
        self._checks = tuple(checks)
        self._guard = guard
        self._backwards = backwards
        self._groups = groups
        self._loads = loads
        self._reporter = reporter

    def check_usable(self) -> None:
        """Some call begins."""
        for check in self._checks:
            check()

    def check_settled(self) -> None:
        """Weights are about to be changed or read: they must be of one step, and of one training."""
        self.check_usable()
        self._guard.check_settled()

    def begin_forward(self) -> None:
        """A forward phase begins."""
        self.check_usable()
        self._reporter.begin()
        self._guard.check_loaded()
        self._guard.check_settled()
        self._loads.settle()
        self._backwards.collect()
        if torch.is_grad_enabled() and self._groups.before_forward():
            self._backwards.collector.forget_history()
