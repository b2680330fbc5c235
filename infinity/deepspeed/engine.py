"""`DeepSpeedEngine`: the engine with the further attributes and methods of DeepSpeed's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from infinity.checkpoint.part_folders import folder_of
from infinity.deepspeed.contents.config import DeepSpeedConfig
from infinity.deepspeed.contents.fp32_weights import write_script
from infinity.deepspeed.contents.names import TABLE
from infinity.deepspeed.contents.timers import ThroughputTimer, Timers
from infinity.distributed.agreement import gather_results
from infinity.distributed.process_groups import local_rank
from infinity.engine.checkpoint_calls import check_directory
from infinity.engine.engine import Engine
from infinity.engine.loop_settings import NO_COMM_HOOKS
from infinity.engine.parts import Parts
from infinity.errors import StepError

logger = logging.getLogger(__name__)
_ABSENT = {
    "flops_profiler": ": count with torch.utils.flop_counter.FlopCounterMode around engine(...)",
    "register_comm_hook": NO_COMM_HOOKS,
    "allreduce_gradients": ": backward and step average gradients, where several processes train together",
}
"""Attributes of DeepSpeed's engine that this one lacks -> what to use instead."""


class DeepSpeedEngine(Engine):
    """Made by `infinity.deepspeed.initialize`. As in DeepSpeed, loading a missing checkpoint is not an error.

    Attributes:
        local_rank: Number of this process on its machine.
        dp_world_size: Number of processes with the same part of the model as this one, each with its own data.
        mp_world_size: Number of parts of the model: 1, unless ``mesh_param`` says otherwise.
        mpu, client_optimizer, client_lr_scheduler, training_data, collate_fn: As passed to `initialize`.
        timers: Stop watches for the script.
        tput_timer: Has the samples per second of the last step.
    """

    # Scripts and libraries read these without asking whether they exist.
    seq_parallel_group = None
    has_moe_layers = False
    is_compiled = False
    sparse_tensor_module_names: frozenset[str] = frozenset()
    _is_missing_ok = True

    def __init__(self, parts: Parts) -> None:
        """Not meant to be called: see `initialize`."""
        super().__init__(parts)
        self._config = DeepSpeedConfig(parts.config)
        self.local_rank = local_rank()
        self.dp_world_size, self.mp_world_size, self.mpu = self._mesh.data.num, self._mesh.parts.num, self._mesh.source
        self.training_data: Any = None
        self.collate_fn: Callable[[Any], Any] | None = None
        self.client_optimizer: Any = None
        self.client_lr_scheduler: Any = None
        self.timers = Timers()
        self.tput_timer = ThroughputTimer(self._samples_per_second)

    def set_arguments(
        self, optimizer: Any, lr_scheduler: Any, training_data: Any, collate_fn: Callable[[Any], Any] | None
    ) -> None:
        """Keep what was passed to `initialize`."""
        self.client_optimizer, self.client_lr_scheduler = optimizer, lr_scheduler
        self.training_data, self.collate_fn = training_data, collate_fn

    @staticmethod
    def _cure_of_absent(name: str) -> str:
        return _ABSENT.get(name, "")

    def flops_profiler_enabled(self) -> bool:
        """Return False: torch's ``FlopCounterMode`` counts operations."""
        return False

    # ---------------------------------------------------------------------------------------------------- batch sizes

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Samples per step, samples per micro-batch, micro-batches per step."""
        return self.counts.batch_size, self.counts.micro_batch_size, self.counts.num_micro_batches

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Set the micro-batches per step. All ranks call it.

        Raises:
            ConfigError: fewer than one.
            RankError: the others do not call it, or with another number.
            StepError: the present step has begun.
        """
        self._mesh.data.all_gather_ints(f"engine.set_gradient_accumulation_steps({steps})")
        self.counts.set_num_micro_batches(steps)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples per step. The size of a micro-batch stays the same. All ranks call it.

        Raises:
            ConfigError: it is no multiple of the micro-batch.
            RankError: the others do not call it, or with another number.
            StepError: the present step has begun.
        """
        self._mesh.data.all_gather_ints(f"engine.set_train_batch_size({train_batch_size})")
        self.counts.set_batch_size(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples per micro-batch. The number of micro-batches stays the same."""
        self.counts.set_micro_batch_size(micro_batch_size)

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Gradients of all backwards in the block are averaged over the processes once, by the next `step`.

        It is `no_sync`, with any ZeRO stage but 0.

        Raises:
            StepError: as `no_sync`; or every `step` is a boundary by the config.
            NotImplementedError: without ZeRO, as in DeepSpeed.
        """
        if not self.config.managed_gradient_accumulation:
            problem = "it is not supported with managed_gradient_accumulation=False"
            raise StepError.order("engine.coalesce_grad_reduction()", problem, cure="Use engine.no_sync()")
        if self.config.zero_stage == 0:
            raise NotImplementedError(
                "coalesce_grad_reduction requires ZeRO stage 1/2/3, got stage 0. Use engine.no_sync()"
            )
        if self.counts.is_in_no_sync:
            problem = "it cannot be nested inside another no_sync context"
            cure = "One block around all of it suffices"
            raise StepError.order("engine.coalesce_grad_reduction()", problem, cure=cure)
        with self.no_sync():
            yield

    # ------------------------------------------------------------------------------------------------------ the config

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
        """Whether optimizer states are stored in host memory."""
        return self.config.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer states are stored on NVMe."""
        return self.config.offload_optimizer.device == "nvme"

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the steps."""
        scaling = self.config.loss_scaling
        return scaling is not None and scaling.is_dynamic

    def optimizer_name(self) -> str | None:
        """The class of an optimizer that was passed; else its type in the config, in small letters if DeepSpeed knows it.

        None if there is neither.
        """
        if self.client_optimizer is not None:
            named = self.client_optimizer if callable(self.client_optimizer) else type(self.client_optimizer)
            return str(getattr(named, "__name__", type(named).__name__))
        name: str | None = self._config.optimizer_name
        return name

    # ----------------------------------------------------------------------------------------------- the optimizer's groups

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self._groups():
            # torch's capturable optimizers have a tensor as `lr`: it must stay the same object.
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Momentum of each parameter group, or its betas."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """What each parameter group has as ``type``; 0 without."""
        return [group.get("type", 0.0) for group in self._groups()]

    @property
    def basic_optimizer(self) -> Any:
        """As ``optimizer.optimizer``; None without."""
        return None if self.optimizer is None else self.optimizer.optimizer

    # -------------------------------------------------------------------------------------------- checkpoints and weights

    def save_checkpoint(self, save_dir: str | Path, tag: str | int | None = None, *args: Any, **kwargs: Any) -> bool:
        """As `Engine.save_checkpoint`, with a script ``zero_to_fp32.py`` beside the checkpoint.

        If ranks have different tags, the first rank's is used, with a warning. The config's
        ``checkpoint.tag_validation`` "fail" makes it an error, and "ignore" omits the warning.

        Raises:
            RankError: tags differ, and the config says "fail".
            CheckpointError, StorageError, ValueError: as there.
        """
        check_directory(save_dir)
        # With "fail", `Engine.save_checkpoint` compares the tags and raises.
        if not self._config.checkpoint_tag_validation_fail:
            ranks = self._mesh.everyone if self._mesh.is_divided else self._mesh.data
            tags = gather_results(ranks, "engine.save_checkpoint", lambda: None if tag is None else str(tag))
            if self._config.checkpoint_tag_validation_enabled and len({*tags}) > 1:
                logger.warning("engine.save_checkpoint: the ranks have the tags %s. The first is taken", tags)
            tag = tags[0]
        saved = super().save_checkpoint(save_dir, tag, *args, **kwargs)
        if self._mesh.data.index == 0:
            write_script(folder_of(self._mesh, Path(save_dir)))
        return saved

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """As ``state_dict``, optionally without frozen parameters."""
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
        # DeepSpeed's own files have the weights below "module".
        inner = checkpoint.get("module")
        weights = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=weights, dst=self.module)
        else:
            self.module.load_state_dict(weights, strict=strict)

    # ------------------------------------------------------------------------------------------------------------ others

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
        """A loader over a data set, see `data_loader`.

        Args:
            dataset, batch_size, collate_fn: as there; by default `initialize`'s ``collate_fn``.
            route: "train" shuffles. "eval" and "predict" keep the data set's order.
            pin_memory: taken as DeepSpeed takes it, without effect.
            data_sampler: the order instead.
            num_local_io_workers: processes that read. None: none, where DeepSpeed takes two for each GPU.

        Raises:
            ConfigError: neither ``batch_size`` nor the config says how many samples.
        """
        return self.data_loader(
            dataset,
            batch_size,
            shuffles=route == "train",
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers or 0,
        )

    def destroy(self) -> None:
        """As `close`. Errors of later calls then say how to go on with transformers or accelerate."""
        self._guard.on_destroy()
        self.close()

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile each block of the model by itself: the whole model is never in memory at once.

        Args:
            backend, compile_kwargs: for ``torch.compile``.
            schedule, compiled_autograd_enabled: taken as DeepSpeed takes them, without effect.
        """
        super().compile(backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Finish pending updates. States stay where the config puts them, whatever the arguments."""
        self.flush()

    def reload_states(self, non_blocking: bool = False) -> None:
        """No effect: weights and states are fetched when they are needed."""

    def empty_partition_cache(self) -> None:
        """Finish pending updates. Memory stays within the budgets."""
        self.flush()

    def _samples_per_second(self) -> float | None:
        if self.report is None or self.report.num_samples is None or not self.report.seconds:
            return None
        return self.report.num_samples / self.report.seconds

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of each of `timers`."""
        return {name: timer.elapsed(reset=False) for name, timer in self.timers.get_timers().items()}

    def get_sequence_parallel_group(self) -> None:
        """None: each process has whole sequences."""

    def get_data_parallel_rank(self) -> int:
        """Rank of this process among those that have the same part of the model, each with its own data."""
        return self._mesh.data.index

    def get_tensor_parallel_rank(self) -> int:
        """Which part of the tensors of its stage this process has."""
        return self._mesh.place.tensor


# Methods that only return a value of the config are made from names.toml: their names, and docstrings.
def _getter(attribute: str, text: str) -> Callable[[DeepSpeedEngine], Any]:
    def get(self: DeepSpeedEngine) -> Any:
        return getattr(self._config, attribute)

    get.__doc__ = text
    return get


for _name, _text in TABLE["engine"].items():
    setattr(DeepSpeedEngine, _name, _getter(_name, _text))
