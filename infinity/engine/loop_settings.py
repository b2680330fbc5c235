"""Methods of the engine around the training loop: counters, batch sizes, learning rates, reports, a loader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from infinity.distributed.world import world
from infinity.engine.module_facade import ModuleFacade
from infinity.engine.parts import Parts
from infinity.engine.run_notes import RunNotes
from infinity.errors import ConfigError, StepError
from infinity.gradients.loss_scaler import LossScaler
from infinity.loop.loader import make_loader
from infinity.metrics import StepReport
from infinity.metrics.monitors import Monitors
from infinity.plan.plan import Plan
from infinity.vertical.schedule import VerticalSchedule

NO_COMM_HOOKS = (
    ': communication hooks are not supported. "communication_data_type": "bf16" halves the bytes of gradients'
)
"""End of the error for DDP's method ``register_comm_hook``."""


def _counter(name: str, text: str) -> Any:
    """A property that reads and writes this attribute of ``self.counts``."""
    return property(
        lambda self: getattr(self.counts, name), lambda self, value: setattr(self.counts, name, value), doc=text
    )


class LoopSettings(ModuleFacade):
    """Part of the engine.

    Attributes:
        config: As `infinity.load_config` gives it.
        global_rank: This process among all that train together.
        world_size: How many train together.
        monitor: Writes curves where the config says, the script's own as well: ``monitor.write_events``.
        counts: Micro-batches and steps, and the boundary.
    """

    global_steps: int = _counter("global_steps", "Optimizer steps so far, skipped ones included.")
    micro_steps: int = _counter("micro_steps", "Calls of `step` so far.")
    skipped_steps: int = _counter("skipped_steps", "Steps that changed nothing, because gradients were not finite.")
    global_samples: int = _counter(
        "global_samples", "Samples of all steps so far, by the config's batch size, or else as the engine saw them."
    )

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.parameter_map.model)
        self.config = parts.config
        self.global_rank, self.world_size = world().index, world().num
        self._mesh = parts.mesh
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.report: StepReport | None = None
        # Both write nowhere until `Engine.begin_run` puts the real ones in their place.
        self.monitor = Monitors({})
        self.counts = parts.counts
        # `close` compares it with `global_steps`, and warns of weights that nobody has saved.
        self._num_saved_steps = 0
        self._was_applied = False
        self._notes = RunNotes(None)

    def _connect(self, parts: Parts) -> None:
        """Use these parts: in the constructor, and again after a relayout."""
        self._parts = parts
        self._guard = parts.guard
        self._stepper = parts.stepper
        self._vertical = VerticalSchedule(parts.vertical)

    @staticmethod
    def _cure_of_absent(name: str) -> str:
        if name == "register_comm_hook":
            return NO_COMM_HOOKS
        return ". If it is a name of DeepSpeed's: infinity.deepspeed.initialize makes an engine that has those"

    # ---------------------------------------------------------------------------------------------------- batch sizes

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.counts.num_micro_batches

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per micro-batch; None if the config does not set it."""
        return self.counts.micro_batch_size

    def train_batch_size(self) -> int | None:
        """Samples per step; None if the config does not set it."""
        return self.counts.batch_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last of its step."""
        return self.counts.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next backward is the last of its step, instead of counting; None counts again.

        Raises:
            StepError: with ``managed_gradient_accumulation: false`` every `step` is a boundary.
        """
        self.counts.set_boundary(is_boundary)

    def _check_usable(self) -> None:
        self._parts.coordinator.preconditions.check_usable()

    def _check_may_step(self, call: str) -> None:
        self._check_usable()
        if self._parts.coordinator.num_gathered:
            problem = "weights are gathered, and a step would change them"
            raise StepError.order(call, problem, cure="Call it outside the GatheredParameters block")

    def _check_optimizer(self, call: str) -> None:
        self._check_may_step(call)
        if self.optimizer is None:
            problem = "the engine has no optimizer: it evaluates only"
            cure = (
                'Add "optimizer" to the config, or pass optimizer= to initialize. Where a Trainer has made it, as '
                "DeepSpeed, to evaluate: pass eval_on_start=True in place of evaluate() before train()"
            )
            raise StepError.order(call, problem, cure=cure)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, ``loss.backward()`` does not average gradients with other processes: the next backward outside, or the
        step, does.

        `step`, and another such block, are refused inside, as in DeepSpeed.

        Raises:
            StepError: it is inside such a block already.
        """
        return self.counts.no_sync()

    # --------------------------------------------------------------------------------------------------- what it shows

    def flush(self) -> None:
        """Wait for all pending updates and writes, and raise their errors.

        In a durable run the last step is committed when this returns.
        """
        self._parts.consistent.flush()

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed weights.

        False off the gradient accumulation boundary, and if gradients were not finite and the config checks that.
        """
        return self._was_applied

    def was_step_skipped(self) -> bool:
        """Whether the last update changed nothing, because its gradients were not finite."""
        return self._stepper.is_skipped

    def loss_scale(self) -> float:
        """Factor of the next loss; 1 unless the compute dtype is fp16."""
        return self._stepper.scaler.scale

    def loss_scaler(self) -> LossScaler:
        """The loss scale and its rule."""
        return self._stepper.scaler

    def get_global_grad_norm(self) -> float | None:
        """2-norm of all gradients of the last step that was not skipped, before clipping; None before the first one."""
        norm = self._stepper.applied_norm
        return None if norm is None else float(norm)

    @property
    def plan(self) -> Plan:
        """Where weights and states are stored, and what a step moves. Predictions follow the recorded prefetch
        schedule."""
        return self._parts.plan_tracker.plan(
            self._parts.coordinator.parameter_cache.training_schedule, self._vertical.traffic
        )

    def note(self, text: str) -> None:
        """Write a line of your own into the log of the run (config key ``infinity.run_log``), at the present step.

        `infinity report` marks it. Without a log, the line is in Python's logging only.
        """
        self._notes.note("note", self.global_steps, str(text))

    @property
    def waiting_for(self) -> str:
        """What the training thread waits for right now; empty while it computes."""
        return self._parts.clock.waiting_for

    def save_timeline(self, path: str | Path) -> None:
        """Write the timeline so far as a trace for ui.perfetto.dev. The config key is `infinity.timeline`."""
        self._parts.reporter.save_timeline(Path(path))

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self._parts.device.torch_device

    # ------------------------------------------------------------------------------------------------------------ others

    def train(self, mode: bool = True) -> Self:
        """Set training mode, as ``module.train``."""
        if not mode and self._guard.is_consistent:
            self.flush()
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode, as ``module.eval``. Pending updates are finished first."""
        return self.train(False)

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group.get("lr", 0.0)) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def get_model_parallel_rank(self) -> int:
        """Number of this process's part of the model: by pipeline stage, then by tensor rank. 0 if it has the whole
        model."""
        return self._mesh.part

    def data_loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffles: bool = True,
        sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
    ) -> DataLoader[Any]:
        """A loader as ``training_data=`` of `infinity.initialize` makes it, with this rank's part of the data.

        Args:
            dataset: with length and items, or an `IterableDataset`.
            batch_size: samples per batch; None: the config's micro-batch.
            shuffles: by a generator of its own with seed 0, in the same way in each epoch, unless
                ``loader.data_sampler.set_epoch(epoch)`` is called, as DeepSpeed does. False keeps the data set's order.
            sampler: the order instead.
            collate_fn: makes a batch of samples.
            num_workers: processes that read.

        Raises:
            ConfigError: neither ``batch_size`` nor the config says how many samples.
        """
        size = batch_size or self.counts.micro_batch_size
        if size is None:
            raise ConfigError.of_batch(
                "a loader needs a batch size, and the config leaves it open",
                cure='Set "train_micro_batch_size_per_gpu", or pass batch_size=',
                key="train_micro_batch_size_per_gpu",
            )
        return make_loader(
            dataset,
            shuffles=shuffles,
            rank=self._mesh.data.index,
            num_ranks=self._mesh.data.num,
            sampler=sampler,
            batch_size=size,
            collate_fn=collate_fn,
            drop_last=self.config.dataloader_drop_last,
            num_workers=num_workers,
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each block of the model by itself. One graph would need all weights in memory at once.

        Arguments are those of ``torch.compile``.
        """
        self.module.compile(*args, **kwargs)
