"""`infinity.initialize`: checks model and config, then builds the engine around the model.

The file is not named ``initialize.py``: importing it would replace the function of that name in the package.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from infinity.config import ConfigSource, InfinityConfig, load_config
from infinity.config.ranks import check_same_config
from infinity.config.schema.directories import make_directories, remove_empty
from infinity.device.compute import ComputeDevice, choose_device, device_for
from infinity.device.drive_tensors import has_drive_tensors, write_out
from infinity.distributed.agreement import require_same
from infinity.distributed.collectives import Ranks
from infinity.distributed.dtensors import LocalParameters, mesh_of_parameters
from infinity.distributed.meshes import Mesh, mesh_of
from infinity.distributed.process_groups import init_distributed, local_rank, num_processes
from infinity.distributed.world import world
from infinity.engine.engine import Engine, engine_behind
from infinity.engine.parts import Parts
from infinity.engine.run_notes import RunNotes
from infinity.errors import BudgetTooSmallError, ConfigError, ModelError
from infinity.machine.bandwidth_cache import with_measured_io
from infinity.metrics.monitors import Monitors
from infinity.optim.facade.paged_optimizer import PagedOptimizer, PassedOptimizer, begin_anew
from infinity.optim.groups import TiledGroups
from infinity.optim.lr_schedules import build_scheduler
from infinity.optim.scheduler_state import STATE_NOT_SAVED, has_state_methods, needs_samples
from infinity.optim.wrapped_optimizer import WrappedOptimizer, no_optimizer, wrap_optimizer
from infinity.plan.inputs import experts_of_config
from infinity.plan.placement import DEVICE_KEY
from infinity.torch_internals.module_tensors import announce_nothing
from infinity.units.model_check import check_model, warn_of_gaps, warn_of_other_dtypes
from infinity.units.parameter import host_of
from infinity.units.tiling import Tiling

logger = logging.getLogger(__name__)


def initialize(
    model: nn.Module,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: str | Path | dict[str, Any] | InfinityConfig | None = None,
    mesh_param: Any = None,
    device: torch.device | str | None = None,
    *,
    engine_class: type[Engine] = Engine,
) -> tuple[Engine, Any, DataLoader[Any] | None, Any]:
    """Move a model's weights and optimizer states to where the config says, and return an engine that trains it.

    Args:
        model: the model, with its weights, in any floating dtype, in memory or built in `Init`. Its parameters stay the
            same objects.
            A model that another engine holds is refused, with two exceptions. Without an optimizer and with empty
            ``model_parameters`` you get that engine, which evaluates too (Lightning does this after training). And an
            engine that only evaluates is closed for one that trains (TRL does this before training).
        optimizer: a ``torch.optim.Optimizer`` over the model's parameters, a class, or a callable that takes parameters
            or groups and returns one. An instance becomes the engine's optimizer, and is returned, until ``engine.close()``.
            None: the config's. Without either, or with nothing to train, the engine evaluates only, and the second
            result is None.
        model_parameters: parameters or parameter groups for an optimizer that is not an instance. None: all trainable ones.
        training_data: a data set; the third result is then its loader, see ``engine.data_loader``. As in DeepSpeed,
            each epoch has the same order unless you call ``loader.data_sampler.set_epoch(epoch)``.
        lr_scheduler: a torch scheduler, or a callable that takes the optimizer. None: the config's, if it has one. The engine
            steps it, except ReduceLROnPlateau, which needs a metric. If ``step`` of any other scheduler needs an
            argument, it gets the samples of a step, as in DeepSpeed.
        mpu: DeepSpeed's argument; its data-parallel group must be all processes.
        mesh_param: if your script gives each process a part of the model (tensor parallelism, pipeline stages): a
            ``DeviceMesh`` of all processes, with dimensions named dp, tp and pp. Not needed if the model's own DTensors
            are divided among all processes, which then get the same data. See the guide for several processes.
        collate_fn: for the loader.
        config: path of a JSON file, the name of a ready config ("zero3_nvme"), a dict, or what `load_config` gave.
        device: compute device. None: the model's GPU, else the current GPU, else the CPU. With several processes, each
            takes the GPU of its local rank, unless your script has set another one.
        engine_class: of the engine; `infinity.deepspeed.initialize` gives its own.

    Returns:
        engine, optimizer, loader (None without ``training_data``), lr scheduler (None without one).

    Raises:
        ConfigError: config key, value and cure.
        ModelError: what about the model, and the cure.
        OptimizerNotPageableError: the optimizer's name and why.
    """
    if config is None:
        raise ConfigError("no config: pass config= (the path of a JSON file, or a dict) to infinity.initialize")
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}", cure="Pass model=")
    # All ranks reach this collective before anything is changed: if their configs differ, all of them raise.
    resolved, mesh = _agreed(config, model, mpu, mesh_param)
    earlier = _earlier(model, trains=optimizer is not None or resolved.optimizer is not None)
    if earlier is not None and _is_empty(model_parameters) and isinstance(earlier, engine_class):
        return earlier, None, None, None
    with contextlib.ExitStack() as undo:  # whatever fails on the way, an interrupt too, leaves the model as it was
        # DTensors are replaced by their local parts first: the layout below knows plain tensors only.
        local_parts = LocalParameters(model, mesh)
        undo.callback(_restore_parts, local_parts, optimizer)
        _check(model, resolved, mesh)
        compute_device = device_for(choose_device(model, device, local_rank()))
        # Listed before tiling takes large weights out of the model, so that groups keep torch's order.
        parameters = list(model.parameters())
        if local_parts and isinstance(optimizer, torch.optim.Optimizer):
            local_parts.replace_in(optimizer)
        if local_parts and model_parameters is not None:
            model_parameters = local_parts.of(model_parameters)
        tiling = _tile(model, optimizer, resolved, undo)
        # Named after tiling, when each tile is a parameter with an FQN of its own.
        fqns = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
        named = [(fqns[id(parameter)], parameter) for parameter in tiling.groups.with_tiles(parameters)]
        members = tiling.groups.with_tiles(model_parameters)
        wrapped_optimizer = _wrapped_optimizer(
            optimizer, resolved, named, members, compute_device.torch_device, tiling.groups
        )
        # Only the directories that this call makes are removed again if it fails.
        undo.callback(remove_empty, make_directories(resolved.nvme_paths))
        notes, monitors = _outputs(resolved, undo, trains=bool(wrapped_optimizer.param_groups))
        # I/O settings that the config leaves open are those that `infinity profile` measured on these drives.
        resolved = with_measured_io(resolved)
        # The wrapper's constructor took freshly initialized states out of the optimizer. If `Parts` fails early, only
        # this puts them back; `take_model` pushes restore_states, which does the same.
        undo.callback(wrapped_optimizer.restore_untouched)
        with _out_of_memory_in_words(resolved, compute_device, model):
            parts = Parts(model, resolved, wrapped_optimizer, compute_device, mesh, undo)
            # For the engine's close, which has to follow what `take_model` pushes, and the engine comes after that.
            built = undo.enter_context(contextlib.ExitStack())
            originals = parts.take_model(undo)
            engine = engine_class(parts)
            built.callback(engine.close, restore_weights=False)
        # From here on the script's own instance is a PagedOptimizer: schedulers and trainers that hold it keep working.
        is_passed = isinstance(optimizer, torch.optim.Optimizer)
        if is_passed and isinstance(engine.optimizer, PagedOptimizer):
            _adopt_optimizer(engine, optimizer, wrapped_optimizer, undo)
        if engine.optimizer is not None:
            for parameter, gradient in originals.gradients():  # as in torch, the first backward adds to them
                parameter.grad = gradient.cpu()
            engine.lr_scheduler = _scheduler(lr_scheduler, resolved, engine.optimizer)
        # After the engine is built: until now the tiles were the model's parameters, now modules show the whole
        # weights.
        tiling.show()
        if training_data is not None:
            engine.training_dataloader = engine.data_loader(training_data, collate_fn=collate_fn)
        restore = functools.partial(_restore, tiling, local_parts, wrapped_optimizer.optimizer if is_passed else None)
        # Last, because it loads the newest commit of a durable run, which needs the scheduler and the loader.
        engine.begin_run(restore, notes, monitors)
        undo.pop_all()
    if resolved.notices:
        logger.info("config keys accepted without effect:\n  %s", "\n  ".join(resolved.notices))
    logger.info("config:\n%s", resolved.describe())
    logger.info("plan:\n%s", engine.plan)
    if resolved.compute_dtype is not torch.float32:
        _set_module_dtype(model, resolved.compute_dtype)
    # No undo any more: release what was only kept to put the model back.
    originals.forget()
    if not has_drive_tensors():
        announce_nothing()  # `Init` has replaced methods of torch, for models that lie on drives
    wrapped_optimizer.forget_untouched()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _check(model: nn.Module, config: InfinityConfig, mesh: Mesh) -> None:
    """Refuse what cannot be trained, warn of what is odd, and see that all processes begin with the same weights."""
    check_model(model)
    # With bf16 or fp16 the model is cast on purpose. In fp32, 16-bit weights mean that the config's block is missing.
    if config.compute_dtype == torch.float32:
        warn_of_other_dtypes(model)
    warn_of_gaps(model)
    # Like DDP: rank 0's weights and buffers go to all ranks of the data-parallel group.
    _share_weights(model, mesh.data)
    write_out()  # what a model that was built on drives still has in memory


def _share_weights(model: nn.Module, ranks: Ranks) -> None:
    """Copy parameters and buffers of rank 0 to all ranks, as DDP does.

    Raises:
        RankError: names, shapes, dtypes or trained parameters differ between ranks. Nothing has been changed then.
    """
    if ranks.num == 1:
        return
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        tensors.setdefault(name, buffer)
    # Another model on a rank would be a hang, or a wrong shape, in one of the broadcasts below.
    facts = {
        f"tensor '{name}'": f"number {number}, {tuple(t.shape)} {t.dtype} {'trained' if t.requires_grad else 'not trained'}"
        for number, (name, t) in enumerate(tensors.items())
    }
    require_same(ranks, "the model of infinity.initialize", facts, cure="Build the same model on all ranks")
    for name, tensor in tensors.items():
        ranks.broadcast_from(f"infinity.initialize, '{name}'", 0, tensor.data)


def _outputs(config: InfinityConfig, undo: contextlib.ExitStack, *, trains: bool) -> tuple[RunNotes, Monitors]:
    """Log and curves. An engine that evaluates beside one that trains leaves the log to that."""
    # One log for all ranks.
    notes = RunNotes(config.infinity.run_log if world().index == 0 and trains else None)
    undo.callback(notes.abandon)
    monitors = Monitors(config.monitors)
    undo.callback(monitors.close)
    return notes, monitors


def _earlier(model: nn.Module, *, trains: bool) -> Engine | None:
    """The engine that the model has, if a new one is not to train. One that only evaluates makes room for one that ``trains``."""
    earlier = engine_of(model)
    # An engine around a larger or smaller module than this one: `check_model` refuses it with its own message.
    if earlier is None or earlier.module is not model:
        return None
    if not trains:
        return earlier
    if earlier.optimizer is None:
        logger.info("the engine that evaluated this model was closed; a new one trains it")
        earlier.close_for_next()
    return None


@contextlib.contextmanager
def _out_of_memory_in_words(config: InfinityConfig, device: ComputeDevice, model: nn.Module) -> Iterator[None]:
    """The device's memory that ends inside the ``with`` block is a budget that is too large."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = device.free_bytes(model) or 0
        raise BudgetTooSmallError(
            DEVICE_KEY,
            budget_bytes=config.infinity.device_memory_budget or free,
            minimum_bytes=free,
            reason=f"{device.torch_device} ran out of memory in initialize: {error}",
            cure="Set it below the free memory, free memory on the device, or offload more (offload_param, "
            "offload_optimizer)",
        ) from error


def _adopt_optimizer(
    engine: Engine, optimizer: Any, wrapped_optimizer: WrappedOptimizer, undo: contextlib.ExitStack
) -> None:
    """The script's own optimizer becomes the engine's."""
    # It may have been passed to an engine that is closed now, whose states are gone.
    begin_anew(optimizer)
    passed = PassedOptimizer(optimizer, wrapped_optimizer.optimizer, engine.optimizer)
    undo.callback(passed.restore, had_states=False)
    engine.adopt_optimizer(passed)


def _set_module_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """``module.dtype`` of each module of Lightning in the model says what dtype its weights have now.

    Lightning keeps it up to date by its methods that cast, such as ``module.bfloat16()``, which nobody has called here.
    """
    # Found by name, so that Lightning need not be installed.
    for module in model.modules():
        if any(cls.__name__ == "_DeviceDtypeModuleMixin" for cls in type(module).__mro__):
            module._dtype = dtype  # type: ignore[assignment]  # its property has no setter, and `to` would cast buffers


def _agreed(config: ConfigSource, model: nn.Module, mpu: Any, mesh_param: Any) -> tuple[InfinityConfig, Mesh]:
    """The config, as all processes have it, and who has which part of the model."""
    if num_processes() > 1:
        # The mesh below is built of process groups, so torch.distributed has to be up.
        init_distributed()
        if mpu is None and mesh_param is None:
            mesh_param = mesh_of_parameters(model)
    mesh = mesh_of(mpu, mesh_param)
    resolved = load_config(config, world_size=mesh.data.num)
    # `load_config` of the script derived batch sizes for a number of ranks. Tensor and pipeline ranks get the same
    # data, so only data-parallel ranks count.
    if resolved.world_size != mesh.data.num:
        raise ConfigError(
            f"the config was loaded for {resolved.world_size} processes, and {mesh.data.num} train together, each on its own "
            "data. Pass its source "
            "to infinity.initialize, or world_size= to infinity.load_config"
        )
    check_same_config(resolved, mesh.everyone if mesh.is_divided else mesh.data)
    return resolved, mesh


def _tile(model: nn.Module, optimizer: Any, config: InfinityConfig, undo: contextlib.ExitStack) -> Tiling:
    tiling = Tiling(model, config.infinity.tile_above, config.compute_dtype.itemsize, config.nvme_paths)
    undo.callback(_untile, tiling, optimizer)
    experts = experts_of_config(model, config)
    tiling.cut_experts(experts, touched_only=config.infinity.experts == "touched_only")
    # An instance already holds the whole weights in its groups; a class gets the tiles when it is called.
    if isinstance(optimizer, torch.optim.Optimizer) and tiling.groups.tiled:
        tiling.groups.put_tiles(optimizer)
    return tiling


def _untile(tiling: Tiling, optimizer: Any) -> None:
    # Before the tiles go: the groups are matched by the tiles that are in them.
    if isinstance(optimizer, torch.optim.Optimizer) and tiling.groups.tiled:
        tiling.groups.remove_tiles(optimizer)
    tiling.undo()


def _restore(tiling: Tiling, parts: LocalParameters, optimizer: Any) -> None:
    # In reverse of `initialize`, which first takes local parts of DTensors and then tiles them.
    _untile(tiling, optimizer)
    _restore_parts(parts, optimizer)


def _restore_parts(parts: LocalParameters, optimizer: Any) -> None:
    parts.undo()
    if isinstance(optimizer, torch.optim.Optimizer):
        parts.restore_in(optimizer)


def _is_empty(items: Any) -> bool:
    return isinstance(items, Sized) and len(items) == 0


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that holds a model, or a part of it; None if there is none.

    For a script that has no name for it any more: ``infinity.engine_of(model).close()``.
    """
    # Any held parameter will do: a model whose other parameters came later has an engine, too.
    host = next((host for parameter in model.parameters() if (host := host_of(parameter)) is not None), None)
    return None if host is None else engine_behind(host)


def _wrapped_optimizer(
    optimizer: Any,
    config: InfinityConfig,
    named: list[tuple[str, nn.Parameter]],
    model_parameters: Iterable[Any] | None,
    device: torch.device,
    tiled: TiledGroups,
) -> WrappedOptimizer:
    # As in DeepSpeed, an optimizer that is passed wins over the config's.
    source = optimizer if optimizer is not None else config.optimizer
    has_any = model_parameters is not None or any(parameter.requires_grad for _, parameter in named)
    # A passed instance has groups of its own, so it is asked for even if all of the model is frozen now.
    if source is None or not (has_any or isinstance(source, torch.optim.Optimizer)):
        logger.info("the engine evaluates only: %s", "no optimizer is named" if source is None else "nothing to train")
        return no_optimizer(named, device)
    if optimizer is None and config.optimizer is not None and "lr" in config.optimizer.autos:
        # "auto" is only replaced by transformers, accelerate and our Trainer.
        raise _left_open("optimizer.params.lr", "optimizer")
    return wrap_optimizer(source, named, device, model_parameters=model_parameters, tiled=tiled)


def _left_open(key: str, argument: str) -> ConfigError:
    problem = (
        'transformers, accelerate and InfinityTrainer replace "auto" by a number, and this script uses none of them'
    )
    return ConfigError.value(key, "auto", problem, cure=f"Write a number, or pass {argument}= to initialize")


def _scheduler(lr_scheduler: Any, config: InfinityConfig, optimizer: torch.optim.Optimizer) -> Any:
    if lr_scheduler is None:
        if config.scheduler is None:
            return None
        if "warmup_num_steps" in config.scheduler.autos:
            raise _left_open("scheduler.params.warmup_num_steps", "lr_scheduler")
        return build_scheduler(config.scheduler, optimizer)
    # DeepSpeed also takes a function that makes the scheduler, because its optimizer is made by initialize.
    made = lr_scheduler
    if not isinstance(made, torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau):
        made = lr_scheduler(optimizer) if callable(lr_scheduler) else lr_scheduler
    if made is not None and not has_state_methods(made):
        logger.warning(STATE_NOT_SAVED, type(made).__qualname__)
    if made is not None and needs_samples(made):
        logger.warning(
            "%s.step needs an argument: engine.step() passes the samples of a step (train_batch_size), as DeepSpeed does, "
            "unless it gets lr_kwargs",
            type(made).__name__,
        )
    return made
