"""`deepspeed`, as far as scripts and libraries need it: everything is `infinity.deepspeed`'s.

On ``sys.path`` only where somebody asked for it, see `infinity.as_deepspeed`.
"""

import sys

import torch

from infinity.deepspeed import __git_branch__, __git_hash__, __version__, modules, version
from infinity.deepspeed.path import explained
from infinity.units.parameter import ZeroParamStatus

modules.install(sys.modules[__name__])
__getattr__ = explained(__name__)

# What an autograd function's backward gets of a weight that it has saved is no parameter here, but has its values (TRL asks).
setattr(torch.Tensor, "ds_status", ZeroParamStatus.AVAILABLE)  # noqa: B010

__all__ = ["__git_branch__", "__git_hash__", "__version__", "version"]
