"""What DeepSpeed's engine answers, by the names that scripts for it use: sizes, ranks, and what the config says.

Knows the config and counters; must not know how anything is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from infinity.compat.constants import DEEPSPEED_OPTIMIZERS
from infinity.compat.timers import ThroughputTimer, Timers
from infinity.config import InfinityConfig, MonitorsSection
from infinity.distributed.meshes import Mesh
from infinity.distributed.process_groups import local_rank
from infinity.distributed.world import world
from infinity.engine.module_facade import ModuleFacade
from infinity.errors import BatchSizeError, StepOrderError
from infinity.loop.loader import make_loader
from infinity.monitors import Monitors
from infinity.telemetry import StepReport

_ABSENT = {
    "flops_profiler": "set flops_profiler.enabled to true in the config, or call infinity.get_model_profile(model, ...)",
    "allreduce_gradients": "backward and step average gradients, where several processes train together",
}
"""What scripts ask for, that is not there, and the cure."""


class DeepSpeedNames(ModuleFacade):
    """Batch sizes are the config's until they are set.

    Attributes:
        global_rank, local_rank: This process among all that train together, and among those of its machine.
        world_size: How many train together.
        dp_world_size, mp_world_size: How many have the same part of the model as this one, each with its own data, and how many
            parts there are: 1, unless the script says so (``mpu``, ``mesh_param``).
        mpu: As passed to `initialize`.
        global_steps: Optimizer steps so far, skipped ones included.
        micro_steps: Calls of `step` so far.
        skipped_steps: Steps that changed nothing, because gradients were not finite.
        client_optimizer, client_lr_scheduler, training_data, collate_fn: As passed to `initialize`.
        timers: Stop watches for the script.
        tput_timer: Counts epochs if the script tells it, and knows the samples per second of the last step.
        monitor: Writes curves where the config says, the script's own as well: ``monitor.write_events``.
        global_samples: Samples of all steps so far; where the config leaves the batch size to the data loader, those that the
            engine saw.
    """

    seq_parallel_group = None
    has_moe_layers = False
    is_compiled = False
    sparse_tensor_module_names: frozenset[str] = frozenset()

    def __init__(self, module: nn.Module, config: InfinityConfig, mesh: Mesh) -> None:
        """``module``: the model; ``config``: as `infinity.load_config` gives it; ``mesh``: who has which part of the model."""
        super().__init__(module)
        self.config = config
        self.global_rank, self.local_rank = world().index, local_rank()
        self.world_size = world().num
        self.dp_world_size, self.mp_world_size, self.mpu = mesh.data.num, mesh.parts.num, mesh.source
        self._mesh = mesh
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.training_data: Any = None
        self.collate_fn: Callable[[Any], Any] | None = None
        self.client_optimizer: Any = None
        self.client_lr_scheduler: Any = None
        self.report: StepReport | None = None
        self.timers = Timers()
        self.tput_timer = ThroughputTimer(self._samples_per_second)
        self.monitor = Monitors(MonitorsSection())
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.global_samples = 0
        self._num_saved_steps = 0
        self._train_batch_size = config.train_batch_size
        self._micro_batch_size = config.train_micro_batch_size_per_gpu
        self._accumulation_steps = config.gradient_accumulation_steps
        self._boundary: bool | None = None
        self._is_in_step = False
        self._is_in_no_sync = False
        self._num_backwards = 0

    def note_arguments(
        self, optimizer: Any, lr_scheduler: Any, training_data: Any, collate_fn: Callable[[Any], Any] | None
    ) -> None:
        """What was passed to `initialize`."""
        self.client_optimizer, self.client_lr_scheduler = optimizer, lr_scheduler
        self.training_data, self.collate_fn = training_data, collate_fn

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in _ABSENT:
                raise AttributeError(f"{error}: {_ABSENT[name]}", name=name, obj=self) from None
            raise

    # ---------------------------------------------------------------------------------------------------- batch sizes

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self._accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per micro-batch, if the config says so."""
        return self._micro_batch_size

    def train_batch_size(self) -> int | None:
        """Samples per step, if the config says so."""
        return self._train_batch_size

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Samples per step, samples per micro-batch, micro-batches per step."""
        return self._train_batch_size, self._micro_batch_size, self._accumulation_steps

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Micro-batches per step from now on.

        Raises:
            BatchSizeError: fewer than one.
            StepOrderError: the present step has begun.
        """
        if steps < 1:
            raise BatchSizeError(f"{steps!r} micro-batches per step", cure="Take a whole number from 1 on")
        if self._boundary is None and self.config.managed_gradient_accumulation and self.is_in_accumulation():
            raise StepOrderError(
                "setting the accumulation steps",
                "some micro-batches of the present step have passed",
                cure="Set them after the engine.step() that ends a step",
                step=self.global_steps,
            )
        self._accumulation_steps = steps
        if self._micro_batch_size is not None:
            self._train_batch_size = self._micro_batch_size * steps * self.dp_world_size
        self.micro_steps = 0 if self.micro_steps % steps else self.micro_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Samples per step from now on, in micro-batches of the same size.

        Raises:
            BatchSizeError: it is no multiple of the micro-batch.
        """
        micro = self._micro_batch_size
        per_round = (micro or 1) * self.dp_world_size
        if micro is None or train_batch_size % per_round or train_batch_size < per_round:
            problem = (
                f"a batch of {train_batch_size} cannot be divided into micro-batches of {micro or 'unknown'} samples"
                + (f" on {self.dp_world_size} processes" if self.dp_world_size > 1 else "")
            )
            raise BatchSizeError(problem, cure='Take a multiple of "train_micro_batch_size_per_gpu"')
        self.set_gradient_accumulation_steps(train_batch_size // per_round)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Samples per micro-batch from now on; the number of micro-batches stays."""
        self._micro_batch_size = micro_batch_size
        self._train_batch_size = micro_batch_size * self._accumulation_steps * self.dp_world_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        if not self.config.managed_gradient_accumulation:
            return self._is_in_step
        return (self.micro_steps + 1) % self._accumulation_steps == 0

    def is_in_accumulation(self) -> bool:
        """Whether some, but not all, micro-batches of the present step have passed."""
        return self.micro_steps % self._accumulation_steps != 0

    def _begin_accumulation(self) -> None:
        """The micro-batches of the present step that have passed are not counted."""
        self.micro_steps -= self.micro_steps % self._accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next backward is the last of its step, instead of counting; None counts again.

        Raises:
            StepOrderError: with ``managed_gradient_accumulation: false`` every `step` is a boundary.
        """
        if not self.config.managed_gradient_accumulation:
            raise StepOrderError(
                "engine.set_gradient_accumulation_boundary()",
                "the config says that every engine.step() is a boundary",
                cure='Remove "managed_gradient_accumulation": false',
                step=self.global_steps,
            )
        self._boundary = is_boundary
        if is_boundary is None:
            self._begin_accumulation()

    def _count_samples(self, num_seen: int | None) -> None:
        """A step has ended: count its samples, where the engine does not count micro-batches those of its backwards.

        ``num_seen``: counts where the config leaves their number open.
        """
        if self.config.managed_gradient_accumulation:
            num_samples = self._train_batch_size
        else:
            num_samples = (self._micro_batch_size or 0) * self.dp_world_size * (self._num_backwards or 1)
        self.global_samples += num_samples or num_seen or 0
        self._num_backwards = 0

    def _check_counts(self, call: str) -> None:
        """Raise if micro-batches are not counted, for a call that takes a whole step of them."""
        if self._boundary is not None:
            problem, cure = "the boundary is set by hand", "Call engine.set_gradient_accumulation_boundary(None) before"
        elif not self.config.managed_gradient_accumulation and self._accumulation_steps > 1:
            problem, cure = "every engine.step() is a boundary", 'Remove "managed_gradient_accumulation": false'
        else:
            return
        raise StepOrderError(call, problem, cure=cure, step=self.global_steps)

    def _check_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            problem = "the engine has no optimizer: it evaluates only"
            cure = (
                'Add "optimizer" to the config, or pass optimizer= to initialize. Where a Trainer has made it, as '
                "DeepSpeed, to evaluate: pass eval_on_start=True in place of evaluate() before train()"
            )
            raise StepOrderError(call, problem, cure=cure)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of a ``loss.backward()`` inside stay this process's own until the next one outside, or the step.

        `step`, and another such block, are refused inside, as in DeepSpeed.

        Raises:
            StepOrderError: it is inside such a block already.
        """
        if self._is_in_no_sync:
            problem = "no_sync context manager reentry is unsupported"
            raise StepOrderError("engine.no_sync()", problem, cure="One block around all of it does the same")
        self._is_in_no_sync = True
        try:
            yield
        finally:
            self._is_in_no_sync = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Gradients of all backwards inside are averaged over the processes once, by the `step` after it.

        It is `no_sync`, with any ZeRO stage but 0.

        Raises:
            StepOrderError: as `no_sync`; or every `step` is a boundary by the config.
            NotImplementedError: without ZeRO, as in DeepSpeed.
        """
        if not self.config.managed_gradient_accumulation:
            problem = "it is not supported with managed_gradient_accumulation=False"
            raise StepOrderError("engine.coalesce_grad_reduction()", problem, cure="Use engine.no_sync()")
        if self.config.zero_stage == 0:
            raise NotImplementedError(
                "coalesce_grad_reduction requires ZeRO stage 1/2/3, got stage 0. Use engine.no_sync()"
            )
        if self._is_in_no_sync:
            problem = "it cannot be nested inside another no_sync context"
            raise StepOrderError(
                "engine.coalesce_grad_reduction()", problem, cure="One block around all of it suffices"
            )
        with self.no_sync():
            yield

    # ------------------------------------------------------------------------------------------------------ the config

    def zero_optimization_stage(self) -> int:
        """The stage of the config: what several processes divide. One process runs all stages in the same way."""
        return self.config.zero_stage

    def zero_optimization(self) -> bool:
        """Whether the stage is above 0."""
        return self.config.zero_stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether the stage is at least 2."""
        return self.config.zero_stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the stage is 3."""
        return self.config.zero_stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: whole weights are always saved."""
        return True

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states rest in host memory."""
        return self.config.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer states rest on NVMe."""
        return self.config.offload_optimizer.device == "nvme"

    def fp16_enabled(self) -> bool:
        """Whether the compute dtype is fp16."""
        return self.config.compute_dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the compute dtype is bf16."""
        return self.config.compute_dtype == torch.bfloat16

    def amp_enabled(self) -> bool:
        """False: there is no Apex."""
        return False

    def torch_autocast_enabled(self) -> bool:
        """Whether the model runs under ``torch.autocast``."""
        return self.config.autocast_dtype is not None

    def torch_autocast_dtype(self) -> torch.dtype:
        """Of ``torch.autocast``; bf16 without."""
        return self.config.autocast_dtype or torch.bfloat16

    def gradient_clipping(self) -> float:
        """Largest global norm; 0 for no clipping."""
        return self.config.gradient_clipping

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the steps."""
        scaling = self.config.loss_scaling
        return scaling is not None and scaling.is_dynamic

    def initial_dynamic_scale(self) -> float:
        """The loss scale of the first step; 1 without scaling."""
        scaling = self.config.loss_scaling
        return 1.0 if scaling is None else scaling.initial

    def optimizer_name(self) -> str | None:
        """The class of an optimizer that was passed; else its type in the config, in small letters if DeepSpeed knows it.

        None if there is neither.
        """
        if self.client_optimizer is not None:
            named = self.client_optimizer if callable(self.client_optimizer) else type(self.client_optimizer)
            return str(getattr(named, "__name__", type(named).__name__))
        if self.config.optimizer is None:
            return None
        name = self.config.optimizer.type
        return name.lower() if name.lower() in DEEPSPEED_OPTIMIZERS else name

    def optimizer_params(self) -> dict[str, Any] | None:
        """A copy of the optimizer's parameters in the config."""
        return None if self.config.optimizer is None else dict(self.config.optimizer.params)

    def scheduler_name(self) -> str | None:
        """The schedule's type in the config; None if it names none."""
        return None if self.config.scheduler is None else self.config.scheduler.type

    def scheduler_params(self) -> dict[str, Any] | None:
        """A copy of the schedule's parameters in the config."""
        return None if self.config.scheduler is None else dict(self.config.scheduler.params)

    def steps_per_print(self) -> int | None:
        """A progress line every so many steps."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the time of each step is logged."""
        return self.config.wall_clock_breakdown

    def dataloader_drop_last(self) -> bool:
        """Whether the loader drops the last, smaller batch."""
        return self.config.dataloader_drop_last

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches."""
        return self.config.managed_gradient_accumulation

    # ----------------------------------------------------------------------------------------------- the optimizer's groups

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(value) for value in self._of_groups("lr")]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self._groups():
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Momentum of each parameter group, or its betas."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """What each parameter group has as ``type``; 0 without."""
        return self._of_groups("type")

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _of_groups(self, key: str) -> list[Any]:
        return [group.get(key, 0.0) for group in self._groups()]

    # ---------------------------------------------------------------------------------------------------------- weights

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """As ``state_dict``, without frozen parameters if that is asked for."""
        found: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(prefix=prefix.rstrip("."), remove_duplicate=False):
                if not parameter.requires_grad:
                    found.pop(name, None)
        return found

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """As `module_state_dict`; accelerate and transformers ask for it by this name."""
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None, **_: Any
    ) -> None:
        """Load weights: a state dict, or a mapping that has it as "module".

        Args:
            checkpoint: what to load.
            strict: whether all names have to match.
            custom_load_fn: called with ``src`` and ``dst`` instead.
        """
        inner = checkpoint.get("module")
        weights = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=weights, dst=self.module)
        else:
            self.module.load_state_dict(weights, strict=strict)

    # ------------------------------------------------------------------------------------------------------------ others

    @property
    def basic_optimizer(self) -> Any:
        """As ``optimizer.optimizer``; None without."""
        return None if self.optimizer is None else self.optimizer.optimizer

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader over a data set.

        Args:
            dataset: with length and items, or an `IterableDataset`.
            batch_size: samples per batch; None: the config's micro-batch.
            route: "train" shuffles as DeepSpeed does: by a generator of its own with seed 0, in the same way in each epoch
                unless ``loader.data_sampler.set_epoch(epoch)`` is called. "eval" and "predict" keep the data set's order.
            pin_memory: taken as DeepSpeed takes it, without effect.
            data_sampler: the order instead.
            collate_fn: None: the one of `initialize`.
            num_local_io_workers: processes that read. None: none, where DeepSpeed takes two for each GPU.

        Raises:
            BatchSizeError: neither ``batch_size`` nor the config says how many samples.
        """
        size = batch_size or self._micro_batch_size
        if size is None:
            raise BatchSizeError(
                "a loader needs a batch size, and the config leaves it open",
                cure='Set "train_micro_batch_size_per_gpu", or pass batch_size=',
                key="train_micro_batch_size_per_gpu",
            )
        return make_loader(
            dataset,
            size,
            collate_fn=collate_fn or self.collate_fn,
            drop_last=self.config.dataloader_drop_last,
            sampler=data_sampler,
            shuffles=route == "train",
            num_workers=num_local_io_workers or 0,
            rank=self._mesh.data.index,
            num_ranks=self.dp_world_size,
        )

    def flush(self) -> None:
        """Return when all pending updates and writes are done; see the engine."""
        raise NotImplementedError

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Finish pending updates. States rest where the config says, whatever is asked for here; budgets say how much."""
        self.flush()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Nothing to do: what is needed is fetched when it is needed."""

    def empty_partition_cache(self) -> None:
        """Finish pending updates; what is kept in memory is within the budgets."""
        self.flush()

    def _samples_per_second(self) -> float | None:
        if self.report is None or self.report.num_samples is None or not self.report.seconds:
            return None
        return self.report.num_samples / self.report.seconds

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of each of `timers`."""
        return {name: timer.elapsed(reset=False) for name, timer in self.timers.get_timers().items()}

    def flops_profiler_enabled(self) -> bool:
        """Whether a step's operations are counted and printed."""
        return self.config.flops_profiler is not None

    def get_sequence_parallel_group(self) -> None:
        """None: each process has whole sequences."""

    def get_data_parallel_rank(self) -> int:
        """This process among those that have the same part of the model, each with its own data."""
        return self._mesh.data.index

    def get_model_parallel_rank(self) -> int:
        """Which part of the model this process has: by pipeline stages, and in each by tensor ranks. 0: all of it."""
        return self._mesh.part

    def get_tensor_parallel_rank(self) -> int:
        """Which part of the tensors of its stage this process has."""
        return self._mesh.place.tensor

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile each block of the model by itself: what is not in memory all at once cannot be one graph.

        Args:
            backend, compile_kwargs: for ``torch.compile``.
            schedule, compiled_autograd_enabled: taken as DeepSpeed takes them, without effect.
        """
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True
