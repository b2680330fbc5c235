"""`deepspeed`, as far as scripts and libraries need it: all names are those of `infinity.deepspeed`.

It is on ``sys.path`` only after `infinity.as_deepspeed`.
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

# TRL reads `ds_status` of weights that an autograd function has saved. In its backward these are ordinary tensors here,
# with their values: always available.
setattr(torch.Tensor, "ds_status", ZeroParamStatus.AVAILABLE)  # noqa: B010
