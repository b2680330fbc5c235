"""Weights and states for callers outside the training loop: of one step, with nothing pending."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.state_access import StateAccess
from infinity.checkpoint.stored_weights import StoredWeights
from infinity.distributed.collectives import Ranks
from infinity.engine.resources import EngineResources
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.threads.engine_lock import locked
from infinity.updates.stream import UpdateStream


@dataclass(eq=False)
class ConsistentAccess:
    """`StateAccess` under the engine lock, which first finishes what is pending. For `PagedOptimizer` and
    `GatheredParameters`.

    Attributes:
        num_loads: How often states were replaced.
        data_ranks: The processes that have the same part of the model, each with its own data.
    """

    _coordinator: ParameterCoordinator
    _access: StateAccess
    _stored: StoredWeights
    _stream: UpdateStream
    _storage: EngineResources
    data_ranks: Ranks
    num_loads: int = 0

    @locked
    def flush(self) -> None:
        """See `Engine.flush`."""
        self._coordinator.preconditions.check_consistent()
        # First the updates, which write; then what the user has written into gathered weights, on top of them; then the
        # drives. Afterwards buffers may be taken note of, since all has arrived.
        clock, parameter_cache = self._coordinator.clock, self._coordinator.parameter_cache
        with clock.waiting("update"):
            self._stream.drain(parameter_cache.attach_wanted)
        for unit in parameter_cache.units:
            self._stored.store_gathered(unit)
        with clock.waiting("write"):
            self._storage.flush()
        parameter_cache.collect_all()
        # In a durable run: the step's commit ends here, and its error is raised here.
        self._stored.before_writes()
        self._coordinator.pause()  # who walks through all states gets copies of them, one parameter's after the other

    def has_place(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter can have optimizer state: it was trainable, or in a group, in `initialize`."""
        return self._access.has_place(parameter)

    @locked
    def has_state(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has optimizer state. Waits for nothing but its first update."""
        return self._access.has_state(parameter)

    @locked
    def gather_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of a parameter's optimizer state, as torch keeps it."""
        self.flush()
        return self._access.state(parameter)

    @locked
    def load_state(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        """Replace a parameter's optimizer state. Raises ValueError, and changes nothing, where that does not fit."""
        self.flush()
        self._access.load_state(parameter, values)
        self.num_loads += 1

    @locked
    def gather_main_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter's fp32 main weight, on the CPU; of a frozen one, its weight as fp32."""
        self.flush()
        return self._access.main_weight(parameter)

    @locked
    def load_main_weight(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Replace a parameter's main weight; its model weight becomes the cast of it.

        Raises:
            ValueError: ``values`` has another shape; nothing has been changed.
        """
        self.flush()
        self._access.load_main_weight(parameter, values)

    @contextlib.contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], *, compares: bool = False) -> Iterator[None]:
        """The parameters hold their full weights inside the ``with`` block. See `infinity.GatheredParameters`."""
        with self._coordinator.lock.held("gathering parameters"):
            self.flush()
            with self._access.gathered(parameters, compares=compares), self._coordinator.gathering():
                yield
