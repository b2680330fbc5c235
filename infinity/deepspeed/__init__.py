"""DeepSpeed's names, answered by this engine: ``import infinity.deepspeed as deepspeed``, and a script for DeepSpeed runs.

    engine, optimizer, loader, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=parameters)

Modules are found under DeepSpeed's names, too: ``from infinity.deepspeed.ops.adam import FusedAdam``. With
`infinity.as_deepspeed` all of it is called ``deepspeed``, in libraries as well. The rest of `infinity` uses nothing of this.
"""

import importlib
from typing import TYPE_CHECKING, Any

from infinity.deepspeed.contents.constants import VERSION
from infinity.deepspeed.path import PATH

if TYPE_CHECKING:
    from infinity.deepspeed.contents import checkpointing, comm, zero
    from infinity.deepspeed.contents import comm as dist
    from infinity.deepspeed.contents.accelerator import get_accelerator
    from infinity.deepspeed.contents.config import DeepSpeedConfig
    from infinity.deepspeed.contents.messages import log_dist, logger
    from infinity.deepspeed.contents.small_functions import OnDevice, add_config_arguments
    from infinity.deepspeed.engine import DeepSpeedEngine
    from infinity.deepspeed.entry import initialize
    from infinity.distributed.process_groups import init_distributed
    from infinity.errors import ConfigError as DeepSpeedConfigError
    from infinity.optim.facade.paged_optimizer import PagedOptimizer as DeepSpeedOptimizer

__version__ = version = VERSION
__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.partition("+")[0].split("."))
__git_hash__ = git_hash = __git_branch__ = git_branch = None

__path__.append(PATH)  # Python's imports then ask the finder of `path.py`


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'", name=name)
    # The import adds DeepSpeed's names to this module, at the first use: it needs torch and the engine. `from . import`
    # would call this function again, for "modules".
    modules = importlib.import_module(f"{__name__}.modules")
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'. {modules.why_absent(name)}", name=name)


__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "OnDevice",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "dist",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "zero",
]
