"""`deepspeed`, as far as scripts and libraries need it: everything is `infinity.deepspeed`'s.

On ``sys.path`` only where somebody asked for it, see `infinity.as_deepspeed`.
"""

import sys

import torch

from infinity import deepspeed
from infinity.deepspeed import modules
from infinity.deepspeed.path import explained
from infinity.units.parameter import ZeroParamStatus

globals().update({name: value for name, value in vars(deepspeed).items() if "version" in name or "git" in name})
modules.install(sys.modules[__name__])
__getattr__ = explained(__name__)

# What an autograd function's backward gets of a weight that it has saved is no parameter here, but has its values (TRL asks).
setattr(torch.Tensor, "ds_status", ZeroParamStatus.AVAILABLE)  # noqa: B010
