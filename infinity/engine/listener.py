"""What follows in an engine from what its pager sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.engine.parts import Parts
from infinity.errors import EngineClosedError
from infinity.loop.backward import Backwards
from infinity.loop.phase import PhaseGuard
from infinity.paging.listener import PagerListener
from infinity.units.layout import Slot
from infinity.units.unit import Unit


class EngineListener(PagerListener):
    """Passes each event on to the parts that have to know."""

    def __init__(self, parts: Parts, backwards: Backwards, guard: PhaseGuard) -> None:
        self._parts = parts
        self._backwards = backwards
        self._guard = guard

    def check_usable(self) -> None:
        self._guard.check_open()
        self._parts.pager.lock.check_process("this call")
        if self._parts.storage.is_closed:
            raise EngineClosedError.at_exit("this call")
        self._parts.parameter_handler.check_assigned()
        self._backwards.raise_deferred()
        self._parts.stream.raise_error()
        self._parts.storage.raise_pending()

    def check_settled(self) -> None:
        self._guard.check_settled()

    def begin_call(self) -> None:
        self._parts.module_hooks.follow_compilation()

    def begin_forward(self) -> None:
        self._parts.reporter.begin()
        self._guard.check_loaded()
        self._guard.check_settled()
        self._parts.module_hooks.settle_loads()
        self._backwards.collect()
        if torch.is_grad_enabled() and self._parts.groups.before_forward():
            self._backwards.collector.forget_history()

    def note_use(self, unit: Unit, slots: Sequence[Slot]) -> None:
        self._backwards.collector.note_call(unit, slots)

    def note_parts(self, unit: Unit, *, by_script: bool) -> None:
        self._backwards.collector.note_parts(unit, by_script=by_script)

    def note_backward_use(self, unit: Unit, *, is_saved: bool) -> None:
        self._backwards.note_use(unit, is_saved=is_saved)

    def end_backward(self) -> None:
        self._backwards.end_own_of_user()

    def pause(self) -> None:
        if self._parts.trimmer is not None:
            self._parts.trimmer.trim()
