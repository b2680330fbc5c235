"""A Lightning strategy that trains with the engine, and its optimizer, for ``lightning`` and ``pytorch_lightning``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from infinity.config import ConfigSource, InfinityConfig, load_config
from infinity.deepspeed.contents.fp32_weights import get_fp32_state_dict_from_zero_checkpoint
from infinity.distributed.agreement import on_rank_0
from infinity.distributed.process_groups import num_processes
from infinity.distributed.world import world
from infinity.engine.engine import Engine
from infinity.entry import initialize
from infinity.errors import CheckpointError, ConfigError, ModelError, StepError, StorageError
from infinity.integrations import engine_files
from infinity.integrations.settings import GRADIENTS_STAY, Setting, agreed, refuse_second
from infinity.integrations.versions import require
from infinity.loading.init import Init
from swapper.volumes.publish import Staging, exchange, remove_abandoned, sync_tree

logger = logging.getLogger(__name__)

_ParallelStrategy: Any = object
"""The mixin's base for the type checker. `strategy_for` adds Lightning's ``ParallelStrategy``."""
_REST = "lightning.ckpt"
"""File in a checkpoint with Lightning's own entries, without weights and states."""
NAMES: dict[str, dict[str, Any]] = {
    "infinity_stage_1": {"stage": 1},
    "infinity_stage_2": {"stage": 2},
    "infinity_stage_3": {"stage": 3},
    "infinity_stage_3_offload": {"stage": 3, "offload": "cpu"},
    "infinity_stage_3_nvme": {"stage": 3, "offload": "nvme"},
}
"""Names for ``Trainer(strategy=...)``, and the arguments that they stand for."""
_AS_DDP = """
_get_process_group_backend barrier broadcast determine_ddp_device_ids distributed_sampler_kwargs num_nodes num_processes reduce
root_device set_world_ranks setup_distributed
""".split()  # noqa: SIM905 - read as a text
"""Methods of Lightning's ``DDPStrategy`` that this one takes. As a base, it would shuffle a single process's loader
in another way."""


class EngineOptimizer(Optimizer):
    """The optimizer that Lightning gets: its step is the engine's.

    Attributes:
        engine: the engine of this optimizer.
        is_stepping: whether `step` is running. A backward in its closure is the last one of the step.
    """

    def __init__(self, engine: Engine, *, averages_always: bool = False) -> None:
        """``engine`` has an optimizer. ``averages_always``: average gradients over processes in each backward."""
        # Not Optimizer.__init__: groups, states, defaults and hooks are the engine's optimizer's, see `__getattr__`.
        self.engine = engine
        self.is_stepping = False
        self._averages_always = averages_always
        self._has_backward = False
        self._opt_called = True  # torch's schedulers warn if their optimizer has made no step

    def __getattr__(self, name: str) -> Any:
        # A copy lacks "engine" at first, and this would call itself. Libraries unwrap while there is an "optimizer".
        if name in ("engine", "optimizer"):
            raise AttributeError(name)
        return getattr(self.engine.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the engine's optimizer."""
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Set the values of groups, and add new groups. ``BaseFinetuning`` assigns groups when it resumes.

        Raises:
            ModelError: a group has other parameters than before.
        """
        there = self.param_groups
        for own, group in zip(there, groups, strict=False):
            if list(map(id, own["params"])) != list(map(id, group["params"])):
                problem = "optimizer.param_groups is set to groups with other parameters than the optimizer's"
                raise ModelError(problem, cure="Leave its groups as they are, and add others with add_param_group")
            own.update(group)
        for group in groups[len(there) :]:
            self.add_param_group(group)

    def __repr__(self) -> str:
        return repr(self.engine.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.engine.optimizer.zero_grad(set_to_none)
        self._has_backward = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the engine's optimizer: frozen parameters get room for states (``BaseFinetuning``)."""
        self.engine.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As the engine's optimizer."""
        found: dict[str, Any] = self.engine.optimizer.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the engine's optimizer."""
        self.engine.optimizer.load_state_dict(state_dict)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of a micro-batch. Lightning has divided the loss by the accumulation steps."""
        self.engine.set_gradient_accumulation_boundary(self.is_stepping or self._averages_always)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self._has_backward = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, which calls the last backward, and then the engine's step. Returns the closure's result."""
        self.is_stepping = True
        try:
            with torch.enable_grad():
                found = None if closure is None else closure()
        finally:
            self.is_stepping = False
        if self._has_backward:
            self._has_backward = False
            self.engine.set_gradient_accumulation_boundary(True)
            self.engine.step()
            self.engine.set_gradient_accumulation_boundary(None)
        else:  # the module has called `loss.backward()` itself, or no backward ran
            self.engine.optimizer.step()
        return found

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers check it, and would wrap `step` again


class InfinityStrategyMixin(_ParallelStrategy):  # type: ignore[misc]
    """Lightning's strategy for the engine, which holds the module from `setup` to `teardown`.

    Use ``Trainer(strategy=InfinityStrategy(config="ds_config.json"))``, or one of `NAMES`. Numbers, and what hooks,
    callbacks and loggers see, are those of Lightning without it. A checkpoint is a directory, which appears when it is
    complete; ``ckpt_path=`` takes it. ``configure_model`` builds on the drives. `teardown` gives trained weights back
    to the module if they take at most half of the free memory. Save larger ones before.

    Several devices have a process each, started by a launcher (torchrun, Slurm) or by Lightning. Loaders are sharded
    and seeds set as by ``DDPStrategy``; the engine averages and clips gradients. Slurm's signal (save, and requeue
    the job) is handled before the next batch.

    Attributes:
        engine: None before `setup` and after `teardown`.
    """

    engine: Engine | None = None
    model: Any
    optimizers: list[Any]
    _pytorch: Any
    """``lightning.pytorch`` or ``pytorch_lightning``."""

    def __init__(
        self,
        config: ConfigSource | None = None,
        *,
        stage: int = 3,
        offload: str = "none",
        nvme_path: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            config: the engine's config. The Trainer fills in "auto", batch size and accumulation. None: made from the
                next arguments.
            stage, offload: ZeRO stage, and "none", "cpu" or "nvme" for weights and states.
            nvme_path: directory for "nvme". None: ``infinity`` in the Trainer's ``default_root_dir``.
            kwargs: of Lightning's ``ParallelStrategy``.
        """
        super().__init__(**kwargs)
        self._num_nodes = 1
        self._process_group_backend: str | None = None
        self._timeout = timedelta(minutes=30)  # torch's default
        self._config = config
        self._made_of = stage, offload, nvme_path
        self._directory: Path | None = None
        """Directory of the checkpoint to load, or that was loaded."""
        self._has_weights = False
        """Whether Lightning or a callback has loaded the weights."""
        self._agreed: InfinityConfig | None = None
        """The config with the Trainer's values in it, once they are known."""
        self._has_trained = False
        self._has_loaded = False
        self._signals: list[int] = []
        """Received signals that Lightning has not handled yet."""
        self._left_out: dict[str, Any] = {}
        """In place of the weights, in the checkpoint that Lightning passes to `save_checkpoint`."""

    # ------------------------------------------------------------------------------------------------------- the processes

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train together."""
        return bool(self.num_nodes * self.num_processes > 1)

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            # Starts the script once more for each further device, unless another launcher has.
            launcher = self._pytorch.strategies.launchers._SubprocessScriptLauncher
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """As Lightning's. Several processes make their group here.

        Raises:
            ConfigError: the Trainer counts another number of processes.
        """
        if self.is_distributed:
            self.setup_distributed()
        counted = self.num_nodes * self.num_processes
        if counted != num_processes():
            raise ConfigError(
                f"Trainer(devices=..., num_nodes=...) counts {counted} process(es), and {num_processes()} train together, so "
                "each would get the same data. Set devices to the processes of a machine"
            )
        # Lightning's handler for Slurm's signal saves a checkpoint. Python runs it between any two instructions, also in
        # the middle of a step: so it is run between batches.
        vars(self.lightning_module.trainer._signal_connector)["_slurm_sigusr_handler_fn"] = self._on_signal
        super().setup_environment()

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signals.append(number)
        if self.engine is None:
            self._handle_signals()

    def _handle_signals(self) -> None:
        connector = self.lightning_module.trainer._signal_connector
        while self._signals:
            type(connector)._slurm_sigusr_handler_fn(connector, self._signals.pop(0), None)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do not average gradients of backwards in the block. The next backward after it averages all."""
        with self.engine.no_sync() if self.engine is not None else contextlib.nullcontext():
            yield

    # ---------------------------------------------------------------------------------------------------------- the config

    def infinity_config(self) -> InfinityConfig:
        """The config, merged with the Trainer's arguments.

        Raises:
            ConfigError: they contradict each other.
        """
        if self._agreed is None:
            self._agreed = self._agree(self.lightning_module.trainer)
            if self._agreed.compute_dtype is not torch.float32:  # the engine casts inputs and scales losses
                self._precision_plugin = self._pytorch.plugins.precision.Precision()  # does nothing
        return self._agreed

    def _agree(self, trainer: Any) -> InfinityConfig:
        source = self._config if self._config is not None else self._made(Path(trainer.default_root_dir))
        steps, precision = trainer.accumulate_grad_batches, str(self.precision_plugin.precision)
        # "bf16-true" and "bf16-mixed" fill in an "auto" of bf16.enabled; "16-true" and "16-mixed" of fp16.enabled.
        narrow = {name: precision.startswith(prefix) for name, prefix in (("bf16", "bf16"), ("fp16", "16"))}
        clip_val, is_by_value = float(trainer.gradient_clip_val or 0), trainer.gradient_clip_algorithm == "value"
        by_norm, told = clip_val, "gradient_clip_val"
        if is_by_value:
            by_norm, told = 0.0, 'clipping by norm, with gradient_clip_algorithm="value",'
        settings = [
            Setting("train_micro_batch_size_per_gpu", "auto", "the loader", True, must_match=False),
            Setting("gradient_accumulation_steps", steps, "accumulate_grad_batches", is_always=True),
            GRADIENTS_STAY,
            Setting("gradient_clipping", by_norm, told, is_always=True, must_match=bool(clip_val)),
            *(Setting(f"{name}.enabled", on, "precision", must_match=False) for name, on in narrow.items()),
        ]
        config = agreed(source, settings, drops=["managed_gradient_accumulation"])
        # Lightning clips by value and, in a single process, by norm. The engine must not clip as well. With several
        # processes, Lightning would gather all gradients in each of them, so the engine clips by norm in its step.
        if clip_val and (is_by_value or not self.is_distributed):
            config = load_config(dict(config), overrides={"gradient_clipping": 0.0})
        if self.is_distributed and self._layer_sync is not None:
            raise ConfigError(
                "Trainer(sync_batchnorm=True) is not supported: its layers would exchange data outside of the "
                "engine. Leave it out, or take layers that need no statistics of the batch (GroupNorm)"
            )
        if config.compute_dtype is torch.float32:
            if precision not in ("32-true", "bf16-mixed"):
                raise ConfigError(
                    f'Trainer(precision="{precision}") is not supported, because Lightning would cast outside of the '
                    'engine. Take "bf16-mixed"; or 16-bit weights, by "bf16" or "fp16": {"enabled": true} in '
                    "InfinityStrategy(config=...)",
                    key="bf16.enabled",
                )
            return config
        block = "bf16" if config.compute_dtype is torch.bfloat16 else "fp16"
        return load_config(dict(config), overrides={f"{block}.auto_cast": True})

    def _made(self, root: Path) -> dict[str, Any]:
        stage, offload, nvme_path = self._made_of
        zero: dict[str, Any] = {"stage": stage}
        if offload != "none":
            place = {"device": offload}
            if offload == "nvme":
                place["nvme_path"] = os.fspath(nvme_path if nvme_path is not None else root / "infinity")
            zero |= {"offload_param": place, "offload_optimizer": dict(place)}
        block = {"bf16-true": "bf16", "16-true": "fp16"}.get(str(self.precision_plugin.precision))
        return {"zero_optimization": zero, **({block: {"enabled": True}} if block else {})}

    # ------------------------------------------------------------------------------------------------- building and taking

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build modules on the CPU or on drives, not on the device. The engine moves what is needed."""
        if self.lightning_module is not None:
            self.infinity_config()
        with self.precision_plugin.tensor_init_context():
            yield

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """``configure_model`` runs inside `infinity.Init`."""
        with Init(config=self.infinity_config()):
            yield

    def model_to_device(self) -> None:
        """No effect: the engine moves what is needed."""

    def setup(self, trainer: Any) -> None:
        """As Lightning's. Then makes the engine, with the optimizer of ``configure_optimizers`` if there is one.

        Raises:
            InfinityError: as `infinity.initialize`.
        """
        self.infinity_config()
        super().setup(trainer)
        if self.engine is None:
            # `super().setup` calls `setup_optimizers`, but not for validate, test and predict.
            engine = self._make_engine(None)
            if self._directory is not None and not self._has_weights:
                engine_files.load_engine(engine, self._directory, only_module=True)

    def setup_optimizers(self, trainer: Any) -> None:
        """As Lightning's."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            problem = f"configure_optimizers returned {len(self.optimizers)} optimizers, and an engine has one"
            raise ModelError(problem, cure="Put all parameters into one, in groups of their own")
        for key, own in (("optimizer", self.optimizers), ("scheduler", self.lr_scheduler_configs)):
            if own:
                refuse_second(self.infinity_config(), key, "Lightning has that of configure_optimizers")
        if self.optimizers and self.optimizers[0].param_groups:  # Lightning's placeholder has no groups
            self._make_engine(self.optimizers[0])

    def _make_engine(self, optimizer: Optimizer | None) -> Engine:
        config = self.infinity_config()
        if optimizer is None:  # validate, test or predict
            config = engine_files.only_evaluating(config)
        engine, *_ = initialize(
            model=self.lightning_module, optimizer=optimizer, config=config, device=self.root_device
        )
        self.engine = engine
        if optimizer is not None:
            is_manual = not self.lightning_module.automatic_optimization
            # Loggers show the name of the class.
            own_class = type(type(optimizer).__name__, (EngineOptimizer,), {})
            own = own_class(self.engine, averages_always=is_manual and self.is_distributed)
            if self.is_distributed:
                plugin: Any = self.precision_plugin
                # `_agree` leaves clipping to the engine here: see `_clip`.
                vars(plugin)["clip_gradients"] = functools.partial(self._clip, plugin.clip_gradients)
            self.optimizers = [own]
            for each in self.lr_scheduler_configs:  # callbacks compare optimizers by identity
                vars(each.scheduler)["optimizer"] = own
        self.model = engine
        return engine

    def on_train_start(self) -> None:
        """As Lightning's.

        Raises:
            StepError: a durable run is past step 0, and Lightning begins at step 0.
        """
        super().on_train_start()
        if self.engine is not None and engine_files.has_resumed(self.engine) and not self._has_loaded:
            engine_files.refuse_to_begin(self.engine, "trainer.fit()", loading="Pass ckpt_path=")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """As Lightning's."""
        self._handle_signals()
        super().on_train_batch_start(batch, batch_idx)

    def on_train_end(self) -> None:
        """As Lightning's."""
        self._handle_signals()
        super().on_train_end()

    def teardown(self) -> None:
        """As Lightning's. First, the trained weights go back into the module."""
        self._has_loaded, self._directory = False, None
        self._has_trained |= any(isinstance(each, EngineOptimizer) for each in self.optimizers)
        self.optimizers = []
        if self.engine is not None:
            engine, self.engine = self.engine, None
            self.model = self.lightning_module
            engine.forget_step()  # a step that an exception has ended; `close` needs complete weights
            engine.close()
        super().teardown()

    # ------------------------------------------------------------------------------------------------------------ the loop

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As Lightning's, with the engine's backward. A module's own ``backward`` is called unchanged."""
        module = self.lightning_module
        is_plain = bool(args) or not kwargs.keys() <= {"retain_graph"}  # arguments that only torch's backward has
        own = next((each for each in self.optimizers if isinstance(each, EngineOptimizer)), None)
        if own is None or is_plain or type(module).backward is not self._pytorch.LightningModule.backward:
            return super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[no-any-return]
        # Lightning's plugins and hooks around backward call `module.backward(loss)`: for this call it is the engine's.
        module.__dict__["backward"] = functools.partial(own.backward)
        try:
            return super().backward(closure_loss, optimizer, **kwargs)  # type: ignore[no-any-return]
        finally:
            del module.__dict__["backward"]

    def _clip(
        self, clip: Callable[..., None], optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        config, is_by_norm = self.infinity_config(), gradient_clip_algorithm in (None, "norm")
        if clip_val <= 0 or (is_by_norm and clip_val == config.gradient_clipping):
            return  # the engine clips in the step
        clip(optimizer, clip_val, gradient_clip_algorithm)

    # -------------------------------------------------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """A placeholder: the engine saves weights."""
        self._left_out = {}
        return self._left_out if self.engine is not None else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty: the engine saves states."""
        return {} if self.engine is not None else super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a directory: the engine's checkpoint and Lightning's entries. After ``fit``, a file without states."""
        if self._has_trained and not self.optimizers and checkpoint.pop("optimizer_states", None) is not None:
            # The key is removed: with an empty list, a resumed training would silently begin with new states.
            logger.warning(
                "'%s' has weights only, and no training can resume from it: the optimizer state is released when fit "
                "ends. Save during fit, for example with ModelCheckpoint(save_last=True)",
                filepath,
            )
        if self.engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(os.fspath(filepath)))
        is_interrupted = self.lightning_module.trainer.interrupted
        if is_interrupted:
            self.engine.forget_step()  # a step that the exception has ended
        if checkpoint["state_dict"] is not self._left_out:  # WeightAveraging has replaced it, and moved it
            for key in [key for key, value in checkpoint.items() if value is self._left_out]:
                checkpoint[key] = self.lightning_module.state_dict()
        staging, new = Staging(path.parent, path.name), ""
        with contextlib.ExitStack() as opened:  # rank 0 makes the files, all ranks save the engine

            def begin() -> None:
                nonlocal new
                # A save replaces nothing but a checkpoint of this strategy.
                if path.is_dir() and not (path / _REST).is_file() and any(path.iterdir()):
                    problem = "is a directory that is not a checkpoint, and is not replaced"
                    raise StorageError(path, problem, cure="Save elsewhere, or move it away")
                new = os.fspath(opened.enter_context(staging).path / "new")
                os.mkdir(new)

            def publish() -> None:
                self.checkpoint_io.save_checkpoint(checkpoint, Path(new) / _REST)
                self.checkpoint_io.teardown()  # waits for AsyncCheckpointIO
                sync_tree(Path(new))
                exchange(Path(new), path)
                opened.close()  # removes the replaced checkpoint, while the other ranks still wait

            on_rank_0(world(), f"saving {path}", begin)
            new = self.broadcast(new)
            try:
                engine_files.save_engine(self.engine, new)
            except StepError as error:
                if not is_interrupted:
                    raise
                logger.warning("'%s' is not saved: %s", path, error)  # Lightning raises the exception itself next
                return
            on_rank_0(world(), f"publishing {path}", publish)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load Lightning's entries of a directory, without weights; or a file of Lightning's own."""
        path = Path(checkpoint_path)
        remove_abandoned(path.parent)  # may put back what a killed save was replacing
        self._has_loaded = True
        self._directory = path if path.is_dir() else None
        if self._directory is not None:
            if not (path / _REST).exists():
                raise CheckpointError(path, f"there is no {_REST} in it")
            path = path / _REST
        found: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights that Lightning or a callback (WeightAveraging) has saved. The engine loads its own later."""
        self._has_weights = self._directory is None or bool(checkpoint["state_dict"])
        if self._has_weights:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the engine's weights and states. By now callbacks have added the groups that were added in that run."""
        if self._directory is None:
            super().load_optimizer_state_dict(checkpoint)
        elif self.engine is not None and self.engine.optimizer is not None:
            # The engine's checkpoint has the weights in training. WeightAveraging has loaded averaged ones, which must
            # stay.
            weights = self.lightning_module.state_dict() if self._has_weights else None
            engine_files.load_engine(self.engine, self._directory)
            if weights is not None:
                self.lightning_module.load_state_dict(weights)


def strategy_for(package: str, *, library: str, home: str) -> Any:
    """The strategy for ``lightning.pytorch`` or ``pytorch_lightning``, registered under `NAMES`.

    Args:
        package: which of them.
        library: what installs it.
        home: module in which the strategy is.
    """
    require(library, "2.5", extra="lightning")
    pytorch: Any = importlib.import_module(package)
    own = {
        "__doc__": InfinityStrategyMixin.__doc__,
        "strategy_name": "infinity",
        "_pytorch": pytorch,
        "__module__": home,
    }
    # Single methods, since DDPStrategy as a base would have Lightning shuffle a single process's loader in another way.
    as_ddp = {name: vars(pytorch.strategies.DDPStrategy)[name] for name in _AS_DDP}
    made = type("InfinityStrategy", (InfinityStrategyMixin, pytorch.strategies.ParallelStrategy), own | as_ddp)
    saving = pytorch.core.saving
    # `load_from_checkpoint` has no hook for other formats, so its function that reads the file is replaced.
    vars(saving)["pl_load"] = functools.partial(_load_for_module, saving.pl_load)
    for name, options in NAMES.items():
        pytorch.strategies.StrategyRegistry.register(name, made, description=str(options), override=True, **options)
    return made


def _load_for_module(load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """For ``Module.load_from_checkpoint``: reads a directory of this strategy, with fp32 weights in memory."""
    if not isinstance(path, str | os.PathLike) or not (Path(path) / _REST).is_file():
        return load(path, *args, **kwargs)
    found = load(Path(path) / _REST, *args, **kwargs)
    if not found["state_dict"]:
        engine = engine_files.checkpoint_in(Path(path))
        found["state_dict"] = get_fp32_state_dict_from_zero_checkpoint(engine.parent, engine.name)
    return found
