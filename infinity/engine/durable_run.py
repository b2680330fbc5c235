"""A durable run: each step is committed, and the same script goes on from the last one.

Knows what a commit is made of, and when one can be made; must not know how bytes are kept apart (`swapper.Versions`).

[Note: what survives] A commit is made at the end of `Engine.step`, after the updates of that step have been written, and
before `step` returns. So what survives is exactly the steps that have returned. All of a step is in a commit or nothing:
its bytes lie in other places than those of the commit before, until the file that names them is on the drive.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from infinity.checkpoint.random_states import set_random_states
from infinity.config import DurableSection, InfinityConfig
from infinity.engine import commit_parts
from infinity.engine.resources import EngineResources
from infinity.errors import CommitError, StepOrderError, StorageError, UnsupportedModelError
from infinity.paging.pager import Pager
from infinity.tiers.state_store import PagedStateStore
from infinity.units.unit import Unit
from infinity.updates.job import ParameterState
from swapper import RunDirectory, SwapperError, VolumeError

logger = logging.getLogger(__name__)


class Training(Protocol):
    """What of an engine is no tensor of a unit."""

    module: nn.Module
    optimizer: Any
    lr_scheduler: Any
    training_dataloader: Any
    global_steps: int

    def flush(self) -> None: ...

    def rest(self) -> dict[str, Any]: ...

    def count_on(self, counters: Mapping[str, Any]) -> None: ...

    def not_held(self) -> list[torch.Tensor]: ...


class DurableRun:
    """Of one engine."""

    def __init__(self, config: InfinityConfig, section: DurableSection) -> None:
        """Lock the run's directory, and look at its newest commit.

        Raises:
            StorageError: it is in use, damaged, or cannot be used.
        """
        self._section = section
        self._path: Path = section.directories[0].path
        try:
            self.directory = RunDirectory(self._path)
            found = self.directory.newest()
        except (VolumeError, OSError) as error:
            raise StorageError(
                self._path,
                f"cannot hold a durable run: {error}",
                cure="Name another one, or wait for the other process",
                key="infinity.durable_path",
            ) from error
        self._number = 0
        self._header: dict[str, Any] | None = None
        if found is not None:
            self._number = found[0]
            self._header = json.loads(found[1][1])
        self._page_bytes = config.infinity.page_bytes

    def adapted(self, config: InfinityConfig) -> InfinityConfig:
        """The config with the sizes that the newest commit was made with, where it leaves them open."""
        if self._header is None or config.infinity.page_bytes is not None:
            return config
        section = dataclasses.replace(config.infinity, page_bytes=self._header["page_bytes"])
        return dataclasses.replace(config, infinity=section)

    def check(self, layout: Mapping[str, Any], page_bytes: int) -> None:
        """See that the newest commit is of this training. Nothing has been written yet.

        Raises:
            UnsupportedModelError: names what differs.
        """
        self._layout = layout
        self._page_bytes = page_bytes
        if self._header is None:
            return
        commit_parts.check_layout(self._header["layout"], layout, str(self._path))
        if self._header["page_bytes"] != page_bytes:
            raise UnsupportedModelError(
                f"the durable run in '{self._path}' has pages of {self._header['page_bytes']} bytes, not {page_bytes}",
                cure=f"Set infinity.page_bytes to {self._header['page_bytes']}, or leave it out",
            )

    def connect(
        self,
        storage: EngineResources,
        units: Sequence[Unit],
        states: Mapping[tuple[int, int], ParameterState],
        pager: Pager,
        waiting: Callable[[str], Any],
    ) -> None:
        """Take note of what is committed. Protects the commits that there are.

        Raises:
            StorageError: they are damaged.
        """
        if storage.versions is None or not isinstance(storage.records, PagedStateStore):
            raise RuntimeError("a durable run without versions of its states")
        self._versions, self._records = storage.versions, storage.records
        self._units, self._states, self._pager, self._waiting = units, states, pager, waiting
        if self._header is not None:
            try:
                self._versions.recover(self._number)
            except (VolumeError, SwapperError) as error:
                raise self._damaged(error) from error

    # ---------------------------------------------------------------------------------------------------------- commits

    def commit(self, training: Training) -> None:
        """Commit the step that has just ended.

        Raises:
            CommitError: it could not be made; the commits before are as they were, and no later one can be made.
            UnsupportedModelError: parameters were added that lie outside of what is committed.
        """
        added = training.not_held()
        if added:
            raise UnsupportedModelError(
                f"{len(added)} parameters came after infinity.initialize, and a durable run does not have them",
                cure="Add them before, or set infinity.durable to false",
            )
        training.flush()
        rest = pack = None
        with self._waiting("commit"):
            rest = self._rest(training)
            pack = commit_parts.pack(rest)
            head = commit_parts.header(self._layout, training.global_steps, self._page_bytes or 0, self._places())
            keep = self._versions.kept[: self._section.keep_last - 1]
            try:
                self._versions.commit(self._number + 1, [head, pack], keep)
            except (OSError, SwapperError) as error:
                raise CommitError(self._path, step=training.global_steps, problem=str(error)) from error
        self._number += 1

    def resume(self, training: Training) -> None:
        """Go on from the newest commit, if there is one.

        Raises:
            StorageError: it is damaged.
        """
        if self._header is None:
            logger.info("durable run in '%s': begins", self._path)
            return
        self._go_to(training, self._number)
        age = time.time() - self._header["time"]
        logger.info("durable run in '%s': goes on from step %d, %.0f s old", self._path, training.global_steps, age)

    def rollback(self, training: Training, steps: int) -> None:
        """Go back by so many commits.

        Raises:
            StepOrderError: so many are not kept.
            CommitError: there is no room for a small file, say; nothing has changed.
        """
        kept = self._versions.kept
        if not 0 <= steps < len(kept):
            raise StepOrderError(
                f"engine.rollback({steps})",
                f"{len(kept)} commits are kept, so 0 to {len(kept) - 1} steps can be gone back",
                cure="Set config key 'infinity.keep_last' to one more than the steps to go back",
            )
        self._go_to(training, kept[steps], as_number=self._number + 1 if steps else None)
        logger.info("durable run in '%s': went back to step %d", self._path, training.global_steps)

    def _go_to(self, training: Training, number: int, as_number: int | None = None) -> None:
        training.flush()
        for unit in self._units:
            self._pager.residency.evict(unit)
            unit.outdate()
        try:
            head, data = self._versions.go_to(number, as_number)
        except VolumeError as error:
            raise self._damaged(error) from error
        except (OSError, SwapperError) as error:
            raise CommitError(self._path, step=training.global_steps, problem=str(error)) from error
        self._number = as_number or number
        if json.loads(head)["places"] != self._places():
            raise RuntimeError("the layout is that of the commit, but the extents lie elsewhere")
        rest = commit_parts.unpack(data)
        self._records.set_valid_bytes(rest["valid_bytes"])
        for unit in self._units:
            for slot in unit.layout.slots:
                state = self._states.get((unit.index, slot.index))
                if state is not None:
                    scalars, names, num_updates, is_fresh = rest["states"][slot.spec.fqn]
                    state.load(scalars, None if is_fresh else names, num_updates)
        for group, values in zip(training.optimizer.param_groups, rest["groups"], strict=True):
            group.update(values)
        commit_parts.set_buffers(training.module, rest["buffers"])
        if "lr_scheduler" in rest and hasattr(training.lr_scheduler, "load_state_dict"):
            training.lr_scheduler.load_state_dict(rest["lr_scheduler"])
        if "loader" in rest and hasattr(training.training_dataloader, "load_state_dict"):
            training.training_dataloader.load_state_dict(rest["loader"])
        training.count_on(rest["counters"])
        set_random_states(rest["random"])

    def _rest(self, training: Training) -> dict[str, Any]:
        states = {}
        for unit in self._units:
            for slot in unit.layout.slots:
                state = self._states.get((unit.index, slot.index))
                if state is not None:
                    states[slot.spec.fqn] = state.scalars, state.names, state.num_updates, state.is_fresh
        groups = training.optimizer.param_groups
        return {
            "groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
            "states": states,
            "valid_bytes": self._records.valid_bytes(),
            "buffers": commit_parts.buffers_of(training.module),
            **training.rest(),
        }

    def _places(self) -> dict[str, Any]:
        weights = {unit.name: unit.extent.start for unit in self._units if unit.extent is not None}
        return {"weights": weights, "records": {str(k): v for k, v in self._records.places().items()}}

    def _damaged(self, error: Exception) -> StorageError:
        return StorageError(
            self._path,
            f"holds a durable run that cannot be gone on from: {error}",
            cure="Name another directory, and load a checkpoint there",
            key="infinity.durable_path",
        )
