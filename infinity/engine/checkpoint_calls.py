"""What an engine saves and loads: checkpoints with DeepSpeed's arguments and results.

[Note: checkpoints of several ranks] All ranks make each call here. Rank 0 writes everything. The others send it what is
their own (random generators, the loader's position), and, unit by unit, their shards of main weights and states. All
ranks read. If anything fails on one rank, all raise: before anything is changed, while a checkpoint is looked at; and
while it is read, so that no rank goes on with weights that the others do not have.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from infinity.checkpoint.arrays import reading_from
from infinity.checkpoint.checkpoint_loading import Wanted, load
from infinity.checkpoint.manifest import MANIFEST
from infinity.checkpoint.part_folders import check_parts, common_tag, folder_of
from infinity.checkpoint.saved import find, reading_again, tags
from infinity.checkpoint.training_checkpoint import BackgroundSave, Saving, Training
from infinity.distributed.agreement import agree, gather_results, on_rank_0
from infinity.distributed.collectives import Ranks
from infinity.engine.loop_settings import LoopSettings
from infinity.errors import CheckpointError, StepError
from infinity.loop.phase import PhaseGuard
from infinity.numerics.random_states import random_states, set_random_states
from infinity.optim.scheduler_state import state_of_scheduler
from infinity.paging.rank_weights import gather_weights
from infinity.threads.engine_lock import locked
from infinity.units.extra_states import EXTRA_STATES, extra_states
from swapper.sync.interrupts import uninterrupted
from swapper.volumes.publish import remove_abandoned

logger = logging.getLogger(__name__)
# Key of the training state: a list of what ranks 1, 2, ... have for themselves.
_OTHER_RANKS = "ranks"
_MOST_TAGS = 8


class CheckpointCalls(LoopSettings):
    """Part of the engine: checkpoints."""

    _saving: BackgroundSave | None = None
    _is_saving = False
    """Whether a background save was begun, on some rank, and `wait_for_checkpoint` was not called since."""
    _is_missing_ok = False
    """Default of ``load_checkpoint(missing_ok=None)``."""

    @locked
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        blocking: bool = True,
        keep_last: int | None = None,
    ) -> bool:
        """Write a checkpoint to ``save_dir``/``tag``, tensor by tensor; returns True.

        It has fp32 main weights, optimizer states, hyperparameters, the scheduler, the loss scale, the counters, the
        random generators of python, NumPy and torch, and the position of the loader of ``training_data``. It does not
        have gradients of a step that has not ended, nor random states of a loader's worker processes.

        With several processes, all of them call this with the same tag. It returns when rank 0 has written everything;
        an error there is raised on all. The client state is rank 0's. If processes have different parts of the model,
        each part has a folder of its own in ``save_dir``.

        Args:
            save_dir: made if it is missing.
            tag: name of the checkpoint; None: "global_step" and the number of steps.
            client_state: data of your own, which `load_checkpoint` returns.
            save_latest: whether ``load_checkpoint(save_dir)`` finds this one.
            exclude_frozen_parameters: leave out frozen parameters (the base of adapters). A model that loads the
                checkpoint must have them already, with their present values.
            blocking: False: write buffers, frozen weights and parameters that the engine does not hold, and return. The
                rest is written while training goes on; an update of a unit waits until the unit is saved. This takes
                about 15 MB beside the budget. `wait_for_checkpoint`, the next save or load, and `close` wait for its
                end. (If several processes keep shards of the states, all is written before the call returns.)
            keep_last: number of checkpoints to keep in ``save_dir``, this one included. Older ones are removed when
                this one is complete, except the one that ``latest`` names. None: keep all. If processes have different
                parts of the model, at least two are kept.

        Raises:
            CheckpointError: an earlier background save has failed; the client state cannot be written; or a load has
                failed midway.
            StorageError: the directory cannot be written, or has too little room. Earlier checkpoints are still there.
            ValueError: ``save_dir`` is empty, or an address ("s3://...").
        """
        check_directory(save_dir)
        if not isinstance(client_state, Mapping | None):
            raise TypeError(f"client_state must be a dict, not {type(client_state).__name__}")
        # A background save of divided states would send shards through process groups that training uses at that time.
        blocking = blocking or self._parts.access.gathered_stream is not None or self._mesh.is_divided
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        what = f"engine.save_checkpoint with tag {name!r}"
        folder = folder_of(self._mesh, Path(save_dir).absolute())  # a script may change to another directory meanwhile
        if self._mesh.is_divided and keep_last is not None:
            keep_last = max(keep_last, 2)  # see [Note: checkpoints of parts]

        begin = functools.partial(
            Saving,
            directory=folder,
            tag=name,
            client_state=client_state or {},
            is_latest=save_latest,
            keep_last=keep_last,
            is_watching=not blocking,
            excludes_frozen=exclude_frozen_parameters,
            shows_progress=blocking and self.config.infinity.progress_bars and self.global_rank <= 0,
        )
        gather_results(self._mesh.everyone, what, lambda: self._save(what, begin, blocking))
        # The same on all ranks, unlike `_saving`, which only the writer has.
        self._is_saving = not blocking
        self._num_saved_steps = self.global_steps
        self._notes.note("save", self.global_steps, f"saved checkpoint '{Path(save_dir) / name}'")
        return True

    def _save(self, what: str, begin: Callable[[Training], Saving], blocking: bool) -> None:
        # Collective: random generators and loader positions of all ranks come to rank 0, which writes them. See
        # [Note: checkpoints of several ranks].
        of_ranks = gather_results(self._mesh.data, what, self._begin_checkpoint)
        if self.counts.num_unused and self._parts.stepper.gradients.has_any:
            logger.warning(
                "engine.save_checkpoint was called between the micro-batches of a step: the gradients so far are not "
                "saved. Call it at engine.is_gradient_accumulation_boundary()"
            )

        def save() -> None:
            saving = begin(self._training(of_ranks[1:]))
            if blocking:
                saving.run()
            else:
                background = BackgroundSave(saving, self._parts.device)
                # An interrupt in between would leave a save running that no update waits for.
                with uninterrupted():
                    background.start(self)
                    self._saving = background
                    self._delay_updates_for(background.saving)

        gathered_stream = self._parts.access.gathered_stream
        if gathered_stream is None:
            on_rank_0(self._mesh.data, what, save)
        else:
            # Rank 0 runs `save`. When that needs shards of other ranks, they read and send them.
            gathered_stream.run(what, save)

    def _begin_checkpoint(self) -> dict[str, Any]:
        """Finish pending updates and saves. Returns this rank's own part of a checkpoint."""
        self._guard.check_loaded()
        self._finish_saving()
        self.flush()
        return self._own()

    def _delay_updates_for(self, saving: Saving | None) -> None:
        self._parts.stream.wait_for_saver(saving)
        self._parts.stored.wait_for_saver(saving)

    def wait_for_checkpoint(self) -> None:
        """Wait until a background save (``save_checkpoint(blocking=False)``) is complete and on the drive.

        With several processes, all of them call this.

        Raises:
            CheckpointError, StorageError: it could not be saved. Earlier checkpoints are unchanged.
        """
        # `_is_saving` decides whether ranks meet, so it has to be reset on all of them. A single process has nobody to
        # meet.
        if self._is_saving or self._mesh.data.num == 1:
            self._is_saving = False
            on_rank_0(self._mesh.data, "engine.wait_for_checkpoint", self._finish_saving)

    def _finish_saving(self) -> None:
        """Wait for this rank's background save, and raise its error. Other ranks are not involved."""
        if self._saving is not None:
            self._saving.wait()
            saving, self._saving = self._saving, None
            self._delay_updates_for(None)
            saving.raise_error()

    def _check_saving(self) -> None:
        """Raise the error of a background save that has ended."""
        # Several ranks learn of a failure when they all wait: the others do not know whether this rank's save has
        # ended.
        if self._saving is not None and self._saving.is_over and self._mesh.data.num == 1:
            self._finish_saving()

    @locked
    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        *,
        load_random_states: bool = True,
        load_data_position: bool = True,
        missing_ok: bool | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint of `save_checkpoint`. Budget, tiers and precision may differ from those it was saved
        with.

        Args:
            load_dir: directory with checkpoints.
            tag: name of the checkpoint; None: the latest.
            load_module_strict: True: checkpoint and model must have the same parameters and buffers. False: what only
                the checkpoint has is left out, and what only the model has stays; the log names both. Shapes must be
                the same.
            load_optimizer_states: whether to load states, hyperparameters and the loss scale.
            load_lr_scheduler_states: whether to load the scheduler.
            load_module_only: load weights and buffers only.
            load_random_states: whether to restore the random generators of python, NumPy and torch. This and the next
                argument have no effect unless optimizer states are loaded.
            load_data_position: whether the loader of ``training_data`` continues behind the last batch. False for a
                script that skips batches itself.
            custom_load_fn: not supported: there is no state dict to pass to it.
            missing_ok: True: return (None, None) with a warning if there is no such checkpoint, so that one script can
                begin and resume. None: False, but True for an engine of ``deepspeed.initialize``, as in DeepSpeed.

        Returns:
            The checkpoint's directory and the client state; see ``missing_ok``.

        Raises:
            CheckpointError: it is missing, damaged, of another version, or cannot be read. If weights have been changed
                already, forwards, steps and saves raise until a load succeeds.
            ModelError: it is of another model; nothing has been changed.
            ValueError: it has another kind of optimizer or lr scheduler, or other groups; nothing has been changed. Or
                ``load_dir`` is empty, or an address.
        """
        if custom_load_fn is not None:
            raise TypeError(
                "custom_load_fn gets a state dict of the whole model, and there is none: load_state_dict takes one"
            )
        check_directory(load_dir)
        what = f"engine.load_checkpoint with tag {tag!r}"
        directory = Path(load_dir)
        has_rest = not load_module_only
        wanted = Wanted(
            is_strict=load_module_strict,
            optimizer=load_optimizer_states and has_rest,
            scheduler=load_lr_scheduler_states and has_rest,
            counters=has_rest,
            random_states=load_random_states,
            data_position=load_data_position,
        )
        may_lack = self._is_missing_ok if missing_ok is None else missing_ok

        def tidy() -> None:
            if self._mesh.data.index == 0:
                remove_abandoned(folder_of(self._mesh, directory))

        # Before any rank looks: a save that was killed may have left the old checkpoint in a hidden directory, and this
        # puts it back.
        gather_results(self._mesh.everyone, what, tidy)
        named = None if tag is None else str(tag)
        common = common_tag(self._mesh, directory, named, what)
        found: list[tuple[str | None, dict[str, Any] | None]] = []
        before = self.global_steps

        def load_all() -> None:
            found.append(self._load(what, directory, common, wanted, missing_ok=may_lack))

        gather_results(self._mesh.everyone, what, load_all)
        folder, client_state = found[0]
        durable = self._parts.durable
        if durable is not None and folder is not None:
            # The run's commits up to here are of other weights than what follows.
            durable.begin_line()
            # A script that calls load_checkpoint at every start undoes what the durable run has just resumed.
            if durable.went_on_at == before and (load_module_only or self.global_steps < before):
                logger.warning(
                    "the durable run had resumed at step %d, and engine.load_checkpoint replaced that state by '%s'. "
                    "To load the checkpoint at the first start only, write `if not engine.global_steps:` before the "
                    "call",
                    *(before, folder),
                )
        return folder, client_state

    def _load(
        self, what: str, load_dir: Path, tag: str | None, wanted: Wanted, *, missing_ok: bool
    ) -> tuple[str | None, dict[str, Any] | None]:
        ranks = self._mesh.data
        folder = None
        if tag is not None or not self._mesh.is_divided:  # else not all parts have one, whatever this one has
            folder = self._find_checkpoint(folder_of(self._mesh, load_dir), tag, what)
        if folder is None:
            named = "file 'latest'" if tag is None else f"checkpoint {tag!r}"
            error = CheckpointError(load_dir, f"there is no {named} in it", cure=_cure_of_missing(load_dir, tag))
            if not missing_ok:
                raise error
            logger.warning("engine.load_checkpoint: nothing was loaded. %s", error)
            return None, None
        before = self.global_steps

        def read() -> dict[str, Any]:
            changing = _Changing(self._guard, folder, ranks, what)
            try:
                return load(
                    self._training(),
                    folder,
                    wanted,
                    shows_progress=self.config.infinity.progress_bars and self.global_rank <= 0,
                    is_first_rank=self.global_rank <= 0,
                    begin=changing.agree,
                    changing=changing,
                )
            except Exception as error:
                changing.agree(error)
                raise

        # Another process may replace the checkpoint while it is read. A single process then reads once more. Of several
        # ranks, some may have read the old one and some the new one, so all raise.
        training_state = reading_again(folder, read) if ranks.num == 1 else read()
        if self._parts.access.gathered_stream is not None:
            # Ranks keep shards (ZeRO stage 1 and up), and each has read the main weights of its own shard. The model
            # weights of the other shards come from their ranks.
            gather_weights(self._coordinator.parameter_cache, self._parts.parameter_map.units)
        if wanted.counters:
            self.count_on(training_state["counters"], with_loss_scale=wanted.optimizer)
        if wanted.optimizer:
            self._resume_as_rank(ranks.index, training_state, wanted)
        words = f"loaded checkpoint '{folder}' of step {self.global_steps}"
        self._notes.note("load", before, words, to=self.global_steps)
        client_state: dict[str, Any] = training_state["client_state"]
        return str(folder), client_state

    def _find_checkpoint(self, directory: Path, tag: str | None, what: str) -> Path | None:
        """The checkpoint's directory. All ranks must find the same checkpoint; None if none of them finds one."""
        ranks = self._mesh.data
        self._is_saving = False

        def look() -> tuple[Path | None, int]:
            self._finish_saving()
            self.flush()
            with reading_from(directory):
                if not self._mesh.is_divided:  # else `common_tag` has looked
                    check_parts(self._mesh, directory)
                found = find(directory, tag)
                manifest = None if found is None else found / MANIFEST
                # Ranks may see different disks under one path. The checksum of the manifest tells checkpoints apart.
                return found, zlib.crc32(manifest.read_bytes()) if manifest is not None and manifest.is_file() else 0

        of_ranks = gather_results(ranks, what, look)
        if len({stamp for _, stamp in of_ranks}) > 1 or len({found is None for found, _ in of_ranks}) > 1:
            places = ", ".join(f"rank {rank}: {found or 'none'}" for rank, (found, _) in enumerate(of_ranks))
            raise CheckpointError(
                directory,
                f"the ranks do not find the same checkpoint ({places})",
                cure="Give a directory that all of them see, or copy the checkpoint to each machine",
            )
        return of_ranks[ranks.index][0]

    def _resume_as_rank(self, rank: int, training_state: Mapping[str, Any], wanted: Wanted) -> None:
        """Restore this rank's loader position and random generators: rank 0's are in ``training_state``, the others' in
        a list."""
        of_ranks = [training_state, *training_state.get(_OTHER_RANKS, ())]
        # Saved by 2 ranks and loaded by 4: ranks 2 and 3 are new. They take rank 0's position, which counts the samples
        # of all ranks, but not its random generators: they would draw the same numbers as rank 0.
        is_new = rank >= len(of_ranks)
        own = training_state if is_new else of_ranks[rank]
        loader = self.training_dataloader
        if wanted.data_position and "loader" in own and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(own["loader"])
        if wanted.random_states and "random" in own and not is_new:  # another framework has saved none
            set_random_states(own["random"])

    def _training(self, of_other_ranks: Sequence[Mapping[str, Any]] = ()) -> Training:
        parts = self._parts
        return Training(
            self.module,
            self.optimizer,
            self.lr_scheduler,
            parts.access,
            parts.parameter_map,
            parts.coordinator,
            lambda: self.training_state() | ({_OTHER_RANKS: list(of_other_ranks)} if of_other_ranks else {}),
            parts.wrapped_optimizer.tiled,
        )

    def _resume(self) -> None:
        """Resume a durable run from its newest commit, if there is one."""
        if self._parts.durable is not None:
            if self.optimizer is None:
                problem = "the engine has no optimizer: it evaluates only"
                cure = (
                    'Add "optimizer", or, for a model that is not trained (a reference), set infinity.durable to false'
                )
                raise StepError.order("a durable run", problem, cure=cure)
            self._parts.durable.resume(self)

    def rollback(self, steps: int) -> None:
        """Take back the last ``steps`` steps of a durable run: weights, states, scheduler, counters and random
        generators.

        Learning rates are restored, too: to change them, set `optimizer.param_groups` afterwards. The commits of those
        steps are removed. The loader of ``training_data`` continues from there, also in iterators that exist already.

        Args:
            steps: less than config key ``infinity.keep_last``. 0 undoes changes since the last step.

        Raises:
            StepError: the run is not durable, or some rank does not have that many commits.
            CheckpointError, StorageError: a background save has failed; nothing has changed.
        """
        self._check_usable()
        if self._parts.durable is None:
            cure = "Set config key 'infinity.durable' to true"
            raise StepError.order("engine.rollback()", "the run is not durable", cure=cure)
        self.wait_for_checkpoint()  # or its other half would be of the step that is gone back to
        self.reset()
        before = self.global_steps
        self._parts.durable.rollback(self, steps)
        self._paged.expire_states()
        self._guard.on_partial_load(None)
        self._notes.note("rollback", before, f"went back to step {self.global_steps}", to=self.global_steps)

    def training_state(self) -> dict[str, Any]:
        """Everything but tensors: counters, random generators, loader position, scheduler, and modules' extra
        states."""
        # Also what a durable run commits: see `DurableRun._outside`.
        state: dict[str, Any] = {"counters": self.counters(), EXTRA_STATES: extra_states(self.module), **self._own()}
        return state | state_of_scheduler(self.lr_scheduler)

    def _own(self) -> dict[str, Any]:
        """Random generators and loader position of this rank."""
        own: dict[str, Any] = {"random": random_states()}
        if hasattr(self.training_dataloader, "state_dict"):
            own["loader"] = self.training_dataloader.state_dict()
        return own

    def counters(self) -> dict[str, Any]:
        """Steps, micro-batches and samples so far, and the loss scale."""
        return self.counts.state() | {"loss_scale": self._parts.stepper.scaler.state()}

    def count_on(self, counters: Mapping[str, Any], *, with_loss_scale: bool = True) -> None:
        """Set the counters to what `counters` returned."""
        self.counts.load_state(counters)
        self._num_saved_steps = self.global_steps
        if with_loss_scale:  # DeepSpeed has it among the optimizer's states
            self._parts.stepper.scaler.load_state(counters["loss_scale"])


def check_directory(directory: str | Path | None) -> None:
    """Refuse an empty directory, or the address of a store, for which a local directory of that name would be made.

    Raises:
        ValueError: it is one of these.
    """
    if not directory or not os.fspath(directory):  # None, as well
        raise ValueError('the directory is empty. Pass one; "." is the current one')
    # Path("s3://bucket") becomes "s3:/bucket", hence one slash in the pattern.
    if re.match(r"[a-z][a-z0-9]+:/", os.fspath(directory)):
        raise ValueError(
            f"'{directory}' is an address, not a directory. Pass a local directory, and copy from or to the store "
            "yourself"
        )


def _cure_of_missing(directory: Path, tag: str | None) -> str:
    if tag is None and (directory / MANIFEST).is_file():
        found = f"It is a checkpoint itself: load '{directory.parent}' with tag='{directory.name}'"
    elif directory.is_dir() and (there := tags(directory)):
        found = f"To load an existing one, give its tag: {', '.join(map(repr, there[-_MOST_TAGS:]))}"
    else:
        found = "Give the directory that engine.save_checkpoint has written to"
    return f"{found}; or pass missing_ok=True to begin without one"


@dataclass(eq=False)
class _Changing(contextlib.AbstractContextManager[None]):
    """Keeps several ranks together through a load: up to the ``with`` block, an error on one leaves all of them
    unchanged.

    An error inside the block leaves weights of two trainings, on all ranks. Then the phase guard refuses to train on.
    """

    _guard: PhaseGuard
    _folder: Path
    _ranks: Ranks
    _what: str

    def __post_init__(self) -> None:
        # `load` calls `agree` twice. First when it has looked at the checkpoint: nothing has changed on any rank. Then
        # `__enter__` does, when optimizers have changed and weights have not.
        self._ahead = ["the optimizer", "the model"]
        """What comes next, for messages; empty: weights are being replaced."""

    def agree(self, error: Exception | None = None) -> None:
        """Tell the other ranks whether this one has an error. Raises if any rank has one."""
        if not self._ahead:  # inside the ``with`` block
            return
        try:
            agree(self._ranks, f"{self._what}, before {self._ahead.pop(0)}", error)
        except Exception:
            if not self._ahead and self._ranks.num > 1:  # others have changed their optimizers
                self._guard.on_partial_load(self._folder)
            self._ahead.clear()
            raise

    def __enter__(self) -> None:
        self.agree()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_whole = False
        try:
            # A KeyboardInterrupt passes at once, without meeting the other ranks.
            if error is None or isinstance(error, Exception):
                agree(self._ranks, self._what, error)
                is_whole = error is None
        finally:
            self._guard.on_partial_load(None if is_whole else self._folder)
