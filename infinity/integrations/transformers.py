# ruff: noqa: E402 - an older library than is needed has to be named before something of it is missed
"""transformers' Trainer on the engine, without DeepSpeed's name.

    trainer = InfinityTrainer(model, args, train_dataset=data, infinity_config="ds_config.json")
    trainer.train()

`InfinityTrainerMixin` does it for subclasses of ``Trainer``: ``class MyTrainer(InfinityTrainerMixin, SFTTrainer)``.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from infinity.integrations.versions import require

require("transformers", "5.22", extra="hf", below="5.24")

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from infinity.config import ConfigSource, load_config
from infinity.distributed.process_groups import num_processes
from infinity.engine.engine import Engine
from infinity.entry import initialize
from infinity.errors import ConfigError, StepError
from infinity.integrations import engine_files
from infinity.integrations.accelerate import EngineOptimizer, InfinityAccelerator
from infinity.integrations.micro_batches import MicroBatches
from infinity.integrations.settings import GRADIENTS_STAY, Setting, agreed, has_block
from infinity.optim.lr_schedules import build_scheduler
from swapper.volumes.publish import Staging, make_directory, opener, remove, rename

_Trainer: Any = object
"""The mixin's base for the type checker. At run time it is used before a ``Trainer``."""
_SCHEDULER, _STATE = "scheduler.pt", "trainer_state.json"


class _TrainersAccelerator(InfinityAccelerator):
    _accumulates = False


class InfinityTrainerMixin(_Trainer):  # type: ignore[misc]
    """A base class before a ``Trainer``: the engine trains the model, with the same numbers, bit for bit.

    The engine is made when training or the first evaluation begins, and holds the model until ``engine.close()``. The
    model stays the same object, so `evaluate`, `predict`, `save_model` and ``generate`` work as before. Weights are
    saved as by ``save_pretrained``, streamed (of a PEFT model, its adapters). In each checkpoint, the directory
    ``infinity`` has main weights and optimizer states, in place of ``optimizer.pt``.

    With accumulation, the micro-batches of a step may go through the model together, by config key
    ``infinity.schedule``: see `infinity.integrations.micro_batches`.

    Attributes:
        engine: None before it is made. After its ``close()``, the model is an ordinary one.
        step_records: names of attributes that a subclass's ``training_step`` or ``compute_loss`` only adds to
            (metrics). If they change other attributes, micro-batches run one after the other.
    """

    engine: Engine | None = None
    step_records: frozenset[str] = frozenset({"_metrics", "_total_train_tokens"})  # TRL's
    gather_function: Any  # attributes of the Trainer that are set here
    lr_scheduler: Any
    optimizer: Any

    def __init__(self, *args: Any, infinity_config: ConfigSource, **kwargs: Any) -> None:
        """
        Args:
            args, kwargs: of the Trainer.
            infinity_config: the engine's config: path of a JSON file, or a dict. ``TrainingArguments`` fill in what it
                leaves open or "auto": batch sizes, accumulation, clipping, ``bf16``, ``fp16``, and the parameters of
                its "optimizer" or "scheduler". Without a block "bf16", ``bf16=True`` is autocast over fp32 weights.

        Raises:
            ConfigError: config and ``TrainingArguments`` contradict each other.
        """
        self._infinity_source = infinity_config
        self.__dict__["create_optimizer"] = self._create_engine  # on the object: found before a subclass's method
        super().__init__(*args, **kwargs)

    @property
    def _engine_of_model(self) -> Engine | None:
        """The open engine; None if there is none."""
        return None if self.engine is None or self.engine.is_closed else self.engine

    # -------------------------------------------------------------------------------------------------- before the training

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, with an `InfinityAccelerator`."""
        arguments = self.args
        _check(arguments)
        arguments._setup_devices  # noqa: B018  # sets _n_gpu: with several the Trainer would use nn.DataParallel
        arguments._n_gpu = min(arguments._n_gpu, 1)
        super().create_accelerator_and_postprocess()
        self.infinity_config = agreed(
            self._infinity_source, _settings(arguments), drops=["managed_gradient_accumulation", "scheduler"]
        )
        # The Trainer has made a plain one by now. Its arguments come from `_build_accelerator_args`, and the function
        # that uses it is made again.
        self.accelerator = _TrainersAccelerator(**self._accelerator_arguments, infinity_config=self.infinity_config)
        gather = self.gather_function
        options = gather.keywords if isinstance(gather, functools.partial) else {}
        self.gather_function = functools.partial(self.accelerator.gather_for_metrics, **options)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_arguments = super()._build_accelerator_args(**kwargs)
        return dict(self._accelerator_arguments)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """No effect: the model may be larger than the device. The engine moves what is needed."""

    def _create_engine(self, *args: Any, **kwargs: Any) -> Any:
        """In place of ``create_optimizer``: calls the class's own, and then makes the engine with its optimizer.

        Raises:
            InfinityError: as `infinity.initialize`.
        """
        engine, own, is_of_config = self._engine_of_model, self.optimizer, self.infinity_config.optimizer is not None
        # A second `train()`: the engine goes on, unless a subclass makes another optimizer.
        if isinstance(own, EngineOptimizer) and own.engine is engine:
            if not is_of_config:
                type(self).create_optimizer(self, *args, **kwargs)
            if self.optimizer is own:
                return own
            self.accelerator.close(engine)  # a subclass has made another optimizer
        else:
            if isinstance(own, EngineOptimizer):
                self.optimizer = own.engine.passed_optimizer  # `initialize` logs that it begins anew
            if engine is not None:  # of an earlier trial, or one that only evaluated
                self.accelerator.close(engine)
            if not is_of_config or self.optimizer is not None:
                type(self).create_optimizer(self, *args, **kwargs)
        self.optimizer = self._start(self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. A "scheduler" in the config is used instead."""
        arguments = self.args
        # Only now is the number of steps known, which replaces "auto" in the config's scheduler.
        if self.lr_scheduler is None and has_block(self._infinity_source, "scheduler"):
            settings = [
                *_settings(arguments),
                Setting("scheduler.params.total_num_steps", num_training_steps, "max_steps"),
                Setting(
                    "scheduler.params.warmup_num_steps", arguments.get_warmup_steps(num_training_steps), "warmup_steps"
                ),
            ]
            section = agreed(self._infinity_source, settings).scheduler
            if section is not None:
                self.lr_scheduler = build_scheduler(section, self.optimizer)
                self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, *args, **kwargs)

    def _start(self, optimizer: torch.optim.Optimizer | None, *, evaluates: bool = False) -> EngineOptimizer | None:
        arguments, config = self.args, self.infinity_config
        if evaluates:
            config = engine_files.only_evaluating(config)
        clips_now = self._clips_before_step()
        if clips_now:
            config = agreed(load_config(dict(config), overrides={"gradient_clipping": 0.0}), [GRADIENTS_STAY])
        self.engine, *_ = initialize(model=self.model, optimizer=optimizer, config=config, device=arguments.device)
        self._mixed_mesh_grads = False  # else the Trainer reads all gradients to find out
        adopted: EngineOptimizer | None = self.accelerator.adopt(self.engine, defers_norms=not clips_now)
        return adopted

    def _clips_before_step(self) -> bool:
        # A callback's `on_pre_optimizer_step` sees clipped gradients. So the Trainer has to clip before it, as usual,
        # and the engine must not clip in the step. With ZeRO, no process has whole gradients before the step.
        return (num_processes() == 1 or not self.infinity_config.zero_stage) and any(
            type(each).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step
            for each in self.callback_handler.callbacks
        )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, on the engine."""
        if self._engine_of_model is None:
            if self.train_dataset is not None:
                self._create_engine()
            else:  # it was made for evaluation alone
                self._start(None, evaluates=True)
        return super().evaluation_loop(*args, **kwargs)

    def _prepare_input(self, data: Any) -> Any:
        """As the Trainer's. Floating-point inputs are cast to the dtype of 16-bit weights."""
        dtype = self.infinity_config.compute_dtype
        if isinstance(data, torch.Tensor) and data.is_floating_point() and dtype is not torch.float32:
            data = data.to(dtype)
        return super()._prepare_input(data)

    # --------------------------------------------------------------------------------------------------- saving and resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. True resumes from the newest complete checkpoint, and skips what a killed process left."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(Path(self.args.output_dir)) or True
        if self._engine_of_model is not None:
            self._engine_of_model.forget_step()  # gradients of a step that an exception has ended
            if getattr(self.optimizer, "defers_norms", False) and self._clips_before_step():
                problem = "a callback with on_pre_optimizer_step was added when the engine was made already, without its clipping"
                raise StepError.order("trainer.train()", problem, cure="Add it before the first train() or evaluate()")
        if self.args.gradient_accumulation_steps == 1 or self.infinity_config.infinity.schedule == "ordinary":
            return super().train(resume_from_checkpoint, *args, **kwargs)
        together, own = MicroBatches(self, self.step_records), self.__dict__
        own |= {"get_batch_samples": together.get_batch_samples, "training_step": together.training_step}
        try:  # set on the object, they are found before a subclass's methods
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            del own["get_batch_samples"], own["training_step"]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        found, engine = super()._prepare_for_training(*args, **kwargs), self._engine_of_model
        if engine is not None and engine_files.has_resumed(engine) and not self.state.global_step:
            engine_files.refuse_to_begin(
                engine, "trainer.train()", loading="Pass resume_from_checkpoint=True or a checkpoint's path"
            )
        return found

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        engine = self._engine_of_model
        if engine is None or state_dict is not None:  # the script passes its own weights
            super()._save(output_dir, state_dict)
            return
        directory = Path(output_dir if output_dir is not None else self.args.output_dir)
        if self.args.should_save:
            self._save_rest(directory)
        engine.save_pretrained(directory)

    def _save_rest(self, directory: Path) -> None:
        """Save everything but weights: tokenizer, arguments, and whatever a subclass writes."""
        own: dict[str, Any] = self.model.__dict__
        # The Trainer's `_save` would write the weights with it. The rest is written aside first, so that no partly
        # written file is left.
        own["save_pretrained"] = lambda *_, **__: None
        try:
            with Staging(directory, "rest") as staging:
                aside = staging.path / "rest"
                super()._save(os.fspath(aside), state_dict={})
                remove(aside / SAFE_WEIGHTS_NAME)  # empty: for a model without save_pretrained
                for path in [path for path in aside.rglob("*") if path.is_file()]:
                    place = directory / path.relative_to(aside)
                    make_directory(place.parent)
                    rename(path, place)
        finally:
            del own["save_pretrained"]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = self._engine_of_model
        if engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        engine_files.save_engine(engine, output_dir)
        if self.lr_scheduler is not None and self.args.should_save:
            with open(Path(output_dir) / _SCHEDULER, "wb", opener=opener) as file:
                torch.save(self.lr_scheduler.state_dict(), file)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not engine_files.has_checkpoint(resume_from_checkpoint):  # else `_load_optimizer_and_scheduler` does it
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        engine = self._engine_of_model
        if engine is None or checkpoint is None or not engine_files.has_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        engine_files.load_engine(engine, checkpoint)
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        best, engine = self.state.best_model_checkpoint, self._engine_of_model
        if engine is not None and engine_files.has_checkpoint(best):
            engine_files.load_engine(engine, best, only_module=True)
        else:
            super()._load_best_model()


class InfinityTrainer(InfinityTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers' ``Trainer`` with `infinity_config`. See `InfinityTrainerMixin`."""


def newest_checkpoint(output_dir: Path) -> str | None:
    """Directory of a Trainer's newest complete checkpoint; None if there is none."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    for path in sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True):
        try:  # the Trainer writes this file last
            json.loads((path / _STATE).read_text())
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def _settings(arguments: TrainingArguments) -> list[Setting]:
    micro, steps = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    betas = [arguments.adam_beta1, arguments.adam_beta2]
    return [
        Setting("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size", is_always=True),
        Setting("gradient_accumulation_steps", steps, "gradient_accumulation_steps", is_always=True),
        Setting(
            "train_batch_size",
            micro * steps * num_processes(),
            "per_device_train_batch_size * gradient_accumulation_steps * processes",
        ),
        Setting("gradient_clipping", float(arguments.max_grad_norm or 0), "max_grad_norm", is_always=True),
        # bf16=True means 16-bit weights or autocast, whichever block the config has. The key of a missing block is not
        # compared.
        Setting("bf16.enabled", bool(arguments.bf16), "bf16"),
        Setting("fp16.enabled", bool(arguments.fp16), "fp16"),
        Setting("torch_autocast.enabled", bool(arguments.bf16), "bf16"),
        Setting("optimizer.params.lr", arguments.learning_rate, "learning_rate"),
        Setting("optimizer.params.betas", betas, "adam_beta1, adam_beta2"),
        Setting("optimizer.params.eps", arguments.adam_epsilon, "adam_epsilon"),
        Setting("optimizer.params.weight_decay", arguments.weight_decay, "weight_decay"),
        Setting("scheduler.params.warmup_min_lr", 0, "warmup_min_lr", must_match=False),
        Setting("scheduler.params.warmup_max_lr", arguments.learning_rate, "learning_rate"),
    ]


def _check(arguments: Any) -> None:
    """Raise for arguments that do not work with an engine."""
    refused = {
        "deepspeed": "the config goes to infinity_config=",
        "fsdp": "with several processes, zero_optimization.stage of the config divides weights and states",
        "torch_compile": "compile the model's blocks one by one",
        "auto_find_batch_size": "set per_device_train_batch_size",
        "bf16_full_eval": 'put "bf16": {"enabled": true} into the config',
        "fp16_full_eval": 'put "fp16": {"enabled": true} into the config',
    }
    for name, cure in refused.items():
        if getattr(arguments, name, None):
            raise ConfigError(f"TrainingArguments({name}=...) is not supported: {cure}", key=name)
