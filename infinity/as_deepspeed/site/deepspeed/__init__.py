"""`deepspeed`, as far as scripts and libraries need it: everything is `infinity`'s.

On ``sys.path`` only where somebody asked for it, see `infinity.as_deepspeed`. The version is that of the DeepSpeed whose
names these are.
"""

import functools
import importlib.metadata
import sys
from typing import Any

import torch

import infinity
from infinity import *  # noqa: F403
from infinity import deepspeed_modules
from infinity.zero import ZeroParamStatus

__version__ = importlib.metadata.version("deepspeed")
version = __version__

deepspeed_modules.install(sys.modules[__name__])


@functools.wraps(infinity.initialize)  # type: ignore[no-redef]
def initialize(args: Any = None, model: Any = None, optimizer: Any = None, *others: Any, **options: Any) -> Any:
    """As `infinity.initialize`; an engine that has trained this very model is closed for another one that trains it.

    A checkpoint that is missing is no error to the engine, as with DeepSpeed. Libraries close none of their own: Lightning's
    second ``fit`` of a model, and that after ``lr_find``.
    """
    earlier = infinity.engine_of(model) if isinstance(model, torch.nn.Module) else None
    trains = optimizer is not None or bool(options.get("model_parameters"))
    if trains and earlier is not None and earlier.module is model and earlier.optimizer is not None:
        earlier.hand_over()
    made = infinity.initialize(args, model, optimizer, *others, **options)
    made[0].tolerate_missing_checkpoints()
    return made


# What an autograd function's backward gets of a weight that it has saved is no parameter here, but has its values (TRL asks).
setattr(torch.Tensor, "ds_status", ZeroParamStatus.AVAILABLE)  # noqa: B010


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'deepspeed' has no attribute '{name}'. {deepspeed_modules.why_absent(name)}")
