"""A durable run: each step is committed, and the same script resumes from the newest commit.

`swapper.Versions` stores the bytes. Here is what a commit consists of, and when one is made.

[Note: what survives] A commit begins at the end of `Engine.step`, which copies everything but the units' tensors. It
continues beside the next forward, until the step's updates are written and the file that names their places is on the
drive. Whoever writes next waits for that (`wait`): the next step's first update, and whatever reads weights or states
from outside. So the last step that returned survives a crash; if the crash falls into its commit, the one before does.
A commit holds all of a step or nothing, because its bytes are written to other places than those of the commit before.

[Note: commits of ranks] Each rank commits what it keeps, in a folder of its own. It begins a commit when all ranks have
made the one before. So the newest commits of two ranks are of the same step, or of two consecutive ones. Each rank
keeps two commits, and all resume from the newest step that all have. If a crash falls into the very first commit, all
begin anew.

[Note: lines of commits] After `Engine.load_checkpoint`, the step counter may be at a step of which there is a commit
with other weights. So a new line of commits begins there. Its number is that of its first commit (on the rank that has
made most), and `rollback` stays within one line.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from infinity.checkpoint.training_state_checks import check_counters, check_groups, check_states
from infinity.config.resolved import DurableSection, InfinityConfig
from infinity.distributed.agreement import agree, gather_results
from infinity.distributed.world import world
from infinity.engine import commit_parts
from infinity.engine.planned import Planned
from infinity.engine.resources import EngineResources
from infinity.errors import InfinityError, ModelError, StepError, StorageError
from infinity.numerics.plain_data import UNREADABLE, unpack
from infinity.numerics.random_states import check_random_states, set_random_states
from infinity.optim.scheduler_state import scheduler_with
from infinity.optim.wrapped_optimizer import WrappedOptimizer
from infinity.paging.parameter_cache import ParameterCache
from infinity.tiers.state_store import PagedStateStore
from infinity.units.extra_states import EXTRA_STATES, set_extra_states
from infinity.updates.job import ParameterState
from infinity.updates.stream import UpdateStream
from infinity.version import __version__
from swapper import DurableRunError, RunDirectory, SwapperError, VolumeError
from swapper.errors import write_cure

logger = logging.getLogger(__name__)


class DurableRun:
    """The durable run of one engine."""

    # Calls get the engine as `training`. A reference to it here would keep an engine alive that nobody closed.

    def __init__(self, config: InfinityConfig, section: DurableSection) -> None:
        """Lock the run's directory, and read the header of its newest commit.

        ``section``: the config's.

        Raises:
            StorageError: it is in use, damaged or unusable, or ranks have no commit in common.
        """
        self._ranks = ranks = world()  # all of them commit the same steps
        self._section = section = section.of_rank(ranks.index, ranks.num)
        self._path: Path = section.directories[0].path
        # First: RunDirectory makes a run in a directory that has none.
        self._check_kind()
        try:
            self.directory = RunDirectory(self._path, f"infinity {__version__}")
        except (VolumeError, OSError) as error:
            is_in_use = isinstance(error, DurableRunError) and error.kind == "in use"
            cure = "Name another directory, or wait for the other process" if is_in_use else "Name another directory"
            problem = f"cannot hold a durable run: {error}"
            raise StorageError(self._path, problem, cure=cure, key="infinity.durable_path") from error
        try:
            found = self.directory.newest()
        except VolumeError as error:
            self.directory.close()
            raise self._damaged(error) from error
        self._number = 0 if found is None else found[0]
        self._commits: dict[int, tuple[int, int]] = {}
        """Number of a commit -> its line (see [Note: lines of commits]) and its step."""
        self._line = 0
        self._is_consistent = True
        """Whether no commit is under way."""
        self.has_failed = False
        """Whether `wait` has raised the error of a commit."""
        self.went_on_at: int | None = None
        """The step that `resume` resumed from; None if the run began."""
        # Compared at the next start: a changed learning rate in the script has no effect then, and is warned of.
        self._given: list[dict[str, Any]] = []
        """Each group's values as the script set them at this start."""
        self._has_warned_of_scheduler = False
        self._header: dict[str, Any] | None = None
        try:
            with self._reading():
                self._header = None if found is None else _header_of(found[1][1])
            self._common = self._agreed()
            infinity = dataclasses.replace(config.infinity, durable=section)
            if self._header is not None and infinity.staging_buffer_bytes is None:
                # Otherwise another budget would give another buffer size, and the records another layout.
                infinity = dataclasses.replace(infinity, staging_buffer_bytes=self._header["page_bytes"])
            self.config = dataclasses.replace(config, infinity=infinity)
            """The config, for this rank. If it leaves the staging buffers' size open, it has that of the newest
            commit."""
        except BaseException:
            self.directory.close()
            raise

    def _check_kind(self) -> None:
        """Raise if the directory is of a run with several processes and this is a single one, or the other way
        round."""
        is_single = self._ranks.num == 1
        # One process commits to the directory itself, several to rank0, rank1, ... in it.
        other = self._path / "rank0" if is_single else self._path.parent
        if any(other.glob("commit-*")):
            raise StorageError(
                other,
                f"holds a durable run of {'several processes' if is_single else 'one process'}",
                cure="Start as many as before, or name another directory and load a checkpoint there",
                key="infinity.durable_path",
            )

    def _agreed(self) -> tuple[int, int] | None:
        """Line and step of the newest commit that all ranks have; None if all begin anew."""
        # Killed in the commit of step 12: rank 0 has it, rank 1 has not.
        #   rank 0: line 1, step 12, number 12; rank 1: line 1, step 11, number 11. All resume from (1, 11).
        # Killed in the very first commit.
        #   rank 0: number 1, step 1; rank 1: step -1. Rank 0 removes its commit, and all begin anew.
        # Rank 1's drive is missing.
        #   rank 0: number 12, step 12; rank 1: step -1. An error, because number 12 > 1.
        newest = -1 if self._header is None else int(self._header["step"])
        line = 0 if self._header is None else int(self._header["line"])
        of_ranks = self._ranks.all_gather_ints("the commits of a durable run", [line, newest, self._number])
        lines, steps, numbers = zip(*of_ranks, strict=True)
        if min(steps) >= 0:
            # By line first: a line has a larger number than all commits of the lines before it.
            return min(zip(lines, steps, strict=True))
        if max(numbers) > 1:
            without = ", ".join(str(rank) for rank, step in enumerate(steps) if step < 0)
            raise StorageError(
                self._path.parent,
                f"has no commit of rank {without}, and of others that of step {max(steps)}",
                cure="Start as many processes as before, see that all drives are there, or name another directory",
                key="infinity.durable_path",
            )
        if self._header is not None:
            self.directory.remove(self._number)
            self._header, self._number = None, 0  # the next one is the very first again
        return None

    @property
    def goes_on(self) -> bool:
        """Whether there is a commit to resume from."""
        return self._header is not None

    def check(self, plan: Planned, wrapped_optimizer: WrappedOptimizer, model: nn.Module) -> None:
        """Check that the newest commit is of this training. Nothing has been written yet.

        Raises:
            ModelError: it is of another training; the message lists the differences.
        """
        shard = [plan.shards.index, plan.shards.num]
        layout = commit_parts.layout_of(plan, wrapped_optimizer, model)
        self._layout = {**layout, "processes": self._ranks.num, "share": shard}
        # The layout of records depends on the size of the buffers.
        self._staging_buffer_bytes = plan.placement.staging_buffer_bytes
        self._units = plan.units
        if self._header is not None:
            with self._reading():
                self._check_header(self._header, shard)

    def _check_header(self, header: Mapping[str, Any], shard: list[int]) -> None:
        num_before = header["layout"]["processes"]
        if num_before != self._ranks.num:
            raise ModelError(
                f"the durable run in '{self._path.parent}' is of {num_before} processes, not {self._ranks.num}",
                cure=f"Start {num_before}, or name another infinity.durable_path and load a checkpoint there: any number can",
            )
        before = header["layout"].get("share", shard)
        if before != shard:
            raise ModelError(
                f"the durable run in '{self._path.parent}' divides states among {before[1]} processes, not {shard[1]}",
                cure="Set zero_optimization.stage and the mesh as they were, or name another "
                "infinity.durable_path and load a checkpoint there",
            )
        commit_parts.check_layout(header["layout"], self._layout, str(self._path))
        if header["page_bytes"] != self._staging_buffer_bytes:
            raise ModelError(
                f"the durable run in '{self._path}' has staging buffers of {header['page_bytes']} bytes, not "
                f"{self._staging_buffer_bytes}",
                cure=f"Set infinity.staging_buffer_bytes to {header['page_bytes']}, or leave it out",
            )

    def connect(
        self,
        storage: EngineResources,
        states: Mapping[tuple[int, int], ParameterState],
        parameter_cache: ParameterCache,
        stream: UpdateStream,
    ) -> None:
        """Connect the parts whose contents are committed. Protect present commits, and restore the newest one's bytes.

        Raises:
            StorageError: they are damaged.
            ModelError: with this config, tensors would be at other places of the files.
        """
        if storage.versions is None or not isinstance(storage.records, PagedStateStore):
            raise RuntimeError("a durable run without versions of its states")
        # Set here, not in the constructor: storage is opened for a plan, and the plan needs `config`.
        self._versions, self._records = storage.versions, storage.records
        self._states, self._parameter_cache, self._stream = states, parameter_cache, stream
        if self._header is not None:
            if self._header["places"] != self._places():
                raise ModelError(
                    f"the durable run in '{self._path}' was laid out with another config",
                    cure="Use the config of that run (budgets, keep_last and keep_every may differ), or name another "
                    "infinity.durable_path",
                )
            with self._reading():
                # Before anything is written: the newest commit's bytes, and those of all kept ones, must not be
                # overwritten.
                self._versions.recover(self._number)
                *_, inside = self._versions.go_to(self._number)
                for number in self._versions.kept:
                    self._record(number, self.directory.read(number)[1])
                storage.records.set_valid_bytes(unpack(inside)["valid_bytes"])

    # ---------------------------------------------------------------------------------------------------------- commits

    def commit(self, training: Any) -> None:
        """Begin to commit the step that has just ended: see [Note: what survives].

        Raises:
            StepError: the last commit failed; see `wait`.
            ModelError: parameters were added after `initialize`, which commits do not have.
        """
        if added := training.num_not_held:
            raise ModelError(
                f"{added} parameters were added after infinity.initialize, and a durable run does not store them",
                cure="Add them before, or set infinity.durable to false",
            )
        # One commit at a time: a second one would change what the first one writes.
        self.wait()
        self._warn_of_scheduler(training)
        # See [Note: commits of ranks]: all ranks have made the last commit.
        self._ranks.all_gather_ints(f"the commit of step {training.global_steps}")
        for unit in self._units:
            unit.detect_writes()
        if any(unit.dirty for unit in self._units):  # what the script has written into weights belongs to the step
            training.flush()
        # Packed now: the script may change groups, scheduler and buffers as soon as `Engine.step` returns.
        outside, step = commit_parts.packed(self._outside(training)), training.global_steps
        updates, line = self._stream.pending(), self._line

        # `Versions` calls these two in its own thread: `ready` until the step's updates have started their writes, then
        # `parts`, when places and states are final.
        def ready() -> None:
            for update in updates:
                update.wait()

        def parts() -> list[bytes]:
            head = {"layout": self._layout, "step": step, "line": line, "time": time.time()}
            head |= {"page_bytes": self._staging_buffer_bytes or 0, "places": self._places()}
            return [json.dumps(head).encode(), outside, commit_parts.packed(self._inside())]

        self._number += 1
        self._commits[self._number] = line, step
        self._is_consistent = False
        self._versions.begin(self._number, parts, self._staying(), ready)

    def wait(self) -> None:
        """Wait until the last step is committed. Nobody may write before: see [Note: what survives].

        Raises:
            StepError: the commit failed. Earlier commits are unchanged, and no later one can be made.
        """
        if self._is_consistent:
            return
        try:
            with self._parameter_cache.clock.waiting("commit"):
                # The commit waits for all updates. A deferred one would wait until its unit is needed.
                self._stream.release_all()
                self._versions.wait()
        except Exception as error:
            self.has_failed = True
            _, step = self._commits[self._number]
            raise StepError.uncommitted(self._path, step=step, problem=str(error), cure=write_cure(error)) from error
        self._is_consistent = True

    def _staying(self) -> list[int]:
        """Numbers of the commits that are kept beside the next one."""
        # Newest first. With keep_last 3 and keep_every 100, steps 305, 304, 303, 300, 200 and 100 are kept, and 306
        # comes next. Then 305 and 304 stay as the last ones, 300, 200 and 100 as marked ones. 303 is removed.
        kept = self._versions.kept
        staying = kept[: self._section.keep_last - 1]
        if self._section.keep_every:
            older = [number for number in kept if number not in staying]
            marked = [number for number in older if not self._commits[number][1] % self._section.keep_every]
            staying += marked[: self._section.keep_last]
        return staying

    def resume(self, training: Any) -> None:
        """Resume from the newest commit, if there is one.

        Raises:
            StorageError: it is damaged.
        """
        self._given = copy.deepcopy(_without_parameters(training.optimizer.param_groups))
        if self._header is None:
            logger.info("durable run in '%s': starts", self._path)
            return
        number = self._number
        # This rank's newest commit may be one step ahead of other ranks'.
        if self._common is not None and self._common != self._commits[number]:
            there = [kept for kept in self._versions.kept if self._commits[kept] == self._common]
            if not there:
                raise self._damaged(ValueError(f"it lacks step {self._common[1]}, the newest that all processes have"))
            number = there[0]
        given = self._go_to(training, number)
        self.went_on_at = training.global_steps
        self._warn_of_changes(training, given)
        age = time.time() - self._header["time"]
        logger.info(
            "durable run in '%s': resumes after step %d, which was committed %.0f s ago",
            self._path,
            training.global_steps,
            age,
        )

    def _warn_of_changes(self, training: Any, before: Sequence[Mapping[str, Any]]) -> None:
        """Warn if the script sets other hyperparameters than at the start ``before``: the run's have precedence."""
        changes = [
            f"group {index}: {name} goes on with {group[name]!r}, not {now[name]!r}"
            for index, (then, now, group) in enumerate(
                zip(before, self._given, training.optimizer.param_groups, strict=False)
            )
            for name in now
            if name in then and name in group and repr(then[name]) != repr(now[name])
        ]
        if changes:
            logger.warning(
                "durable run in '%s': keeps the run's hyperparameters, although the script or config has changed "
                "them since the last start (%s). To change them, set optimizer.param_groups after infinity.initialize",
                self._path,
                "; ".join(changes),
            )

    def _warn_of_scheduler(self, training: Any) -> None:
        if self._has_warned_of_scheduler or training.lr_scheduler is not None:
            return
        if any("initial_lr" in group for group in training.optimizer.param_groups):
            self._has_warned_of_scheduler = True
            logger.warning(
                "durable run in '%s': it does not store the lr scheduler that was made after infinity.initialize, so "
                "the scheduler starts from the beginning at each start. Pass it, or a function that makes it from "
                "the optimizer, as lr_scheduler= to infinity.initialize",
                self._path,
            )

    def rollback(self, training: Any, steps: int) -> None:
        """Go back by ``steps`` steps.

        Raises:
            StepError: a rank does not have that many commits, or a file could not be written. Nothing has changed.
        """
        found = gather_results(self._ranks, f"engine.rollback({steps})", lambda: self._number_before(training, steps))
        self._go_to(training, found[self._ranks.index])
        logger.info("durable run in '%s': went back to step %d", self._path, training.global_steps)

    def _number_before(self, training: Any, steps: int) -> int:
        """The number of the commit ``steps`` steps ago."""
        training.flush()
        kept = [number for number in self._versions.kept if self._commits[number][0] == self._line]
        # At step 12 with commits of 12, 11 and 10: {0: number of 12, 1: number of 11, 2: number of 10}.
        back = {training.global_steps - self._commits[number][1]: number for number in kept}
        back[0] = self._number
        if steps not in back or not self._versions.kept:
            there = ", ".join(f"{num} (to step {training.global_steps - num})" for num in sorted(back))
            keep_last = self._section.keep_last
            more = f"set it to {steps + 1} or more before those steps are made"
            if not keep_last <= steps:
                more = "the run (or its part after a loaded checkpoint) has made no more steps"
            raise StepError.order(
                f"engine.rollback({steps})",
                f"{len(kept)} commits are kept. You can go back by these numbers of steps: {there}",
                cure=f"Pass one of these numbers. Config key 'infinity.keep_last' is {keep_last}: {more}",
            )
        return back[steps]

    def _go_to(self, training: Any, number: int) -> list[dict[str, Any]]:
        """Go to a commit. Returns the groups' values as the script had set them when it was made."""
        # Going back is a commit, too: the old contents under a new number, as the newest one. A crash leaves either.
        as_number = self._number + 1 if number != self._number else None
        found: list[bytes] = []

        def go() -> None:
            try:
                found.extend(self._versions.go_to(number, as_number))
            except VolumeError as error:
                raise self._damaged(error) from error
            except (OSError, SwapperError) as error:
                step = training.global_steps
                raise StepError.uncommitted(
                    self._path, step=step, problem=str(error), cure=write_cure(error)
                ) from error

        training.flush()
        what = "going to a commit"
        agree(self._ranks, f"before {what}")
        for unit in self._units:
            # What is in memory is of the step that is left. `outdate` makes graphs over it raise in backward.
            self._parameter_cache.evict(unit)
            unit.outdate()
        gather_results(self._ranks, what, go)
        with self._reading():
            training_state = self._restore(training, as_number or number, *found)
        # From here on, classes of the script are called, whose errors are their own.
        set_extra_states(training.module, training_state[EXTRA_STATES])
        with scheduler_with(training.lr_scheduler, training_state, otherwise="name another infinity.durable_path"):
            pass
        if "loader" in training_state and hasattr(training.training_dataloader, "load_state_dict"):
            training.training_dataloader.load_state_dict(training_state["loader"])
        with self._reading():
            training.count_on(training_state["counters"])
            set_random_states(training_state["random"])
            given: list[dict[str, Any]] = training_state["given"]
        return given

    def _restore(self, training: Any, number: int, head: bytes, outside: bytes, inside: bytes) -> dict[str, Any]:
        """Check and restore scalars, groups and buffers of a commit. Returns its training state."""
        self._number = number
        self._record(number, head)
        self._line, _ = self._commits[number]
        training_state: dict[str, Any] = unpack(outside) | unpack(inside)
        lacking = [
            name
            for name in ("given", EXTRA_STATES, "counters", "random")
            if not isinstance(training_state.get(name), dict | list)
        ]
        if lacking:
            raise ValueError(f"it has no {', '.join(lacking)}")
        if not all(isinstance(group, dict) for group in training_state["given"]):
            raise ValueError("the values that the script began with are none of groups")
        # Checked before the optimizer's groups are changed.
        check_random_states(training_state["random"])
        check_counters(training_state["counters"])
        check_groups(training_state["groups"], training.optimizer.param_groups)
        check_states(
            training_state["states"], sorted({name for unit in self._units for name in self._records.names_of(unit)})
        )
        if lost := _header_of(head)["layout"]["buffers"].keys() - training_state["buffers"].keys():
            raise ValueError(f"it lacks buffer '{min(lost)}'")
        self._records.set_valid_bytes(training_state["valid_bytes"])
        for group, values in zip(training.optimizer.param_groups, training_state["groups"], strict=True):
            group.update(values)
        for unit in self._units:
            for slot in unit.layout.slots:
                state = self._states.get((unit.index, slot.index))
                if state is not None:
                    # `is_fresh`: no update yet, so the optimizer has no state names either.
                    scalars, names, num_updates, is_fresh = training_state["states"][slot.spec.fqn]
                    if not is_fresh:
                        training.optimizer.check_scalars(unit.parameters[slot.index], scalars)
                    state.load(scalars, None if is_fresh else names, num_updates)
        commit_parts.set_buffers(training.module, training_state["buffers"], training.device)
        return training_state

    def begin_line(self) -> None:
        """Begin a new line of commits after a checkpoint was loaded on all ranks: see [Note: lines of commits]."""
        self._line = 1 + max(
            number for (number,) in self._ranks.all_gather_ints("a new line of commits", [self._number])
        )

    def _record(self, number: int, head: bytes) -> None:
        header = _header_of(head)
        self._commits[number] = header["line"], header["step"]

    def _outside(self, training: Any) -> dict[str, Any]:
        """The part of a commit that the training thread may change as soon as the step has ended."""
        return {
            "groups": _without_parameters(training.optimizer.param_groups),
            "given": self._given,
            "buffers": commit_parts.buffers_of(training.module),
            **training.training_state(),
        }

    def _inside(self) -> dict[str, Any]:
        """The part of a commit that changes with updates."""
        states = {}
        for unit in self._units:
            for slot in unit.layout.slots:
                state = self._states.get((unit.index, slot.index))
                if state is not None:
                    states[slot.spec.fqn] = state.scalars, state.names, state.num_updates, state.is_fresh
        return {"states": states, "valid_bytes": self._records.valid_bytes()}

    def _places(self) -> dict[str, Any]:
        weights = {unit.name: unit.extent.start for unit in self._units if unit.extent is not None}
        return {"weights": weights, "records": {str(k): v for k, v in self._records.places().items()}}

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn errors from a damaged commit's contents into `StorageError`."""
        try:
            yield
        except InfinityError:
            raise
        except (SwapperError, *UNREADABLE) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> StorageError:
        problem, cure = "that cannot be resumed", "Name another directory, and load a checkpoint there"
        if isinstance(error, DurableRunError) and error.kind == "of another version":
            problem = "of another version of this package"
            cure = "Read it with that version, or name another directory and load a checkpoint there"
        return StorageError(
            self._path, f"holds a durable run {problem}: {error}", cure=cure, key="infinity.durable_path"
        )


def _header_of(head: bytes) -> dict[str, Any]:
    found = json.loads(head)
    kinds = {"step": int, "line": int, "page_bytes": int, "time": float, "layout": dict, "places": dict}
    # `type` and not isinstance: JSON's true is an int to Python.
    if not isinstance(found, dict) or any(type(found.get(name)) is not kind for name, kind in kinds.items()):
        raise ValueError("its header is not that of a commit")
    return found


def _without_parameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]
