"""The version and the enums of DeepSpeed that scripts look at."""

from __future__ import annotations

from enum import Enum, IntEnum

VERSION = "0.19.8+infinity"
"""The version of DeepSpeed whose names are provided. The stand-in's metadata has the same."""

# `type=str`: members compare equal to texts, and print as DeepSpeed's do.
OffloadDeviceEnum = Enum("OffloadDeviceEnum", {"none": "none", "cpu": "cpu", "nvme": "nvme"}, type=str)
_STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
OffloadStateTypeEnum = Enum("OffloadStateTypeEnum", [(name, name) for name in _STATES], type=str)  # type: ignore[misc]
ZeroStageEnum = IntEnum(
    "ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
)
