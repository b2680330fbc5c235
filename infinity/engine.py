"""The engine: one object that a training loop talks to.

Decides when: it turns calls of the user and events of the model into work for pager, stepper and update stream. It moves
no bytes itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from infinity.backwards import Backwards
from infinity.config import InfinityConfig
from infinity.export import save_safetensors
from infinity.interrupts import surely
from infinity.loop_guard import LoopGuard, Phase
from infinity.optim import PagedOptimizer
from infinity.parameter_gradients import ParameterGradients
from infinity.parts import Parts
from infinity.plan import Plan
from infinity.shutdown import Shutdown, finish_pending
from infinity.step_backend import EngineBackend
from infinity.telemetry import StepReport
from infinity.train_batch import LossFunction, TrainBatch
from infinity.vertical import VerticalSchedule


class Engine:
    """Trains a model whose states are paged. Made by `infinity.initialize`.

    ``engine(**batch)`` runs the model, ``engine.backward(loss)`` the backward of one micro-batch, ``engine.step()`` the
    optimizer at every gradient accumulation boundary. It is a context manager; leaving it closes it.

    The plain loop works too: ``loss.backward(); optimizer.step(); optimizer.zero_grad()`` on the model and the optimizer
    that came back. There, ``step`` is the boundary, nothing is divided, and gradients are gone after it.
    """

    def __init__(self, config: InfinityConfig, parts: Parts) -> None:
        """Not meant to be called: see `infinity.initialize`."""
        self.config = config
        self.module: nn.Module = parts.holding.model
        self.optimizer = PagedOptimizer(parts.template, parts.updater, EngineBackend(self))
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.report: StepReport | None = None
        self._parts = parts
        self._pager = parts.pager
        self._stepper = parts.stepper
        self._reporter = parts.reporter
        self._is_in_step = False
        self._guard = LoopGuard(parts.stepper, lambda: self.global_steps)
        self._backwards = Backwards(
            parts.holding,
            parts.pager,
            parts.stepper,
            self._guard,
            is_boundary=self.is_gradient_accumulation_boundary,
            step=lambda: self.global_steps,
        )
        self._vertical = VerticalSchedule(
            parts.vertical, self._backwards, self._guard, lambda: self.global_steps, self._reporter.note_loss
        )
        self._train_batch = TrainBatch(self, self._vertical, self._reporter.note_schedule)
        parts.residence.gradients = ParameterGradients(
            parts.holding, self._pager, self._stepper, self._backwards.before_gradient_access
        )
        parts.residence.engine = self
        self._pager.check = self._check_usable
        self._pager.on_forward = self._before_forward
        self._pager.on_settled_read = self._guard.check_settled
        self._shutdown = Shutdown(self, parts.stream, parts.storage, parts.recording)
        parts.holding.install(self._pager, self._backwards.collector.note_call, self, self.gather, self.scatter)

    # ------------------------------------------------------------------------------------------------ the training loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Arguments and result are those of ``module.forward``."""
        self._check_usable()
        if self._pager.is_in_forward:  # torch runs no hooks after a KeyboardInterrupt in forward
            self._abandon_forward()
        return self.module(*args, **kwargs)

    forward = __call__

    def backward(self, loss: Any) -> Any:
        """Backward of one micro-batch: gradients of ``loss / gradient_accumulation_steps`` are accumulated.

        Args:
            loss: tensor with one element and a graph. With fp16 it is multiplied by `loss_scale` before.

        Returns:
            ``loss`` as it was passed.

        Raises:
            StepOrderError: the step before was not finished with `step`, or ``loss`` is no such tensor.
            LateGradientError: a parameter got a gradient after its update had begun.
        """
        self._check_usable()
        self._guard.check_backward(loss)
        self._backwards.collect()
        self._vertical.note_ordinary()
        self._reporter.note_loss(loss, self.global_steps)
        self._backwards.run(self._stepper.scaler.share_of(loss, self.config.gradient_accumulation_steps))
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last of its step."""
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    def step(self) -> None:
        """End a micro-batch; at the gradient accumulation boundary, update the weights.

        The update may still run when this returns. Whatever looks at weights or states waits for it. With fp16, or
        ``bf16.check_grad_overflow``, a step whose gradients are not finite changes nothing, and `lr_scheduler` stays.

        Raises:
            StepOrderError: there was no backward since the last one, or it was cut off.
            LossScaleError: gradients are not finite even with the smallest loss scale allowed.
        """
        self._check_usable()
        self._guard.check_step()
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary:
            self._is_in_step = True
            try:
                self.optimizer.step()  # so that its hooks run, and schedulers see it
            finally:
                self._is_in_step = False
        self.micro_steps += 1
        self._guard.has_backward = False
        if is_boundary:
            self._stepper.scaler.note(is_finite=self.was_step_applied(), step=self.global_steps)
            if self.was_step_applied() and not isinstance(self.lr_scheduler, ReduceLROnPlateau | None):
                self.lr_scheduler.step()  # one on a plateau needs a metric: its owner steps it

    def was_step_applied(self) -> bool:
        """Whether the last step changed weights; False if its gradients were not finite and the config checks that."""
        return not self._stepper.is_skipped

    def loss_scale(self) -> float:
        """What the next loss is multiplied with; 1 unless the compute dtype is fp16."""
        return self._stepper.scaler.scale

    def train_batch(self, data_iter: Iterator[Any] | None = None, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Run all micro-batches of one step, forward, backward and step.

        With several of them the step goes unit by unit over all micro-batches, if config and model allow (see
        ``infinity.schedule``); ``report.schedule`` says how it went.

        Args:
            data_iter: gives one batch per micro-batch; a mapping is passed as keyword arguments, a tuple or list as
                arguments. None: the loader made from ``training_data``, epoch after epoch.
            loss_fn: takes the model's output and the batch, and gives the loss. None: the loss is in the output.

        Returns:
            The mean of the micro-batches' losses: 0-dim fp32 tensor, detached.

        If it raises, because the iterator ended or from the model's code, the step has not begun: gradients of its first
        micro-batches are forgotten. Only if updates had begun, the next call says that `reset` is needed.
        """
        self._check_usable()
        self._guard.check_whole()
        return self._train_batch(data_iter, loss_fn)

    def train(self, mode: bool = True) -> Engine:
        """Training mode, as ``module.train``."""
        if not mode and self._guard.is_settled:
            self.flush()
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Evaluation mode, as ``module.eval``; pending updates are finished first."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    def zero_grad(self) -> None:
        """Forget all accumulated gradients."""
        self.optimizer.zero_grad()

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._parts.template.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """2-norm of all gradients of the last step, before clipping; None before the first step."""
        norm = self._stepper.grad_norm
        return None if norm is None else float(norm)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.config.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per micro-batch, if the config says so."""
        return self.config.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int | None:
        """Samples per step, if the config says so."""
        return self.config.train_batch_size

    def optimizer_step(self) -> None:
        """``optimizer.step()``, called by `step` or by a plain loop: the gradients that are there are the step's."""
        self._check_usable()
        self._guard.check_optimizer_step(is_engine_step=self._is_in_step)
        self._reporter.begin()
        self._backwards.collect()
        if not self._is_in_step:
            self._vertical.note_ordinary()
        had_gradients = self._stepper.gradients.has_any
        is_complete = False
        self._guard.move_to(Phase.STEPPING)
        try:
            self._parts.clock.begin_compute("step")
            self._stepper.apply(self.global_steps)
            is_complete = True
        finally:
            self._parts.clock.end_compute()
            self._guard.move_to(Phase.READY if is_complete else Phase.BROKEN)
        self._backwards.end_step(leaves_gradients=had_gradients and not self._is_in_step)
        self.global_steps += 1
        is_skipped = self._stepper.is_skipped
        self.skipped_steps += is_skipped
        self.report = self._reporter.end_step(self.global_steps, self.get_global_grad_norm(), is_skipped=is_skipped)
        self._parts.forecast.note(self.report)

    def optimizer_zero_grad(self) -> None:
        """``optimizer.zero_grad()``: forget all gradients.

        Raises:
            PartialUpdateError: some of them were already used up in backward.
        """
        self._guard.check_not_partial("gradients were dropped before engine.step()")
        self._backwards.drop()
        self._stepper.clear()
        self._reporter.forget_losses()
        if self._guard.phase is Phase.BROKEN:
            self._guard.move_to(Phase.READY)

    # ------------------------------------------------------------------------------------------------- weights and state

    def flush(self) -> None:
        """Return when all pending updates and writes are done; raises what went wrong in them."""
        self._check_usable()
        self._guard.check_settled()
        with self._parts.clock.waiting("update"):
            self._parts.stream.drain(self._pager.attach_wanted)
        with self._parts.clock.waiting("write"):
            self._parts.storage.flush()
        self._pager.collect_all()

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of the main weight ("weight": fp32, on the CPU) and the optimizer's state, in the parameter's shape."""
        self.flush()
        return {**self._parts.access.state(parameter), "weight": self._parts.access.main_weight(parameter)}

    def has_state(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has optimizer state. Waits for nothing but its first update."""
        return self._parts.access.has_state(parameter)

    def gather_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of a parameter's optimizer state, as torch keeps it."""
        self.flush()
        return self._parts.access.state(parameter)

    def load_state(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        """Replace a parameter's optimizer state. Raises ValueError, and changes nothing, where that does not fit."""
        self.flush()
        self._parts.access.load_state(parameter, values)

    def gather(self, parameters: Sequence[nn.Parameter]) -> Any:
        """Make the parameters hold their full weights until `scatter`. See `infinity.GatheredParameters`."""
        self.flush()
        return self._parts.access.gather(parameters)

    def scatter(self, gathering: Any) -> None:
        """The counterpart of `gather`: store what was changed."""
        self._parts.access.scatter(gathering)

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> None:
        """Write the trained weights (compute dtype) and buffers as sharded safetensors, in bounded memory.

        The directory (made if missing) gets shards, ``model.safetensors.index.json`` and, for a Hugging Face model, its
        config: ``from_pretrained(save_dir)`` loads it, and so does plain torch, shard by shard. ``save_filename`` gives the
        shards' names; "pytorch_model.bin" means the default.

        Raises:
            StorageError: the directory cannot take them; what was there before is still there.
        """
        self.flush()
        save_safetensors(self._parts.holding, self._pager, Path(save_dir), save_filename)

    # ------------------------------------------------------------------------------------------------------- life cycle

    @property
    def plan(self) -> Plan:
        """What rests where and what a step moves; predictions follow the recorded trace."""
        return self._parts.forecast.plan(self._pager.training_trace, self._vertical.traffic)

    @property
    def waiting_for(self) -> str:
        """What the training thread waits for right now; empty while it computes."""
        return self._parts.clock.waiting_for

    def save_timeline(self, path: str | Path) -> None:
        """Write who was busy when, so far, as a trace for ui.perfetto.dev. The config's `infinity.timeline` asks for one."""
        self._reporter.save_timeline(Path(path))

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self._parts.device

    def reset(self) -> None:
        """Forget a forward or backward that an exception cut off, and the gradients of its step; then train on.

        After an update in backward was cut off, weights are between two steps; this accepts them as they are.
        """
        self._abandon_forward()
        self._stepper.clear()
        self._guard.cut_off()
        self.optimizer_zero_grad()
        self.micro_steps -= self.micro_steps % self.config.gradient_accumulation_steps

    def forget_step(self) -> None:
        """As `reset`, unless weights have been updated already: then the next call raises."""
        if not self._shutdown.is_over and not self._stepper.is_between_steps:
            self.reset()

    def _abandon_forward(self) -> None:
        self._parts.holding.forget_calls()
        self._pager.abandon_forward()

    def close(self, *, restore_weights: bool = False) -> None:
        """Finish pending updates, then release memory, files and threads. The model's weights go with them.

        Args:
            restore_weights: leave the model as an ordinary one on the compute device, with the trained weights. Without
                it, touching a parameter raises.
        """
        if self._shutdown.is_over:
            return
        with contextlib.ExitStack() as rest:  # in reverse, and each even if the one before fails
            rest.callback(self._shutdown.now)
            rest.callback(self._stepper.gradients.close)
            rest.callback(self._pager.close)
            rest.callback(self._parts.stream.close)
            rest.callback(self._pager.abandon_forward)
            rest.callback(self._vertical.close)
            rest.callback(self._parts.holding.uninstall)
            rest.callback(self._backwards.collector.close)
            rest.callback(self._guard.move_to, Phase.CLOSED)
            if self._guard.phase is Phase.CLOSED:
                pass  # an interrupt has cut off an attempt to close
            elif restore_weights:
                self.flush()
                self._parts.access.restore()
            elif self._guard.is_settled:
                finish_pending(self.flush)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine cannot be copied or pickled, its states lie in scratch files: copy engine.module")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._guard.is_settled:
            self._guard.move_to(Phase.BROKEN)  # whoever leaves by an exception waits for nothing
        surely(self.close)

    # --------------------------------------------------------------------------------------------------------- checking

    def _check_usable(self) -> None:
        self._guard.check_open()
        self._backwards.raise_deferred()
        self._parts.stream.raise_error()
        self._parts.storage.raise_pending()

    def _before_forward(self) -> None:
        self._reporter.begin()
        self._guard.check_settled()
        self._backwards.collect()
