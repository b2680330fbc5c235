"""`deepspeed`, as far as scripts and libraries need it: everything is `infinity`'s.

On ``sys.path`` only where somebody asked for it, see `infinity.as_deepspeed`. The version is that of the DeepSpeed whose
names these are.
"""

import importlib.metadata
import sys
from typing import Any

import torch

from infinity import *  # noqa: F403
from infinity import deepspeed_modules
from infinity.zero import ZeroParamStatus

__version__ = importlib.metadata.version("deepspeed")
version = __version__

deepspeed_modules.install(sys.modules[__name__])
# What an autograd function's backward gets of a weight that it has saved is no parameter here, but has its values (TRL asks).
setattr(torch.Tensor, "ds_status", ZeroParamStatus.AVAILABLE)  # noqa: B010


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'deepspeed' has no attribute '{name}'. {deepspeed_modules.why_absent(name)}")
