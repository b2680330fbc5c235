"""What an engine saves and loads: checkpoints with DeepSpeed's arguments and results."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infinity.checkpoint import training_checkpoint as checkpoint
from infinity.checkpoint.manifest import MANIFEST
from infinity.checkpoint.random_states import random_states, set_random_states
from infinity.distributed.collectives import check_single_process
from infinity.engine.export_calls import ExportCalls
from infinity.engine.parts import Parts
from infinity.loop.phase import PhaseGuard
from infinity.optim.facade.paged_optimizer import PagedOptimizer
from infinity.threads.interrupts import surely
from swapper.volumes.publish import remove_abandoned

logger = logging.getLogger(__name__)
_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


class CheckpointCalls(ExportCalls):
    """Part of the engine. Knows what is needed of it; must not know formats."""

    _parts: Parts
    _guard: PhaseGuard
    _paged: PagedOptimizer
    _saving: checkpoint.BackgroundSave | None

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
        """Write all that the training goes on from, tensor by tensor, to ``save_dir``/``tag``; returns True.

        Weights with every bit of their main weights, optimizer states, hyperparameters, the scheduler, the loss scale and the
        counters, the random generators of python, NumPy and torch, and the position of the loader of ``training_data``. Gradients
        of a step that has not ended are not in it, nor what worker processes of a loader draw.

        Args:
            save_dir: made if it is missing.
            tag: name of the checkpoint; None: "global_step" and the number of steps.
            client_state: whatever the script wants back from `load_checkpoint`.
            save_latest: whether ``load_checkpoint(save_dir)`` is to find this one.
            exclude_frozen_parameters: leave parameters out that do not train (the base of adapters). Who loads it needs them
                from elsewhere, with the values that they have now: they stay as they are in the model.
            blocking: False: buffers, frozen weights and what the engine does not hold are written, then the call returns, and
                the rest is written while training goes on: an update of a unit waits until that is saved as it was. It takes
                about 14 MiB beside the budget. `wait_for_checkpoint`, the next save or load, and `close` wait for its end.
            keep_last: so many checkpoints stay in ``save_dir``, this one counted: older ones are removed when this one is
                complete, but never the one that ``latest`` names. None: all stay.

        Raises:
            CheckpointError: the save before, which was not to block, has failed; or the client state cannot be written.
            StorageError: the directory cannot take it, or has too little room; what was there before is still there.
            ValueError: ``save_dir`` is empty.
        """
        if not os.fspath(save_dir):
            raise ValueError('save_dir is empty. Pass a directory; "." is the current one')
        if not isinstance(client_state, Mapping | None):
            raise TypeError(f"client_state must be a dict, not {type(client_state).__name__}")
        check_single_process("engine.save_checkpoint")
        self.wait_for_checkpoint()
        self._paged.settle_states()
        self.flush()
        if self.micro_steps % self.gradient_accumulation_steps():
            logger.warning(
                "engine.save_checkpoint between the micro-batches of a step: the gradients so far are not saved. Call it at "
                "engine.is_gradient_accumulation_boundary()"
            )
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        saving = checkpoint.Saving(
            self._training(),
            Path(save_dir).absolute(),  # a script may change to another directory meanwhile
            name,
            client_state or {},
            is_latest=save_latest,
            keep_last=keep_last,
            is_watching=not blocking,
            excludes_frozen=exclude_frozen_parameters,
            shows_progress=blocking and self.config.infinity.progress_bars and self.global_rank <= 0,
        )
        if blocking:
            saving.run()
        else:
            background = checkpoint.BackgroundSave(saving, self._parts.device)
            surely(lambda: self._begin_saving(background))
        self._num_saved_steps = self.global_steps
        return True

    def _begin_saving(self, background: checkpoint.BackgroundSave) -> None:
        """May be called again. Nothing is updated before it returns."""
        background.start(self)
        self._saving = background
        self._let_updates_wait_for(background.saving)

    def _let_updates_wait_for(self, saving: checkpoint.Saving | None) -> None:
        self._parts.stream.wait_for_saver(saving)
        self._parts.access.wait_for_saver(saving)

    def wait_for_checkpoint(self) -> None:
        """Return when what ``save_checkpoint(blocking=False)`` writes is complete and on the drive; at once if nothing is.

        Raises:
            CheckpointError, StorageError: it could not be saved. The checkpoints before are as they were.
        """
        saving = self._saving
        if saving is not None:
            saving.wait()
            self._end_saving()

    def _check_saving(self) -> None:
        """Raise what went wrong in a save that has ended."""
        if self._saving is not None and self._saving.is_over:
            self._end_saving()

    def _end_saving(self) -> None:
        saving, self._saving = self._saving, None
        self._let_updates_wait_for(None)
        if saving is not None:
            saving.raise_error()

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
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from what `save_checkpoint` wrote, under whatever budget, tiers and precision this engine has.

        Objects in the client state whose classes torch does not know are refused, see ``torch.serialization.add_safe_globals``.

        Args:
            load_dir: where checkpoints are.
            tag: which one; None: the latest.
            load_module_strict: whether checkpoint and model must have the same parameters and buffers.
            load_optimizer_states: whether to load states, hyperparameters and the loss scale.
            load_lr_scheduler_states: whether to load the scheduler.
            load_module_only: load weights and buffers only.
            load_random_states: let the generators of python, NumPy and torch go on as well. Both this and the next only
                where optimizer states are loaded: else a new training begins.
            load_data_position: let the loader of ``training_data`` go on with the batch that would have come next. False
                for a script that skips batches itself.
            custom_load_fn: refused: there is no state dict to pass to it.

        Returns:
            The checkpoint's directory and the client state; (None, None) if there is no such checkpoint.

        Raises:
            CheckpointError: it is damaged, or of a newer version. If weights have been changed already, the next step says so.
            UnsupportedModelError: it is of another model; nothing has been changed.
            ValueError: the optimizer is of another kind, or has other groups; nothing has been changed.
        """
        if custom_load_fn is not None:
            raise TypeError(
                "custom_load_fn gets a state dict of the whole model, and there is none: load_state_dict takes one"
            )
        check_single_process("engine.load_checkpoint")
        self.wait_for_checkpoint()
        self.flush()
        remove_abandoned(Path(load_dir))
        folder = checkpoint.find(Path(load_dir), None if tag is None else str(tag))
        if folder is None:
            hint = ""
            if tag is None and (Path(load_dir) / MANIFEST).is_file():
                hint = f". It is a checkpoint itself: load '{Path(load_dir).parent}' with tag='{Path(load_dir).name}'"
            logger.warning(
                "there is no checkpoint %s in '%s': nothing was loaded%s",
                *(tag or "that is the latest", load_dir, hint),
            )
            return None, None
        rest = checkpoint.load(
            self._training(),
            folder,
            is_strict=load_module_strict,
            with_optimizer=load_optimizer_states,
            with_scheduler=load_lr_scheduler_states,
            only_module=load_module_only,
            shows_progress=self.config.infinity.progress_bars and self.global_rank <= 0,
            changing=self._changing(folder),
        )
        if not load_module_only:
            self.count_on(rest["counters"], with_loss_scale=load_optimizer_states)
        if load_optimizer_states and not load_module_only:
            loader = self.training_dataloader
            if load_data_position and "loader" in rest and hasattr(loader, "load_state_dict"):
                loader.load_state_dict(rest["loader"])
            if load_random_states and "random" in rest:  # another framework has saved none
                set_random_states(rest["random"])
        client_state: dict[str, Any] = rest["client_state"]
        return str(folder), client_state

    @contextlib.contextmanager
    def _changing(self, folder: Path) -> Iterator[None]:
        """What fails inside the ``with`` block leaves weights of two trainings: nobody is to go on with them."""
        try:
            yield
        except BaseException:
            self._guard.note_part_loaded(folder)
            raise
        self._guard.note_part_loaded(None)

    def _training(self) -> checkpoint.Training:
        parts = self._parts
        return checkpoint.Training(
            self.module,
            self.optimizer,
            self.lr_scheduler,
            parts.access,
            parts.module_hooks,
            parts.pager,
            self.rest,
            parts.template.tiled,
        )

    def rest(self) -> dict[str, Any]:
        """What is no tensor of the model or the optimizer: counters, random generators, positions of loader and scheduler."""
        rest: dict[str, Any] = {"counters": self.counters(), "random": random_states()}
        if hasattr(self.training_dataloader, "state_dict"):
            rest["loader"] = self.training_dataloader.state_dict()
        if hasattr(self.lr_scheduler, "state_dict"):
            rest["lr_scheduler"] = self.lr_scheduler.state_dict()
        return rest

    def counters(self) -> dict[str, Any]:
        """Steps, micro-batches and samples so far, and the loss scale."""
        return {name: getattr(self, name) for name in _COUNTERS} | {"loss_scale": self._parts.stepper.scaler.state()}

    def count_on(self, counters: Mapping[str, Any], *, with_loss_scale: bool = True) -> None:
        """Go on from what `counters` gave."""
        # Saved gradients there are none, so the present step stays where it is, whatever the accumulation steps were.
        passed = self.micro_steps % self._accumulation_steps
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        self.micro_steps += passed - self.micro_steps % self._accumulation_steps
        self._num_saved_steps = self.global_steps
        if with_loss_scale:  # DeepSpeed has it among the optimizer's states
            self._parts.stepper.scaler.load_state(counters["loss_scale"])
