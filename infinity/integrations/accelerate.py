# ruff: noqa: E402 - an older library than is needed has to be named before something of it is missed
"""accelerate on the engine, without DeepSpeed's names: `InfinityAccelerator` in place of ``Accelerator``."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from infinity.integrations.versions import require

require("accelerate", "1.14", extra="hf")

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn

from infinity.activations.unsupported import NeverSupportedSchedule
from infinity.config import ConfigSource
from infinity.distributed.process_groups import num_processes
from infinity.engine.engine import Engine
from infinity.entry import initialize
from infinity.errors import ConfigError, ModelError
from infinity.integrations import engine_files
from infinity.integrations.settings import GRADIENTS_STAY, Setting, agreed, refuse_second
from infinity.loop.batches import cast

logger = logging.getLogger(__name__)


class _MicroBatch:
    """One of several micro-batches that are computed together. `EngineOptimizer.backward` puts its loss here."""

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last
        self.losses: list[torch.Tensor] = []


# A context variable: each micro-batch runs in a thread of its own, and `accelerator.backward` and `sync_gradients`
# answer for it.
_present: contextvars.ContextVar[_MicroBatch | None] = contextvars.ContextVar("micro_batch", default=None)


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """accelerate's optimizer whose step is the engine's.

    Attributes:
        engine: the engine of this optimizer.
        defers_norms: whether the norm of gradients may get its value as late as in `step`.
    """

    def __init__(self, engine: Engine, *, defers_norms: bool = False) -> None:
        """``engine`` has an optimizer."""
        # No placement: accelerate would read the whole state dict, move it to the device, and load it again.
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine
        self.defers_norms = defers_norms
        self._is_accelerate_prepared = True
        self._has_backward = False
        self._latest_norm: torch.Tensor | None = None

    def backward(self, loss: torch.Tensor, *, is_last: bool, retain_graph: bool = False) -> None:
        """Backward of one micro-batch. ``loss`` is already divided. ``is_last``: the step comes next."""
        micro_batch = _present.get()
        if micro_batch is not None:
            if retain_graph:
                raise NeverSupportedSchedule("accelerator.backward keeps the graph")
            micro_batch.losses.append(loss)
            return
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss, scale_wrt_gas=False, retain_graph=retain_graph)
        self._has_backward = True  # the script may skip the next micro-batches
        if not is_last:
            self.engine.step()

    def backward_together(self, functions: Sequence[Callable[[], object]]) -> bool:
        """Forward and backward of all micro-batches of a step, in turns: see `Engine.backward_together`.

        Args:
            functions: one per micro-batch. Each calls the accelerator's ``backward`` once.

        Returns:
            Whether it was done. If not, nothing has changed except what the functions did outside of the model. The
            report of the step has the reason.
        """

        def run(function: Callable[[], object], *, is_last: bool) -> torch.Tensor:
            micro_batch = _MicroBatch(is_last=is_last)
            token = _present.set(micro_batch)
            try:
                function()
            finally:
                _present.reset(token)
            if len(micro_batch.losses) != 1:
                problem = f"a micro-batch calls accelerator.backward {len(micro_batch.losses)} times"
                raise NeverSupportedSchedule(problem)
            return micro_batch.losses.pop()

        last = len(functions) - 1
        found = self.engine.backward_together(
            [functools.partial(run, function, is_last=index == last) for index, function in enumerate(functions)]
        )
        if isinstance(found, str):
            return False
        self.engine.set_gradient_accumulation_boundary(True)
        self._has_backward = True
        return True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As accelerate's: no effect before the last micro-batch of a step."""
        super().zero_grad(set_to_none)
        self._has_backward &= not self.gradient_state.sync_gradients

    def norm_to_come(self) -> torch.Tensor:
        """A 0-d fp64 tensor on the CPU, NaN so far. The next `step` writes the norm of gradients into it."""
        self._latest_norm = torch.full((), float("nan"), dtype=torch.float64, device="cpu")
        return self._latest_norm

    def step(self, closure: Any = None) -> None:
        """As accelerate's: no effect before the last micro-batch of a step."""
        if not self.gradient_state.sync_gradients:
            return
        if self._has_backward and closure is None:
            self._has_backward = False
            self.engine.set_gradient_accumulation_boundary(True)
            self.engine.step()
            self.engine.set_gradient_accumulation_boundary(None)
        else:  # the script has called `loss.backward()` itself
            self.optimizer.step(closure)
        norm = self.engine.get_global_grad_norm()
        if self._latest_norm is not None and norm is not None:
            self._latest_norm.fill_(norm)
        self._latest_norm = None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the step was skipped because gradients were not finite."""
        return self.engine.was_step_skipped()


def _cast(dtype: torch.dtype, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast inputs if the model has weights of ``dtype``, also after its engine was closed."""
    return cast((args, kwargs), dtype) if any(each.dtype is dtype for each in model.parameters()) else (args, kwargs)


class _Placeholder(dict[str, torch.Tensor]):
    """In place of the weights of an engine's model, in the list that accelerate's save hooks get."""


def _drop_placeholders(models: Any, weights: Any, output_dir: str) -> None:
    weights[:] = [each for each in weights if not isinstance(each, _Placeholder)]


class InfinityAccelerator(Accelerator):  # type: ignore[misc]
    """``Accelerator`` whose `prepare` makes an engine for each optimizer and its model.

        accelerator = InfinityAccelerator(infinity_config="ds_config.json", gradient_accumulation_steps=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    The rest of a script stays as it is: `backward`, `accumulate`, `clip_grad_norm_`, `save_state`, `load_state`,
    `get_state_dict`, `unwrap_model`, `save_model`. Numbers are those of accelerate alone, bit for bit. `prepare`
    returns the model itself. Models without an optimizer stay in memory. After its engine is closed, a model is an
    ordinary one.
    """

    _accumulates = True
    """Whether accelerate counts micro-batches. False for a Trainer, which counts them itself."""
    _models: list[Any]
    _optimizers: list[Any]
    _all: tuple[Sequence[Any], Sequence[Any]] = (), ()
    """``_models`` and ``_optimizers`` of accelerate, while they lack what engines hold: see `_without_engines`."""

    def __init__(self, *args: Any, infinity_config: ConfigSource, **kwargs: Any) -> None:
        """
        Args:
            args, kwargs: of ``Accelerator``.
            infinity_config: the engine's config: path of a JSON file, or a dict. `gradient_accumulation_steps` and
                "auto" are filled in from the arguments. 16-bit weights need "bf16" or "fp16" in it: without them,
                ``mixed_precision="bf16"`` is accelerate's autocast over fp32 weights.

        Raises:
            ConfigError: config and arguments contradict each other.
        """
        super().__init__(*args, **kwargs)
        if self.num_processes != num_processes():
            raise ConfigError(
                f"accelerate counts {self.num_processes} process(es), and {num_processes()} train together, so each would get "
                "the same data. Without a GPU pass cpu=True (TrainingArguments(use_cpu=True))"
            )
        self._engines: list[Engine] = []
        # Engines that `prepare` has made: `free_memory` closes them. `_engines` has adopted ones as well.
        self._made: list[Engine] = []
        self._num_made = 0
        self._unloaded: list[Engine] = []
        """Engines that have resumed a durable run, while the script has loaded no state."""
        # The models among the arguments of the running `prepare`.
        self._candidates: list[nn.Module] = []
        steps = self.gradient_accumulation_steps
        settings = [
            Setting("gradient_clipping", 0.0, "clip_grad_norm_", True, must_match=False),
            Setting("train_micro_batch_size_per_gpu", "auto", "the loader", True, must_match=False),
            Setting("gradient_accumulation_steps", steps, "gradient_accumulation_steps", True, self._accumulates),
            GRADIENTS_STAY,
            *(
                Setting(f"{name}.enabled", self.mixed_precision == name, "mixed_precision", must_match=False)
                for name in ("bf16", "fp16")
            ),
        ]
        # accelerate knows which micro-batch is the last one of a step, so the engine must not count them.
        self.infinity_config = agreed(infinity_config, settings, drops=["managed_gradient_accumulation"])
        if self.mixed_precision == "fp16" and self.infinity_config.loss_scaling is None:
            raise ConfigError(
                'mixed_precision="fp16" would scale losses outside of the engine. Add "fp16": {"enabled": true} to '
                "the config: the engine scales them then",
                key="fp16.enabled",
            )
        autocast = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(
            self.infinity_config.autocast_dtype or torch.float32
        )
        if autocast is not None and self.mixed_precision != autocast:
            raise ConfigError(
                f"config key 'torch_autocast' is switched on, and mixed_precision is {self.mixed_precision!r}. Pass "
                f"mixed_precision={autocast!r}: accelerate runs the model under autocast",
                key="torch_autocast.enabled",
            )
        self.register_save_state_pre_hook(self._save_engines)
        self.register_load_state_pre_hook(self._load_engines)

    # ------------------------------------------------------------------------------------------------------------ prepare

    @property
    def engines(self) -> list[Engine]:
        """The open engines, in the order in which they were made."""
        return [engine for engine in self._engines if not engine.is_closed]

    @property
    def engine(self) -> Engine | None:
        """The only open engine; None if there are several or none."""
        found = self.engines
        return found[0] if len(found) == 1 else None

    def engine_of(self, model: Any) -> Engine | None:
        """The engine that holds this very model."""
        return next((engine for engine in self.engines if engine.module is model), None)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As accelerate's. Each optimizer and its model get an engine.

        Raises:
            InfinityError: as `infinity.initialize`.
        """
        if any(isinstance(each, DummyOptim | DummyScheduler) for each in args):
            problem = "prepare got a DummyOptim or DummyScheduler, which stands for one of DeepSpeed's config"
            raise ModelError(problem, cure="Make the optimizer and the scheduler in the script, and pass those")
        self._candidates = [each for each in args if isinstance(each, nn.Module)]
        self._refuse_several(args)
        try:
            made = {id(each): self._make_engine(each) for each in args if self._is_for_engine(each)}
            # Engines first: accelerate then looks up a scheduler's optimizer among the prepared ones.
            return super().prepare(*[made.get(id(each), each) for each in args], device_placement=device_placement)
        finally:
            self._candidates = []

    def _refuse_several(self, args: Sequence[Any]) -> None:
        """Raise if several optimizers have parameters of one model."""
        optimizers = [each for each in args if self._is_for_engine(each)]
        groups = [{id(p) for group in each.param_groups for p in group["params"]} for each in optimizers]
        for model in [*self._candidates, *self._models]:
            own = set(map(id, model.parameters()))
            num = sum(bool(own & members) for members in groups)
            if num > 1:
                raise ModelError(
                    f"prepare got {num} optimizers with parameters of one {type(model).__name__}, and an engine has one",
                    cure="Put all parameters into one, in groups of their own",
                )

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As accelerate's. The model must have been prepared before."""
        prepared = self._make_engine(optimizer) if self._is_for_engine(optimizer) else optimizer
        return super().prepare_optimizer(prepared, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As accelerate's.

        Raises:
            ConfigError: the config has a scheduler as well.
        """
        refuse_second(self.infinity_config, "scheduler", f"prepare got a {type(scheduler).__name__}")
        return super().prepare_scheduler(scheduler)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """As accelerate's. For a model that an engine holds, device and precision are the engine's."""
        engine = self.engine_of(model)
        if engine is None:
            return super().prepare_model(model, device_placement, evaluation_mode)
        if str(getattr(self.state.dynamo_plugin, "backend", "NO")).rpartition(".")[2] != "NO":
            problem = "accelerate would compile the whole model"
            raise ModelError(problem, cure="Compile its blocks one by one before prepare")
        if engine.config.compute_dtype is torch.float32:
            # With several processes, accelerate would wrap it in DDP. evaluation_mode avoids that: the engine averages.
            return super().prepare_model(model, False, evaluation_mode or self.num_processes > 1)
        if not any(each is model for each in self._models):
            self._models.append(model)
            # 16-bit weights need inputs of their dtype. The script calls the model itself, not the engine, which would
            # cast them.
            hook = functools.partial(_cast, engine.config.compute_dtype)
            model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        return model

    def _is_for_engine(self, optimizer: Any) -> bool:
        return isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, AcceleratedOptimizer)

    def _make_engine(self, optimizer: torch.optim.Optimizer) -> Any:
        refuse_second(self.infinity_config, "optimizer", f"prepare got a {type(optimizer).__name__}")
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        known = [*self._candidates, *self._models]
        for model in known:
            if self.engine_of(model) is None and any(id(parameter) in own for parameter in model.parameters()):
                # Parameters of the optimizer that are not this model's: an engine has one model.
                rest = own.difference(map(id, model.parameters()))
                if any(id(parameter) in rest for other in known for parameter in other.parameters()):
                    raise ModelError(
                        f"prepare got a {type(optimizer).__name__} with parameters of several models, and an engine has one",
                        cure="Put the models into one (nn.ModuleList) before prepare, or make an optimizer for each",
                    )
                config = engine_files.config_of(self.infinity_config, self._num_made)
                engine, *_ = initialize(model=model, optimizer=optimizer, config=config, device=self.device)
                self._made.append(engine)
                self._num_made += 1
                self._unloaded += [engine] if engine_files.has_resumed(engine) else []
                return self.adopt(engine)
        problem = f"prepare got a {type(optimizer).__name__}, and no model has its parameters"
        raise ModelError(problem, cure="Pass model and optimizer to the same accelerator.prepare(...)")

    def adopt(self, engine: Engine, *, defers_norms: bool = False) -> EngineOptimizer | None:
        """Add an engine. Returns its optimizer as accelerate's, if it has one.

        ``defers_norms``: whether `clip_grad_norm_` may return a tensor that gets its value in the optimizer's step.
        """
        self._engines.append(engine)
        return EngineOptimizer(engine, defers_norms=defers_norms) if engine.optimizer is not None else None

    def close(self, engine: Engine) -> None:
        """Close an engine, and remove it."""
        if engine in self._engines:  # a Trainer makes another accelerator for each trial
            self._engines.remove(engine)
        engine.close()

    def free_memory(self, *objects: Any) -> Any:
        """As accelerate's. Closes the engines that `prepare` has made: see `Engine.close`."""
        while self._made:
            engine = self._made.pop()
            if engine in self._engines:
                self.close(engine)
        return super().free_memory(*objects)

    # ----------------------------------------------------------------------------------------------------------- the loop

    def _optimizer(self) -> EngineOptimizer | None:
        # With several engines it is not known whose loss it is. accelerate's own `loss.backward()` then reaches each
        # engine by the hooks of its parameters.
        found = [each for each in self._optimizers if isinstance(each, EngineOptimizer) and not each.engine.is_closed]
        return found[0] if len(found) == 1 else None

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As accelerate's: the loss is divided by the accumulation steps."""
        optimizer = self._optimizer()
        others = sorted(kwargs.keys() - {"retain_graph"})
        if others and _present.get() is not None:
            raise NeverSupportedSchedule(f"accelerator.backward is called with {', '.join(others)}")
        if optimizer is None:
            super().backward(loss, **kwargs)
            return
        if any(each is optimizer.engine for each in self._unloaded):
            engine_files.refuse_to_begin(
                optimizer.engine, "accelerator.backward()", loading="Call accelerator.load_state(...) first"
            )
        loss = loss / self.gradient_accumulation_steps
        if others:  # arguments that only torch's backward has
            optimizer.engine.scale(loss).backward(**kwargs)
        else:
            optimizer.backward(loss, is_last=self.sync_gradients, retain_graph=kwargs.get("retain_graph", False))

    @property
    def sync_gradients(self) -> bool:
        """As accelerate's: whether the present micro-batch is the last of its step."""
        micro_batch = _present.get()
        return bool(super().sync_gradients) if micro_batch is None else micro_batch.is_last

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        Accelerator.sync_gradients.fset(self, value)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients, and return their norm before.

        With ``gradient_clipping`` in the config, the engine clips in the step, and this only returns the norm.

        Raises:
            ConfigError: the config has another limit.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        limit = optimizer.engine.config.gradient_clipping
        is_infinite = max_norm == float("inf")
        # `max_norm=inf` only asks for the norm. The engine clips in the step, to the limit of the config.
        if limit and not is_infinite and (limit != max_norm or norm_type != 2):
            raise ConfigError(
                f"clip_grad_norm_ is called with {max_norm}, and config key 'gradient_clipping' is {limit}. Set them alike, or "
                "remove the key",
                key="gradient_clipping",
            )
        if optimizer.defers_norms and norm_type == 2 and (limit or is_infinite):
            # The engine computes the norm in the step anyway. Here it would have to read all gradients once more.
            return optimizer.norm_to_come()
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if limit or is_infinite:
            return nn.utils.get_total_norm([each.grad for each in found if each.grad is not None], norm_type)
        return nn.utils.clip_grad_norm_(found, max_norm, norm_type=norm_type)

    # ------------------------------------------------------------------------------------------------------------- saving

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's. Engines write their models and optimizers, streamed, to ``infinity`` in its directory."""
        if any(isinstance(each, EngineOptimizer) and each.engine.is_closed for each in self._optimizers):
            logger.warning(
                "accelerator.save_state: an engine is already closed, so its optimizer state is not saved. Call "
                "save_state before engine.close()"
            )
        last = self.register_save_state_pre_hook(_drop_placeholders)  # after those of the script
        with self._without_engines(last):
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As accelerate's. It also loads what accelerate alone has saved, which is in memory for a moment."""
        last = self.register_load_state_pre_hook(self._drop_loaded)  # after those of the script
        with self._without_engines(last):
            super().load_state(*args, **kwargs)
        self._unloaded.clear()

    @contextlib.contextmanager
    def _without_engines(self, hook: Any) -> Iterator[None]:
        """Inside the ``with`` block, accelerate lacks what engines hold. At its end, ``hook`` is removed."""
        kept = self._all = self._models, self._optimizers
        try:
            # accelerate would read the state dicts of these models and optimizers into memory.
            self._models = [each for each in self._models if self.engine_of(each) is None]
            self._optimizers = [each for each in self._optimizers if not isinstance(each, EngineOptimizer)]
            yield
        finally:
            self._models, self._optimizers = kept
            hook.remove()

    def _save_engines(self, models: Any, weights: Any, output_dir: str) -> None:
        # The script's hooks run next, with all models. A hook may write a model itself, and remove its weights from the
        # list by position: so engines' models have placeholders in it, which the last hook removes.
        models[:] = self._all[0]
        others = iter(list(weights))
        weights[:] = [_Placeholder() if self.engine_of(each) is not None else next(others) for each in models]
        for index, engine in enumerate(self.engines):
            engine_files.save_engine(engine, output_dir, index)

    def _load_engines(self, found: Any, input_dir: str) -> None:
        found[:] = self._all[0]  # the script's hooks run next
        for index, engine in enumerate(self.engines):
            if engine_files.has_checkpoint(input_dir, index):
                engine_files.load_engine(engine, input_dir, index)

    def _drop_loaded(self, found: Any, input_dir: str) -> None:
        loaded = [each for index, each in enumerate(self.engines) if engine_files.has_checkpoint(input_dir, index)]
        others = [None, *(each for each in self.engines if each not in loaded)]
        # accelerate goes on with these list objects, and finds a model's file by its position in them
        found[:] = [each for each in found if self.engine_of(each) in others]
        self._optimizers[:] = [each for each in self._all[1] if getattr(each, "engine", None) in others]

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """As accelerate's: safetensors under the model's own names. An engine's model is streamed."""
        engine = self.engine_of(model)
        if engine is None or not safe_serialization:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
        else:
            engine.save_16bit_model(save_directory, max_shard_size=max_shard_size)
