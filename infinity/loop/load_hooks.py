"""``load_state_dict`` on a model that an engine holds.

Knows parameters and torch's hooks; must not know how weights are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from infinity.errors import ModelError
from infinity.threads.frames import callers


class OpenLoads:
    """The calls that have begun and not ended, module by module."""

    def __init__(self) -> None:
        self._hooks: dict[LoadHooks, None] = {}

    def add(self, hooks: LoadHooks) -> None:
        """A call has begun."""
        self._hooks[hooks] = None

    def discard(self, hooks: LoadHooks) -> None:
        """It has ended."""
        self._hooks.pop(hooks, None)

    def clear(self) -> None:
        """There are none."""
        self._hooks.clear()

    def settle(self) -> None:
        """Let go of what a ``load_state_dict`` holds that somebody's hook has cut off."""
        loading = nn.Module.load_state_dict.__code__
        if self._hooks and all(frame.f_code is not loading for frame in callers()):
            for hooks in tuple(self._hooks):
                hooks.after()


@dataclass(eq=False)
class LoadHooks:
    """``load_state_dict`` on one module: its parameters are gathered before and written back after."""

    _parameters: list[nn.Parameter]
    _before_load: Callable[[list[nn.Parameter]], Any]
    _after_load: Callable[[Any], None]
    _note_load: Callable[[], None]
    _open: OpenLoads
    gathered: Any = None
    """What holds the module's parameters open."""

    def before(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise ModelError(
                "load_state_dict(assign=True) would replace parameters that an engine holds",
                cure="Call load_state_dict without assign, or before infinity.initialize",
                fqn=prefix.rstrip("."),
            )
        self.after()
        self._note_load()
        self.gathered = self._before_load(self._parameters)
        self._open.add(self)

    def after(self, *_: Any) -> None:
        """Let go of what the load holds, also if an exception has cut it off; what it has loaded so far is stored."""
        gathered, self.gathered = self.gathered, None
        self._open.discard(self)
        if gathered is not None:
            self._after_load(gathered)
