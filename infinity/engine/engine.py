"""The engine: the object that a training loop calls.

This file has the loop, the optimizer's step and closing. The classes that `Engine` extends have the other methods, one
file for each class. `Relayout`: parameters added later. `ExportCalls`: exports. `CheckpointCalls`: checkpoints.
`LoopSettings`: counters, sizes and a loader. `ModuleFacade`: the model's own names. Weights and states are read through
`ConsistentAccess`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from inspect import BoundArguments
from types import TracebackType
from typing import Any, NoReturn

import torch

from infinity.engine.parts import Parts
from infinity.engine.relayout import Relayout
from infinity.engine.run_notes import RunNotes
from infinity.engine.shutdown import Shutdown
from infinity.engine.train_batch import LossFunction, TrainBatch
from infinity.errors import StepError
from infinity.loop.batches import ModelCall
from infinity.loop.loader import OwnBatches
from infinity.loop.phase import Phase
from infinity.metrics.monitors import Monitors
from infinity.optim.facade.paged_optimizer import PagedOptimizer, PassedOptimizer
from infinity.optim.scheduler_state import step_arguments
from infinity.threads.engine_lock import locked, refuse_reentry
from infinity.vertical.step import StepOptions
from swapper.sync.interrupts import uninterrupted

logger = logging.getLogger(__name__)


class Engine(Relayout):
    """Trains a model whose states are paged. Made by `infinity.initialize`.

    ``engine(**batch)`` runs the model, ``engine.backward(loss)`` the backward of one micro-batch, ``engine.step()`` the
    optimizer at every gradient accumulation boundary. It is a context manager; leaving it closes it. It is an
    ``nn.Module``, too, with the parameters, names and attributes of the model (see `infinity.engine.module_facade`).

    The plain loop works too: ``loss.backward(); optimizer.step(); optimizer.zero_grad()`` on the model and its optimizer.
    There, ``step`` is the boundary, nothing is divided, and gradients stay until ``zero_grad``.
    """

    def __init__(self, parts: Parts) -> None:
        """Not meant to be called: see `infinity.initialize`."""
        super().__init__(parts)
        self._paged = PagedOptimizer(
            parts.wrapped_optimizer, parts.updater, self, parts.consistent, parts.groups.loose, parts.mains
        )
        # Without groups there is nothing to train, and `_check_optimizer` says so.
        self.optimizer = self._paged if parts.wrapped_optimizer.param_groups else None
        self._has_warned_of_dropping = False
        self._untile: Callable[[], None] = lambda: None
        self._passed: PassedOptimizer | None = None
        self._style = parts.style
        self._connect(parts)
        _engines.add(self)

    def _connect(self, parts: Parts) -> None:
        super()._connect(parts)
        self._coordinator = parts.coordinator
        self._reporter = parts.reporter
        self._backwards = parts.backwards
        self.run_module = ModelCall(self.module, self.config, parts.device.torch_device, parts.reporter)
        self._train_batch = TrainBatch(self, self._vertical, self._reporter)
        self._shutdown = Shutdown(self, parts.stream, parts.storage, parts.timeline)
        self._backwards.collector.watch(parts.module_hooks.handles_of_others)
        # Last: from here on a call of the model comes to these parts. The hooks keep the engine alive, so that a script
        # may keep the model alone.
        parts.module_hooks.install(self)

    def _release_parts(self, rest: contextlib.ExitStack) -> None:
        """Push the steps that take the parts down. ``rest`` runs them in reverse, each even if one before it fails."""
        # So read from the bottom up: first hooks and running calls end, then updates and other ranks' fetches. Memory,
        # files and threads are last.
        rest.callback(self._shutdown.now)
        rest.callback(self._stepper.close)
        rest.callback(self._coordinator.close)
        rest.callback(self._parts.stream.close)
        rest.callback(self._coordinator.abandon_forward)
        rest.callback(self._vertical.close)
        rest.callback(self._parts.module_hooks.uninstall)
        rest.callback(self._backwards.collector.close)

    def begin_run(self, untile: Callable[[], None], notes: RunNotes, monitors: Monitors) -> None:
        """Resume the durable run, and start the log. The last step of `infinity.initialize`.

        ``untile``: makes tiled weights whole again when the engine is closed.
        """
        self._untile = untile
        # Before the log is opened: its first line has the step that the run continues from.
        self._resume()
        self._notes, self.monitor = notes, monitors
        notes.start(self)

    def adopt_optimizer(self, passed: PassedOptimizer) -> None:
        """The script's own instance is the engine's optimizer until `close`."""
        self._passed = passed
        self.optimizer = passed.optimizer

    @property
    def passed_optimizer(self) -> torch.optim.Optimizer | None:
        """The instance that was passed to `infinity.initialize`, if one was."""
        return None if self._passed is None else self._passed.optimizer

    # ------------------------------------------------------------------------------------------------ the training loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Arguments and result are those of ``module.forward``."""
        self._check_usable()
        # Still in forward: an interrupt cut the last one off, since torch runs no forward hooks after
        # KeyboardInterrupt.
        if self._coordinator.is_in_forward:
            self._parts.module_hooks.abandon_calls()
        try:
            return self.run_module(*args, **kwargs)
        except BaseException:
            # Now, since contexts around this call that are left take down what is innermost: our hooks in place of theirs.
            self._forget_cut_off_forward()
            raise

    @locked
    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Backward of one micro-batch: gradients of ``loss / gradient_accumulation_steps`` are accumulated.

        Args:
            loss: tensor with one element and a graph. With fp16 it is multiplied by `loss_scale` before.
            retain_graph: as in torch: another backward of the same micro-batch follows.
            scale_wrt_gas: False: the loss is divided already.

        Returns:
            The loss, divided like its gradients.

        Raises:
            StepError: the step before was not finished with `step`, or ``loss`` is no such tensor; a parameter got a
                gradient after its update had begun.
        """
        self._check_optimizer("engine.backward()")
        self._forget_cut_off_forward()
        self._guard.check_backward(loss)
        # A `loss.backward()` of the script before this call: its gradients belong to the step, and are taken first.
        self._backwards.deliver_pending()
        self._vertical.on_ordinary_step()
        self._reporter.on_loss(loss, self.global_steps)
        # With a boundary set to False by the script, several backwards before a step are what it announced, not a GAN's
        # loop.
        if self.counts.boundary is None or self.counts.boundary:
            self._style.on_backward()
        self.counts.count_backwards(1)
        divisor = self._style.begin_backward(divides=scale_wrt_gas)
        self._backwards.run(self._stepper.scaler.scale_loss(loss, divisor), retain_graph=retain_graph)
        num_parts = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        # As DeepSpeed: the caller's loss is divided like the gradients.
        return loss if num_parts == 1 else loss.detach() / num_parts

    def backward_together(self, compute_losses: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor] | str:
        """Run forward and backward of all micro-batches of a step vertically, unit by unit. Call `step` next.

        The gradients are bit for bit those of ``backward(loss, scale_wrt_gas=False)`` for one micro-batch after the
        other. If the model makes them differ, the step is not run vertically. With ``"infinity": {"schedule":
        "vertical"}`` it is, with a warning, if the model allows it at all.

        Args:
            compute_losses: one function per micro-batch, which runs the model and returns the loss (one element),
                divided already. Each is called in a thread of its own; the threads take turns.

        Returns:
            The losses, detached; or a text that says why the micro-batches have to run one after the other. In that
            case nothing has changed, except what the functions changed outside of the model.

        Raises:
            StepError: the step before was not finished with `step`.
        """
        self._check_optimizer("engine.backward_together()")
        self._guard.check_not_cut_off()
        self._backwards.deliver_pending()
        self._style.on_backward()
        options = StepOptions(self.global_steps, 1, self._style.updates_in_backward, keeps_bits=True)
        found = self._vertical.obstacle() or self._vertical.run(compute_losses, options)
        if isinstance(found, str):
            self.on_ordinary_step(found)
            # Nothing was kept of them: the caller runs the micro-batches again, one after the other.
            self._style.forget_backwards()
            return found
        self._train_batch.on_vertical_step(found)
        self._style.begin_backward(divides=False)
        self.counts.count_backwards(len(found))
        return found

    def on_ordinary_step(self, reason: str) -> None:
        """The present step runs in the ordinary order. ``reason`` is reported, and logged once."""
        self._reporter.on_schedule("ordinary", reason)
        self._vertical.on_ordinary_step(reason)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for your own ``loss.backward()`` before `step`: with fp16, multiplied by the loss scale.

        It is not divided here: `step` divides the gradients by the accumulation steps.
        """
        self._check_usable()
        self._guard.check_backward(loss)
        return self._backwards.scale(loss)

    @locked
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the gradient accumulation boundary, update the weights.

        Gradients of your own ``loss.backward()`` are divided by the accumulation steps here. ``lr_kwargs`` are passed
        to ``lr_scheduler.step``. If it needs an argument and gets none, it gets the samples of a step, as in DeepSpeed.

        The update may still run when this returns. Reading weights or states waits for it. With fp16, or
        ``bf16.check_grad_overflow``, a step with non-finite gradients changes nothing, and `lr_scheduler` is not
        stepped.

        Raises:
            StepError: there was no backward since the last one, or it was cut off; gradients are not finite even with
                the smallest loss scale allowed.
            TypeError: ``lr_scheduler.step`` needs other arguments; the step has not begun.
            CheckpointError, StorageError: a background save has failed; the step is complete.
        """
        self._check_optimizer("engine.step()")
        if self.counts.is_in_no_sync:
            problem = "It is illegal to call Engine.step() inside no_sync context manager"
            raise StepError.order("engine.step()", problem, cure="Call it after that block")
        self._guard.check_step()
        self._was_applied = False
        is_boundary = not self.counts.is_managed or self.counts.is_boundary()
        # Bound before the update: a missing argument must raise while nothing has changed.
        scheduled = step_arguments(self.lr_scheduler, lr_kwargs or {}, self.counts.batch_size) if is_boundary else None
        with uninterrupted():  # else weights, counters and the scheduler would be of two steps
            steps_before, is_over = self.global_steps, False
            try:
                if is_boundary:
                    with self.counts.in_step():
                        # Not `optimizer_step`: hooks on the optimizer run, and torch's schedulers see that it was called.
                        self.optimizer.step()
                is_over = True
            finally:
                # If a hook behind the update raises, the step is over all the same: else the next one would begin with
                # this one's micro-batches counted.
                if is_over or self.global_steps > steps_before:
                    self._end_micro_batch(scheduled, is_boundary=is_boundary)
        self._check_saving()

    def _end_micro_batch(self, scheduled: BoundArguments | None, *, is_boundary: bool) -> None:
        if is_boundary:
            self.loose.zero_grad(set_to_none=True)
        self.micro_steps += 1
        self._guard.end_micro_batch()
        self._style.on_engine_step(is_boundary=is_boundary)
        if is_boundary:
            self._end_step(scheduled)

    def _end_step(self, scheduled: BoundArguments | None) -> None:
        """After the update: count samples, step loss scale and scheduler, write curves, begin the commit.

        ``scheduled``: arguments of ``lr_scheduler.step``; None: it is not stepped.
        """
        samples_before = self.global_samples
        self.counts.count_samples(None if self.report is None else self.report.num_samples)
        # Before the scheduler, which must not move in a skipped step, and before the commit, which holds the new scale.
        self._stepper.scaler.update(is_finite=self.was_step_applied(), step=self.global_steps)
        if self.was_step_applied() and scheduled is not None:
            self.lr_scheduler.step(*scheduled.args, **scheduled.kwargs)
        if self.report is not None:
            lr = next(iter(self.get_lr()), None)
            with_seconds = self.config.wall_clock_breakdown
            self.monitor.write_step(self.report, lr, samples_before, self.global_samples, with_seconds=with_seconds)
        if self._parts.durable is not None:
            # Last: everything above is in the commit.
            self._parts.durable.commit(self)

    def train_batch(self, data_iter: Iterator[Any] | None = None, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Run all micro-batches of one step, forward, backward and step.

        With several micro-batches the step runs vertically, if config and model allow it (see ``infinity.schedule``).
        ``report.schedule`` says which order it was.

        Args:
            data_iter: yields one batch per micro-batch; a mapping is passed as keyword arguments, a tuple or list as
                arguments. None: the loader made from ``training_data``, epoch after epoch.
            loss_fn: takes the model's output and the batch, and returns the loss. None: the loss is in the output.

        Returns:
            The mean of the micro-batches' losses: 0-dim fp32 tensor, detached.

        If it raises, because the iterator ended or in the model's code, gradients of the step's first micro-batches are
        dropped, and the step can be repeated. If updates had begun, the next call says that `reset` is needed.
        """
        self._check_may_step("engine.train_batch()")
        self.counts.check_counted("engine.train_batch()")
        self._guard.check_not_cut_off()
        return self._train_batch(self._own_batches if data_iter is None else data_iter, loss_fn)

    @functools.cached_property
    def _own_batches(self) -> Iterator[Any]:
        """Batches of ``training_data``, epoch after epoch. Kept from step to step, also through a new layout."""
        if self.training_dataloader is None:
            cure = "Pass one, or give training_data to infinity.initialize"
            raise StepError.order("engine.train_batch()", "there is no data iterator", cure=cure)
        return OwnBatches(self.training_dataloader)

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        loss_fn: LossFunction | None = None,
    ) -> Any:
        """The mean loss (0-dim fp32) of as many batches as a step has, in evaluation mode and without gradients.

        Afterwards each module has the mode that it had before. (DeepSpeed leaves the model in evaluation mode.)

        Args:
            data_iter: yields one batch per micro-batch, as for `train_batch`; or a single batch.
            return_logits: return a pair of loss and list of outputs.
            compute_loss: False: return the list of outputs in place of the loss.
            reduce_output: "avg"; None: return the list of the losses in place of their mean.
            bcast_loss: without effect.
            num_micro_batches: how many batches; None: the accumulation steps.
            loss_fn: as for `train_batch`.
        """
        self._check_usable()
        found, outputs = self._train_batch.evaluate(
            data_iter, loss_fn, num_micro_batches, reduce_output if compute_loss else "outputs"
        )
        return (found, outputs) if return_logits else found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all accumulated gradients, also between the micro-batches of a step, where DeepSpeed keeps them."""
        has_unused = self.counts.num_unused and self._stepper.gradients.has_any
        if has_unused and self.counts.is_managed and not self._has_warned_of_dropping:
            self._has_warned_of_dropping = True
            logger.warning(
                "engine.zero_grad between the micro-batches of a step drops the gradients of those so far (%d), and "
                "the step divides by all %d. Call it after the engine.step() that ends a step, or not at all: "
                "engine.step() drops them",
                self.counts.num_unused,
                self.counts.num_micro_batches,
            )
        (self.optimizer or self.module).zero_grad(set_to_none)

    # -------------------------------------------------------------------------------------- what the optimizer asks for

    def optimizer_lock(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Hold the engine lock inside the ``with`` block; see [Note: engine lock] in
        ``infinity.threads.engine_lock``."""
        return self._coordinator.lock.held(what)

    @locked
    def optimizer_step(self) -> None:
        """Implements ``optimizer.step()``, called by `step` or by a plain loop."""
        self._check_may_step("optimizer.step()")
        self._forget_cut_off_forward()
        is_durable = self._parts.durable is not None
        if not self.counts.is_in_step and (is_durable or self._stepper.scaler.is_active) and not self._has_gradients():
            return  # a batch was skipped: as in torch nothing is updated, so there is nothing to commit, nor to scale
        if is_durable and not self.counts.is_in_step:
            problem = "the run is durable, and a commit has to know when the step and its scheduler are complete"
            cure = "Call engine.backward(loss) and engine.step(), or set config key 'infinity.durable' to false"
            raise StepError.order("optimizer.step()", problem, cure=cure)
        self._guard.check_optimizer_step(is_engine_step=self.counts.is_in_step)
        self._reporter.begin()
        self._backwards.deliver_pending()
        # The stepper divides the gradients of held parameters. Those of loose parameters are torch's own.
        if self._style.changes_what_comes and self.loose.have_gradients:
            raise StepError.order(
                "engine.step()",
                "loss.backward() and engine.backward(loss) were both called in this step. Parameters that were added "
                "after infinity.initialize got gradients that are not divided by the accumulation steps",
                cure="Call engine.reset(), and then engine.backward(loss) for all losses of a step",
                step=self.global_steps,
            )
        self._stepper.divide_by(self._style.divisor(is_engine_step=self.counts.is_in_step))
        # What the script has written into p.grad between backward and step, e.g. its own clipping.
        self._parts.live_gradients.apply_user_writes()
        if not self.counts.is_in_step:
            self._style.on_plain_step()
            self._vertical.on_ordinary_step()
        with uninterrupted():  # else some weights would be of this step, others of the one before
            self._update()
            self._end_update()

    def _update(self) -> None:
        # An interrupt is held back by `uninterrupted`; any other exception leaves some units updated and others not.
        is_complete = False
        self._guard.move_to(Phase.STEPPING)
        try:
            self._parts.clock.begin_compute("step")
            self._stepper.apply(self.global_steps, keeps=not self.counts.is_in_step)
            is_complete = True
        finally:
            self._parts.clock.end_compute()
            self._guard.move_to(Phase.READY if is_complete else Phase.BROKEN)

    def _has_gradients(self) -> bool:
        self._backwards.deliver_pending()
        return self._guard.has_gradients or self.loose.have_gradients

    def _end_update(self) -> None:
        """All updates of the step were submitted: count the step, and report it."""
        self._style.end_step()
        if not self.counts.is_in_step:  # whatever was accumulated with `backward` went into it
            self.counts.begin_step()
            self._guard.end_micro_batch()
        self.global_steps += 1
        is_skipped = self._stepper.is_skipped
        self._was_applied = not is_skipped
        self.skipped_steps += is_skipped
        self.report = self._reporter.end_step(
            self.global_steps,
            None if self._stepper.grad_norm is None else float(self._stepper.grad_norm),
            prediction=self.plan.prediction,
            lr=tuple(self.get_lr()),
            loss_scale=self.loss_scale(),
            num_samples=self.train_batch_size(),
            is_skipped=is_skipped,
        )
        self._parts.plan_tracker.on_step(self.report)
        self._notes.step(self, self.report)

    @locked
    def optimizer_zero_grad(self, *, set_to_none: bool) -> None:
        """Implements ``optimizer.zero_grad()``: drop the gradients of parameters in groups, or set them to zero.

        Raises:
            StepError: some of them were already used up in backward.
        """
        self._guard.check_not_partial("gradients were dropped before engine.step()")
        self._backwards.refuse_together("gradients are dropped between micro-batches")
        # torch's zero_grad leaves parameters alone that are in no group.
        kept = self._parts.groups.ungrouped()
        if kept or not set_to_none:
            self._backwards.deliver_pending()
        if set_to_none:
            self._forget_gradients(kept)
        else:
            self._parts.live_gradients.zero(kept)
            self._on_gradients_dropped()

    def _forget_gradients(self, kept: Collection[tuple[int, int]] = ()) -> None:
        self._backwards.drop(kept)
        self._stepper.clear(kept)
        self._on_gradients_dropped()

    def _on_gradients_dropped(self) -> None:
        self._reporter.forget_losses()
        if self._guard.phase is Phase.BROKEN:
            self._guard.move_to(Phase.READY)

    # --------------------------------------------------------------------------------- what was cut off, and going back

    def reset(self) -> None:
        """Forget a forward or backward that an exception cut off, and drop the gradients of its step. Then train on.

        If an update in backward was cut off, weights are between two steps; this accepts them as they are. If several
        processes update in backward, all of them have to call it.
        """
        # The call that holds the lock may have been cut off on a thread that is gone: `reset` is how to get it back.
        if not self._coordinator.lock.is_mine:
            self._coordinator.break_off()
        with self._coordinator.lock.held("engine.reset()"):
            self._parts.module_hooks.abandon_calls()
            self._forget_calls()
            self._stepper.abandon()
            self._guard.cut_off()
            self._forget_gradients()
            self.loose.zero_grad(set_to_none=True)
            self.counts.abandon_step()

    def _forget_calls(self) -> None:
        """Forget calls of this thread that an interrupt kept from releasing the lock."""
        # A GatheredParameters block is a call that lasts beyond this one, and will release the lock itself.
        if not any(unit.gathered for unit in self._coordinator.parameter_cache.units):  # which last beyond a call
            self._coordinator.lock.be_outermost()

    def forget_step(self) -> None:
        """As `reset`. But if weights have been updated already, the next call raises."""
        if not self.is_closed and not self._stepper.is_between_steps:
            self.reset()

    def _forget_cut_off_forward(self) -> None:
        """Forget a forward that a KeyboardInterrupt cut off below the model: see `forward`."""
        if self._coordinator.is_in_forward and not self._parts.module_hooks.are_running():
            self._parts.module_hooks.abandon_calls()

    # ---------------------------------------------------------------------------------------------------------- the end

    @property
    def is_closed(self) -> bool:
        """Whether `close` is complete."""
        return self._shutdown.is_over

    @locked
    def close(self, *, restore_weights: bool | None = None) -> None:
        """Finish pending updates, then release memory, files and threads.

        Args:
            restore_weights: True: make the model an ordinary one on the compute device, with the trained weights in the
                compute dtype. None: do so if they take at most half of the free memory and no step was cut off. False:
                do not; using a parameter raises then.
        """
        self._close(restore_weights, self._restore)

    @locked
    def close_for_next(self) -> None:
        """Close, for the next engine of this model: large weights stay in files, if the config names drives."""
        self._close(True, functools.partial(self._restore, on_drives=True))

    def _close(self, restores: bool | None, restore: Callable[[], None]) -> None:
        if self.is_closed:
            return
        refuse_reentry("engine.close()")
        self._forget_calls()
        if self.is_asleep and restores is not False:
            self.wake()
        # Runs in reverse, whatever fails: the background save ends first, then the log and monitors, then the script's
        # optimizer comes back, then the parts go.
        with contextlib.ExitStack() as rest:
            self._release_parts(rest)
            if self._passed is not None:
                rest.callback(self._restore_optimizer, self._passed, had_states=self._has_states())
            rest.callback(self._guard.move_to, Phase.CLOSED)
            rest.callback(self.monitor.close)
            rest.callback(self._notes.end, self)
            rest.callback(self._finish_saving)
            durable = self._parts.durable
            if durable is not None and self._guard.is_consistent and not durable.has_failed:
                self.flush()  # whoever closes has to hear of a commit that fails
            if self._guard.phase is Phase.CLOSED:
                rest.callback(self._shutdown.abort)  # an interrupt has cut off an attempt to close
            elif restores or self._guard.is_consistent:
                # If `restores` is True, the user wants the weights, even those between two steps.
                self._leave_weights(restores, restore)
            else:
                # In reverse: the save ends first, because after `abort` nobody gets a staging buffer.
                rest.callback(self._shutdown.abort)
                rest.callback(self._finish_saving)

    def _has_states(self) -> bool:
        """Whether the optimizer has states; if that cannot be read, whether a step was made."""
        try:
            return any(self._paged.has_state(parameter) for parameter in self._parts.wrapped_optimizer.params())
        except Exception:
            return self.global_steps > 0

    def _restore_optimizer(self, passed: PassedOptimizer, *, had_states: bool) -> None:
        self.optimizer = self._paged
        passed.restore(had_states=had_states)

    def _restore(self, *, on_drives: bool = False) -> None:
        """Make the model an ordinary one again, with all weights. ``on_drives``: large ones get memory in files."""
        self._parts.access.restore(on_drives=on_drives)
        self._untile()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an engine cannot be copied or pickled, because its states are in scratch files. Copy engine.module instead"
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and (self._guard.is_consistent or self.is_asleep):
            self._guard.move_to(Phase.BROKEN)  # whoever leaves by an exception waits for nothing but a checkpoint
        try:
            self.close()
        except Exception as failure:
            failure.__context__ = failure.__context__ or error  # which the stack in `close` has taken away
            raise


# For `engine_of`: a parameter knows its handler, and the handler must not keep the engine alive.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def engine_behind(host: object) -> Engine | None:
    """The engine whose `ParameterHandler` is ``host``; None if there is none."""
    return next((engine for engine in list(_engines) if engine._parts.parameter_handler is host), None)
