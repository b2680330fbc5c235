"""What a training loop asks of an engine besides its steps: counters, batch sizes, learning rates, a loader.

Knows the config and counters; must not know how anything is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from infinity.config.resolved import InfinityConfig, MonitorsSection
from infinity.distributed.meshes import Mesh
from infinity.distributed.world import world
from infinity.engine.module_facade import ModuleFacade
from infinity.errors import ConfigError, StepError
from infinity.loop.accumulation import Accumulation
from infinity.loop.loader import make_loader
from infinity.monitors import Monitors
from infinity.telemetry import StepReport


def _counter(name: str, text: str) -> Any:
    """An attribute of the engine that its `Accumulation` has."""
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
        counts: Micro-batches and steps, and what is the boundary.
    """

    global_steps: int = _counter("global_steps", "Optimizer steps so far, skipped ones included.")
    micro_steps: int = _counter("micro_steps", "Calls of `step` so far.")
    skipped_steps: int = _counter("skipped_steps", "Steps that changed nothing, because gradients were not finite.")
    global_samples: int = _counter(
        "global_samples",
        "Samples of all steps so far; where the config leaves the batch size open, those that were seen.",
    )

    def __init__(self, module: nn.Module, config: InfinityConfig, mesh: Mesh, counts: Accumulation) -> None:
        """``module``: the model; ``mesh``: who has which part of it; ``counts``: from the first micro-batch on."""
        super().__init__(module)
        self.config = config
        self.global_rank, self.world_size = world().index, world().num
        self._mesh = mesh
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.report: StepReport | None = None
        self.monitor = Monitors(MonitorsSection())
        self.counts = counts
        self._num_saved_steps = 0

    @staticmethod
    def _cure_of_absent(name: str) -> str:
        return ". If it is a name of DeepSpeed's: infinity.deepspeed.initialize makes an engine that has those"

    # ---------------------------------------------------------------------------------------------------- batch sizes

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.counts.num_micro_batches

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per micro-batch, if the config says so."""
        return self.counts.micro_batch_size

    def train_batch_size(self) -> int | None:
        """Samples per step, if the config says so."""
        return self.counts.batch_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last of its step."""
        return self.counts.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next backward is the last of its step, instead of counting; None counts again.

        Raises:
            StepError: with ``managed_gradient_accumulation: false`` every `step` is a boundary.
        """
        self.counts.set_boundary(is_boundary)

    def _check_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            problem = "the engine has no optimizer: it evaluates only"
            cure = (
                'Add "optimizer" to the config, or pass optimizer= to initialize. Where a Trainer has made it, as '
                "DeepSpeed, to evaluate: pass eval_on_start=True in place of evaluate() before train()"
            )
            raise StepError.order(call, problem, cure=cure)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of a ``loss.backward()`` inside stay this process's own until the next one outside, or the step.

        `step`, and another such block, are refused inside, as in DeepSpeed.

        Raises:
            StepError: it is inside such a block already.
        """
        with self.counts.no_sync():
            yield

    # ------------------------------------------------------------------------------------------------------------ others

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group.get("lr", 0.0)) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def get_model_parallel_rank(self) -> int:
        """Which part of the model this process has: by pipeline stages, and in each by tensor ranks. 0: all of it."""
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
            size,
            collate_fn=collate_fn,
            drop_last=self.config.dataloader_drop_last,
            sampler=sampler,
            shuffles=shuffles,
            num_workers=num_workers,
            rank=self._mesh.data.index,
            num_ranks=self._mesh.data.num,
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each block of the model by itself: what is not in memory all at once cannot be one graph.

        Arguments are those of ``torch.compile``.
        """
        self.module.compile(*args, **kwargs)
