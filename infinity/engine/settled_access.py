"""Weights and states for whoever is not in the midst of a step: whole, of one step, with nothing pending.

Knows parts; must not know the loop, nor what is done with the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.distributed.collectives import Ranks
from infinity.engine.parts import Parts
from infinity.paging.pager import Pager
from infinity.threads.engine_lock import locked


class SettledAccess:
    """`StateAccess` under the engine lock, after all that is pending.

    It keeps states (`StateKeeper`) and main weights for the optimizer, and gathers parameters for
    `GatheredParameters`.

    Attributes:
        owner: The engine, which lives as long as somebody has this.
        num_loads: How often states were replaced.
    """

    def __init__(self, owner: object, parts: Callable[[], Parts], check: Callable[[], None]) -> None:
        """
        Args:
            owner: the engine.
            parts: gives the engine's present ones.
            check: raises if the engine cannot be used now, or its weights are of two steps.
        """
        self.owner = owner
        self.num_loads = 0
        self._parts = parts
        self._check = check

    @property
    def data_ranks(self) -> Ranks:
        """The processes that have the same part of the model, each with its own data."""
        return self._parts().mesh.data

    @property
    def _pager(self) -> Pager:
        return self._parts().pager

    @locked
    def flush(self) -> None:
        """See `Engine.flush`."""
        self._check()
        parts = self._parts()
        parts.module_hooks.settle_loads()
        with parts.clock.waiting("update"):
            parts.stream.drain(parts.pager.residency.attach_wanted)
        for unit in parts.module_hooks.units:
            parts.access.store_gathered(unit)
        with parts.clock.waiting("write"):
            parts.storage.flush()
        parts.pager.residency.collect_all()
        self._settle_commit()
        if (
            parts.trimmer is not None
        ):  # who walks through all states gets copies of them, one parameter's after the other
            parts.trimmer.trim()

    def _settle_commit(self) -> None:
        durable = self._parts().durable
        if durable is not None:
            durable.settle()

    def has_place(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter can have optimizer state: it was trainable, or in a group, in `initialize`."""
        return self._parts().access.has_place(parameter)

    @locked
    def has_state(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has optimizer state. Waits for nothing but its first update."""
        return self._parts().access.has_state(parameter)

    @locked
    def gather_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of a parameter's optimizer state, as torch keeps it."""
        self.flush()
        return self._parts().access.state(parameter)

    @locked
    def load_state(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        """Replace a parameter's optimizer state. Raises ValueError, and changes nothing, where that does not fit."""
        self.flush()
        self._parts().access.load_state(parameter, values)
        self.num_loads += 1

    @locked
    def gather_main_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter's fp32 main weight, on the CPU; of a frozen one, its weight as fp32."""
        self.flush()
        return self._parts().access.main_weight(parameter)

    @locked
    def load_main_weight(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Replace a parameter's main weight; its model weight becomes the cast of it.

        Raises:
            ValueError: ``values`` has another shape; nothing has been changed.
        """
        self.flush()
        self._parts().access.load_main_weight(parameter, values)

    def gather(self, parameters: Sequence[nn.Parameter], *, compares: bool = False) -> Any:
        """Make the parameters hold their full weights until `scatter`. See `infinity.GatheredParameters`."""
        with self._pager.gathering():
            self.flush()
            return self._parts().access.gather(parameters, compares=compares), self._pager.save_gathered()

    def scatter(self, gathering: Any) -> None:
        """The counterpart of `gather`: store what was changed."""
        gathered, is_saving = gathering
        self._settle_commit()
        with self._pager.scattering(is_saving=is_saving):
            self._parts().access.scatter(gathered)
