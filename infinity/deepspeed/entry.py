"""``deepspeed.initialize``: makes a `DeepSpeedEngine` from DeepSpeed's arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from infinity.config import ConfigSource
from infinity.deepspeed.contents.constants import VERSION
from infinity.deepspeed.contents.messages import log_dist
from infinity.deepspeed.engine import DeepSpeedEngine
from infinity.distributed.process_groups import init_distributed, num_processes
from infinity.distributed.world import world
from infinity.entry import engine_of
from infinity.entry import initialize as infinity_initialize
from infinity.errors import ConfigError


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
    device: torch.device | str | None = None,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """As `infinity.initialize`, with DeepSpeed's arguments.

    If another engine trains this model, it is closed first.

    Args:
        args: an object with ``deepspeed_config``, as DeepSpeed's launcher makes it, in place of ``config``.
        distributed_port, dist_init_required: no effect. The process group is the existing one, or is made by the
            launcher's environment variables.
        config_params: the config under DeepSpeed's older name.
        model, optimizer, model_parameters, training_data, lr_scheduler, mpu, collate_fn, config, mesh_param, device: see
            `infinity.initialize`.

    Raises:
        ConfigError, ModelError, OptimizerNotPageableError: as `infinity.initialize`.
    """
    log_dist(f"DeepSpeed info: version={VERSION}, git-hash=None, git-branch=None", ranks=[0])
    source = _only_config(args, config, config_params)
    if num_processes() > 1:
        init_distributed()
    check_accelerate_processes(world().num)
    # Libraries do not close their engines: Lightning calls this again for a second `fit`, and for `fit` after
    # `lr_find`.
    earlier = engine_of(model) if isinstance(model, nn.Module) else None
    trains = optimizer is not None or bool(model_parameters)
    if trains and earlier is not None and earlier.module is model and earlier.optimizer is not None:
        earlier.close_for_next()
    if device is None and torch.cuda.is_available() and getattr(args, "device_rank", None) is not None:
        device = torch.device("cuda", args.device_rank)
    made = infinity_initialize(
        model,  # type: ignore[arg-type]  # it raises if there is no model
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        mpu,
        collate_fn,
        source,
        mesh_param,
        device,
        engine_class=DeepSpeedEngine,
    )
    engine = cast(DeepSpeedEngine, made[0])
    if engine is not earlier:
        engine.set_arguments(optimizer, lr_scheduler, training_data, collate_fn)
    return engine, *made[1:]


def _only_config(args: Any, config: Any, config_params: Any) -> Any:
    given = {"config": config, "config_params": config_params}
    given |= {f"args.{name}": getattr(args, name, None) or None for name in ("deepspeed_config", "deepscale_config")}
    found = {name: value for name, value in given.items() if value is not None}
    # DeepSpeed takes a config from four places. Several are no error if they are the same.
    if not found:
        raise ConfigError("no config: pass config= (the path of a JSON file, or a dict) to deepspeed.initialize")
    first, *others = found
    for other in others:
        if str(found[first]) != str(found[other]):  # a path may be a str or a Path
            shown = " and ".join(f"{each} ('{found[each]!s:.200}')" for each in (first, other))
            raise ConfigError(f"two configs: {shown}. Pass one of them to deepspeed.initialize")
    return found[first]


def check_accelerate_processes(num: int) -> None:
    """Check that accelerate, if it uses "DeepSpeed", counts ``num`` processes as well.

    Raises:
        ConfigError: it counts others.
    """
    # Without a GPU, accelerate counts each process under DeepSpeed as the only one, and gives all ranks the same data.
    # Read from sys.modules: a script without accelerate must not import it.
    state: dict[str, Any] = getattr(
        getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None), "_shared_state", {}
    )
    if state.get("deepspeed_plugins") and state.get("num_processes", num) != num:
        raise ConfigError(
            f"accelerate counts {state['num_processes']} process(es), and {num} train together, so each would get the same data: "
            "without a GPU, accelerate knows several processes only where DeepSpeed is switched off. Take "
            "infinity.integrations (InfinityTrainer with use_cpu=True, InfinityAccelerator with cpu=True), or one process"
        )
