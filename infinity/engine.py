"""The engine: one object that a training loop talks to.

Decides when: it turns calls of the user and events of the model into work for pager, gradients and update stream. It
moves no bytes itself.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from infinity.access import StateAccess
from infinity.collector import GradientCollector
from infinity.config import InfinityConfig
from infinity.device import ComputeDevice
from infinity.errors import (
    EngineClosedError,
    GradientNotResidentError,
    NonFiniteLossWarning,
    PartialUpdateError,
    StepOrderError,
)
from infinity.gradients import GradientStore, clip_coefficient, total_norm
from infinity.holding import ModelHolding
from infinity.layout import Chunk, Slot
from infinity.optim import PagedOptimizer, PieceUpdater, Template
from infinity.pager import Pager, in_backward
from infinity.parameter import plain_grad, set_plain_grad
from infinity.plan import Plan
from infinity.residence import Residence
from infinity.step_backend import EngineBackend
from infinity.storage import Storage
from infinity.telemetry.clock import StepClock
from infinity.telemetry.report import StepReport
from infinity.unit import Unit
from infinity.update import GradientSource, UpdateJob, UpdateStream

logger = logging.getLogger(__name__)


class Engine:
    """Trains a model whose states are paged. Made by `infinity.initialize`.

    ``engine(**batch)`` runs the model, ``engine.backward(loss)`` the backward of one micro-batch, ``engine.step()`` the
    optimizer at every gradient accumulation boundary. It is a context manager; leaving it closes it.
    """

    def __init__(self, *, config: InfinityConfig, device: ComputeDevice, holding: ModelHolding, pager: Pager,
                 storage: Storage, gradients: GradientStore, stream: UpdateStream, access: StateAccess,
                 chunks: Sequence[Sequence[Chunk]], group_slots: Sequence[Sequence[tuple[Unit, Slot]]],
                 template: Template, updater: PieceUpdater, plan: Plan, clock: StepClock, updates_in_backward: bool,
                 residence: Residence) -> None:
        """Wired by `infinity.initialize`; not meant to be called otherwise."""
        self.config = config
        self.module: nn.Module = holding.model
        self._device = device
        self._holding = holding
        self._pager = pager
        self._storage = storage
        self._gradients = gradients
        self._stream = stream
        self._access = access
        self._chunks = chunks
        self._group_slots = [list(group) for group in group_slots]
        self._group_of = {(unit.index, slot.index): index
                          for index, group in enumerate(group_slots) for unit, slot in group}
        self._plan = plan
        self._clock = clock
        self._updates_in_backward = updates_in_backward
        self._collector = GradientCollector(holding.units, holding.num_owners(), self._deliver, lambda: self.global_steps)
        self._template = template
        self.optimizer = PagedOptimizer(template, updater, EngineBackend(self))
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None

        self.global_steps = 0
        self.micro_steps = 0
        self.report: StepReport | None = None
        self._in_engine_backward = False
        self._backward_failed = False
        self._in_engine_step = False
        self._has_begun = False
        self._updated: set[int] = set()
        self._waiting: list[tuple[Unit, dict[Slot, torch.Tensor]]] = []
        self._norms: dict[tuple[int, int], torch.Tensor] = {}
        self._groups: list[dict[str, Any]] | None = None
        self._grad_norm: torch.Tensor | None = None
        self._losses: list[torch.Tensor] = []
        self._is_closed = False
        self._residence = residence
        residence.gradients = self
        self._counted = storage.counters()
        self._busy_seconds = 0.0

        pager.check = self._check_usable
        pager.on_forward = self._before_forward
        pager.on_settled_read = self._check_settled
        holding.install(pager, self._collector.note_call, self, self._before_load, self._access.scatter)

    # ------------------------------------------------------------------------------------------------ the training loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Arguments and result are those of ``module.forward``."""
        self._check_usable()
        return self.module(*args, **kwargs)

    forward = __call__

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Backward of one micro-batch: gradients of ``loss / gradient_accumulation_steps`` are accumulated.

        Args:
            loss: scalar tensor with a graph.

        Returns:
            ``loss`` as it was passed.

        Raises:
            StepOrderError: the step before was not finished with `step`.
            LateGradientError: a parameter got a gradient after its update had begun.
        """
        self._check_usable()
        if self._updated:
            raise StepOrderError("engine.backward()", "the weights were already updated in the backward before this one, "
                                 "and engine.step() was not called after it", cure="Call engine.step() after each "
                                 'gradient accumulation boundary, or set "infinity.update": "step"', step=self.global_steps)
        self._check_complete()
        self._finish_plain_backward()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise StepOrderError("engine.backward()", f"the loss must be a tensor with one element, got {shape}",
                                 cure="Reduce it first, e.g. loss.mean()", step=self.global_steps)
        self._note_loss(loss)
        self._in_engine_backward = True
        self._backward_failed = True
        try:
            (loss / self.config.gradient_accumulation_steps).backward()
            self._collector.finish()
            self._deliver_waiting()
            self._backward_failed = False
        finally:
            self._in_engine_backward = False
            self._pager.end_backward(is_complete=not self._backward_failed,
                                     fetches=not self._steps_later())
            if self._backward_failed:
                self._collector.drop()
                self._waiting.clear()
        return loss

    def _steps_later(self) -> bool:
        """Whether all weights are about to change in `step`, so that nothing should be fetched now."""
        return self.is_gradient_accumulation_boundary() and not self._updates_in_backward

    def _note_loss(self, loss: torch.Tensor) -> None:
        detached = loss.detach()
        self._losses.append(detached)
        if detached.device.type == "cpu":
            self._report_non_finite(float(detached))

    def _report_non_finite(self, value: float) -> None:
        if not math.isfinite(value):
            logger.error("the loss of step %d is %s", self.global_steps, value)
            warnings.warn(NonFiniteLossWarning(step=self.global_steps, loss=value), stacklevel=4)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last of its step."""
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    def step(self) -> None:
        """End a micro-batch; at the gradient accumulation boundary, update the weights.

        The update may still run when this returns. Whatever looks at weights or states waits for it.
        """
        self._check_usable()
        self._check_complete()
        if self.is_gradient_accumulation_boundary():
            self._in_engine_step = True
            try:
                self.optimizer.step()  # so that its hooks run, and schedulers see it
            finally:
                self._in_engine_step = False
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.micro_steps += 1

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Run all micro-batches of one step, forward, backward and step.

        Args:
            data_iter: gives one batch per micro-batch; a mapping is passed as keyword arguments, a tuple or list as
                arguments. None: the loader made from ``training_data``.

        Returns:
            The mean of the micro-batches' losses: 0-dim fp32 tensor, detached.
        """
        iterator = data_iter if data_iter is not None else self._own_iterator()
        total: torch.Tensor | None = None
        for _ in range(self.config.gradient_accumulation_steps):
            batch = _move(next(iterator), self._device.torch_device)
            if isinstance(batch, dict) or hasattr(batch, "keys"):
                output = self(**batch)
            elif isinstance(batch, tuple | list):
                output = self(*batch)
            else:
                output = self(batch)
            loss = _loss_of(output)
            value = loss.detach().float()
            total = value if total is None else total + value
            self.backward(loss)
            self.step()
        if total is None:
            raise StepOrderError("engine.train_batch()", "there are no micro-batches", cure="Check the config")
        return total / self.config.gradient_accumulation_steps

    def _own_iterator(self) -> Iterator[Any]:
        if self.training_dataloader is None:
            raise StepOrderError("engine.train_batch()", "there is no data iterator", cure="Pass one, or give "
                                 "training_data to infinity.initialize")
        if getattr(self, "_iterator", None) is None:
            self._iterator = _endless(self.training_dataloader)
        return self._iterator

    def train(self, mode: bool = True) -> Engine:
        """Training mode, as ``module.train``."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Evaluation mode, as ``module.eval``. Pending updates are waited for when their weights are used."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._template.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """2-norm of all gradients of the last step, before clipping; None before the first step."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.config.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per micro-batch, if the config says so."""
        return self.config.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int | None:
        """Samples per step, if the config says so."""
        return self.config.train_batch_size

    def zero_grad(self) -> None:
        """Forget all accumulated gradients."""
        self.optimizer.zero_grad()

    # --------------------------------------------------------------------------------------------- gradients and updates

    def _deliver(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> None:
        """A unit's gradients of this micro-batch are whole (from the collector)."""
        updates_now = self._in_engine_backward and self._updates_in_backward and self.is_gradient_accumulation_boundary()
        if not updates_now:
            self._gradients.add(unit, gradients)
            return
        self._waiting.append((unit, gradients))
        self._deliver_waiting(only_settled=True)

    def _deliver_waiting(self, *, only_settled: bool = False) -> None:
        """Submit the updates of units that no backward needs any more; at the end of backward, of all."""
        still: list[tuple[Unit, dict[Slot, torch.Tensor]]] = []
        waiting, self._waiting = self._waiting, []
        for unit, gradients in waiting:
            if unit.settle() or not only_settled:
                self._update_in_backward(unit, gradients)
            else:
                still.append((unit, gradients))
        self._waiting = still + self._waiting

    def _update_in_backward(self, unit: Unit, gradients: dict[Slot, torch.Tensor]) -> None:
        source = self._gradients.hand_over(unit, gradients, self._norms)
        gradients.clear()
        if self._groups is None:
            self._groups = self._template.snapshots()
        self._submit(unit, source, None)
        self._updated.add(unit.index)

    def _submit(self, unit: Unit, source: GradientSource, coefficient: torch.Tensor | None, *, is_held: bool = False) -> None:
        groups = self._groups if self._groups is not None else self._template.snapshots()
        by_slot = {slot.index: groups[self._group_of[unit.index, slot.index]] for slot in source.slots()}
        job = UpdateJob(unit, self._chunks[unit.index], source, by_slot, coefficient, self._device.mark())
        job.is_held = is_held and job.accepts_buffer
        unit.update = job
        self._stream.submit(job)

    def _apply(self) -> None:
        """The optimizer step, as far as it did not happen in backward."""
        if self._updated:
            # Units that got gradients in earlier micro-batches only were not complete in this one.
            for unit in self._holding.units:
                if self._gradients.slots_with_gradient(unit):
                    self._update_rest(unit)
            self._check_groups_unchanged()
            self._grad_norm = total_norm(self._norms_in_order())
        else:
            for unit in self._holding.units:
                for slot in self._gradients.slots_with_gradient(unit):
                    self._norms[unit.index, slot.index] = self._gradients.norm_of(unit, slot)
            self._grad_norm = total_norm(self._norms_in_order())
            coefficient = None
            if self.config.gradient_clipping > 0:
                coefficient = clip_coefficient(self._grad_norm, self.config.gradient_clipping)
            self._groups = self._template.snapshots()
            for index in self._pager.forward_order():
                unit = self._holding.units[index]
                if self._gradients.slots_with_gradient(unit):
                    self._pager.prepare_update(unit)
                    self._submit(unit, self._gradients.source(unit), coefficient, is_held=self._pager.fills)
            self._pager.pump()
        self._norms.clear()
        self._groups = None
        self._updated.clear()

    def _update_rest(self, unit: Unit) -> None:
        for slot in self._gradients.slots_with_gradient(unit):
            self._norms[unit.index, slot.index] = self._gradients.norm_of(unit, slot)
        self._pager.prepare_update(unit)
        self._submit(unit, self._gradients.source(unit), None)

    def _norms_in_order(self) -> list[torch.Tensor]:
        return [self._norms[unit.index, slot.index] for group in self._group_slots for unit, slot in group
                if (unit.index, slot.index) in self._norms]

    def _check_groups_unchanged(self) -> None:
        before, now = self._groups, self._template.snapshots()
        if before is not None and not _equal(before, now):
            changed = sorted({key for a, b in zip(before, now, strict=False) for key in {*a, *b} if not _equal(a.get(key), b.get(key))})
            raise PartialUpdateError(
                step=self.global_steps, num_updated=len(self._updated), num_units=len(self._holding.units),
                problem=f"the optimizer's {', '.join(changed)} changed between engine.backward() and engine.step()",
            )

    def _finish_plain_backward(self) -> None:
        """Collect what a ``loss.backward()`` of the user left."""
        if self._collector.has_fired and not in_backward() and not self._in_engine_backward:
            self._collector.finish()
            self._pager.end_backward(is_complete=True, fetches=False)

    # ------------------------------------------------------------------------------------- what the optimizer asks for

    def optimizer_step(self) -> None:
        """``optimizer.step()``, called by `step` or by a plain loop: the gradients that are there are the step's."""
        self._check_usable()
        self._check_complete()
        if self._updated and not self._in_engine_step:
            raise StepOrderError("optimizer.step()", "the update already ran in engine.backward()",
                                 cure="Call engine.step() with engine.backward(), or optimizer.step() with loss.backward()",
                                 step=self.global_steps)
        self._finish_plain_backward()
        self._apply()
        self.global_steps += 1
        self._make_report()

    def optimizer_zero_grad(self) -> None:
        """``optimizer.zero_grad()``: forget all gradients."""
        if self._updated:
            raise PartialUpdateError(step=self.global_steps, num_updated=len(self._updated),
                                     num_units=len(self._holding.units),
                                     problem="gradients were dropped before engine.step()")
        self._collector.drop()
        self._gradients.clear()
        self._norms.clear()
        self._losses.clear()
        self._backward_failed = False

    def has_state(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has optimizer state. Costs nothing, and waits for no pending update."""
        return self._access.has_state(parameter)

    def gather_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of a parameter's optimizer state, as torch keeps it."""
        self.flush()
        return self._access.state(parameter)

    def load_state(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        """Replace a parameter's optimizer state."""
        self.flush()
        self._access.load_state(parameter, values)

    # --------------------------------------------------------------------------------------- what parameters ask for

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What ``parameter.grad`` gives: the main gradient (fp32, live), None without one."""
        unit, slot = self._holding.locate(parameter)
        if self._is_closed or not slot.spec.is_trainable or in_backward():
            return plain_grad(parameter)
        self._finish_plain_backward()
        if (unit.index, slot.index) in self._norms and self._updated:
            raise GradientNotResidentError(
                slot.spec.fqn, reason="its unit was updated in backward, and the gradient was used up",
                cure='Set "infinity.update": "step" to see gradients between backward and step',
            )
        if slot in self._gradients.slots_with_gradient(unit):
            if self._gradients.is_spilled(unit):
                raise GradientNotResidentError(
                    slot.spec.fqn, reason="it is spilled to NVMe",
                    cure="Set gradient_clipping in the config instead of clipping by hand, call optimizer.zero_grad() "
                    "instead of model.zero_grad(), or raise infinity.host_memory_budget",
                )
            return self._gradients.gradient_of(unit, slot)
        return plain_grad(parameter)

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """What assigning ``parameter.grad`` does."""
        unit, slot = self._holding.locate(parameter)
        if self._is_closed or not slot.spec.is_trainable or in_backward():
            set_plain_grad(parameter, gradient)
            return
        self._finish_plain_backward()
        self._pager.await_update(unit)
        set_plain_grad(parameter, None)
        if gradient is not None and gradient.shape != slot.spec.shape:
            raise ValueError(f"gradient of '{slot.spec.fqn}' must have shape {slot.spec.shape}, got {tuple(gradient.shape)}")
        if gradient is not None and self._gradients.is_spilled(unit):
            raise GradientNotResidentError(slot.spec.fqn, reason="gradients of its unit are spilled to NVMe and cannot be set",
                                           cure="Raise infinity.host_memory_budget")
        self._gradients.set_gradient(unit, slot, gradient)

    # ------------------------------------------------------------------------------------------------- weights and state

    def flush(self) -> None:
        """Return when all pending updates and writes are done; raises what went wrong in them."""
        self._check_usable()
        self._check_settled()
        self._drain()

    def _drain(self) -> None:
        with self._clock.waiting("update"):
            self._stream.drain()
        with self._clock.waiting("write"):
            self._storage.flush()
        self._pager.collect_all()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Copies of the main weight ("weight": fp32, the parameter's shape, CPU) and the optimizer's state of a parameter."""
        self.flush()
        return {"weight": self._access.main_weight(parameter), **self._access.state(parameter)}

    def gather(self, parameters: Sequence[nn.Parameter]) -> Any:
        """Make the parameters hold their full weights until `scatter`. See `infinity.GatheredParameters`."""
        self.flush()
        return self._access.gather(parameters)

    def scatter(self, gathering: Any) -> None:
        """The counterpart of `gather`: store what was changed."""
        self._access.scatter(gathering)

    def _before_load(self, parameters: list[nn.Parameter]) -> Any:
        return self.gather(parameters)

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> None:
        """Write the trained weights (compute dtype) and buffers as sharded safetensors, in bounded memory.

        The directory gets shards, ``model.safetensors.index.json`` and, for a Hugging Face model, its config:
        ``from_pretrained(save_dir)`` loads it, and so does plain torch, shard by shard.

        Args:
            save_dir: directory; made if missing.
            save_filename: name of which the shards' names are made.
        """
        from infinity.export import save_safetensors

        self.flush()
        save_safetensors(self._holding, self._pager, Path(save_dir), save_filename)

    # ------------------------------------------------------------------------------------------------------- life cycle

    @property
    def plan(self) -> Plan:
        """What rests where and what a step moves; predictions follow the recorded trace."""
        return self._storage.replan(self._plan, self._pager.training_trace)

    @property
    def waiting_for(self) -> str:
        """What the training thread waits for right now; empty while it computes."""
        return self._clock.waiting_for

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self._device.torch_device

    def reset(self) -> None:
        """Forget a forward or backward that an exception cut off, and its gradients; then train on.

        After an update in backward was cut off, weights are between two steps; this accepts them as they are.
        """
        self._updated.clear()
        self._groups = None
        self._waiting.clear()
        self._holding.forget_calls()
        self._pager.abandon_forward()
        self.optimizer_zero_grad()
        self.micro_steps -= self.micro_steps % self.config.gradient_accumulation_steps

    def close(self, *, restore_weights: bool = False) -> None:
        """Release memory, files and threads. The model's weights go with them, unless ``restore_weights`` brings them back.

        Args:
            restore_weights: leave the model as an ordinary one in host memory, with the trained weights. Without it,
                touching a parameter raises.
        """
        if self._is_closed:
            return
        try:
            if restore_weights:
                self.flush()
                copies = [[self._pager.copy_of(unit, slot) for slot in unit.layout.slots] for unit in self._holding.units]
                self._collector.close()
                self._holding.release()
                for unit, values in zip(self._holding.units, copies, strict=True):
                    for parameter, value in zip(unit.parameters, values, strict=True):
                        parameter.data = value
        finally:
            self._is_closed = True
            self._collector.close()
            self._holding.uninstall()
            self._pager.abandon_forward()
            self._stream.close()
            self._pager.close()
            self._gradients.close()
            self._storage.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------------- checking

    def _check_usable(self) -> None:
        if self._is_closed:
            raise EngineClosedError("this call")
        self._stream.raise_error()
        self._storage.raise_pending()

    def _check_settled(self) -> None:
        if self._updated or self._waiting:
            raise StepOrderError("reading weights", "some of them were already updated in backward, and engine.step() has "
                                 "not been called", cure='Call engine.step() first, or set "infinity.update": "step"',
                                 step=self.global_steps)

    def _check_complete(self) -> None:
        if self._backward_failed:
            if self._updated:
                raise PartialUpdateError(step=self.global_steps, num_updated=len(self._updated),
                                         num_units=len(self._holding.units), problem="backward was cut off by an exception")
            raise StepOrderError("engine", "the last backward was cut off by an exception, its gradients are not whole",
                                 cure="Call engine.reset() to drop them, then train on", step=self.global_steps)

    def _before_forward(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._clock.reset()
            self._counted = self._storage.counters()
        if self._updated:
            raise StepOrderError("forward", "the weights were updated in engine.backward(), and engine.step() was not called "
                                 "after it", cure='Call engine.step() after engine.backward(), or set "infinity.update": "step"',
                                 step=self.global_steps)
        self._finish_plain_backward()

    def _make_report(self) -> None:
        waited = dict(self._clock.waited_seconds)
        seconds = self._clock.reset()
        counted = self._storage.counters()
        busy = self._stream.busy_seconds
        plan = self.plan
        losses = [float(loss) for loss in self._losses]
        self._losses.clear()
        if self._device.torch_device.type != "cpu":
            for value in losses:
                self._report_non_finite(value)
        self.report = StepReport(
            step=self.global_steps, seconds=seconds, compute_seconds=seconds - sum(waited.values()),
            read_wait_seconds=waited["read"], update_wait_seconds=waited["update"] + waited["gradients"],
            optimizer_seconds=busy - self._busy_seconds,
            read_bytes=counted[0] - self._counted[0], write_bytes=counted[1] - self._counted[1],
            predicted_read_bytes=plan.predicted_read_bytes_per_step, predicted_write_bytes=plan.predicted_write_bytes_per_step,
            loss=sum(losses) / len(losses) if losses else None,
            grad_norm=self.get_global_grad_norm(),
        )
        self._counted, self._busy_seconds = counted, busy
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            logger.info("step %d: loss %s, %.2f s, lr %s", self.global_steps, self.report.loss, seconds, self.get_lr())
        if self.config.wall_clock_breakdown:
            logger.info("step %d: %s", self.global_steps, self.report)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _loss_of(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None:
        loss = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(loss, torch.Tensor):
        raise StepOrderError("engine.train_batch()", f"the model returned no loss but {type(output).__name__}",
                             cure='Return a scalar tensor, an object with ".loss", or a tuple that begins with the loss')
    return loss


def _move(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_move(value, device) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
