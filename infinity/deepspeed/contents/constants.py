"""Names of keys that scripts import from DeepSpeed in place of the texts themselves. Pure texts."""

from __future__ import annotations

VERSION = "0.19.8+infinity"
"""That of the DeepSpeed whose names these are; the metadata of the stand-in says it as well."""

_RANGE_TEST = ("min_lr", "step_rate", "step_size", "staircase")
_CYCLE = ("first_step_size", "first_stair_count", "second_step_size", "second_stair_count", "min_lr", "max_lr")
_DECAY = ("step_size", "lr_rate", "mom_rate")
_WARMUP = ("min_lr", "max_lr", "num_steps", "type", "min_ratio")
_SCHEDULE_KEYS = (
    *(f"lr_range_test_{key}" for key in _RANGE_TEST),
    *(f"cycle_{key}" for key in (*_CYCLE, "min_mom", "max_mom")),
    *(f"decay_{key}" for key in _DECAY),
    *(f"warmup_{key}" for key in _WARMUP),
    "cos_min_ratio",
    "total_num_steps",
)

LR_SCHEDULES = {
    **{key.upper(): key for key in _SCHEDULE_KEYS},
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LINEAR_RATE": "linear",
}
"""Those of ``runtime.lr_schedules``."""

_ONE_BIT = ("onebit_adam", "onebit_lamb", "zero_one_adam")
_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", *_ONE_BIT, "muadam", "muadamw", "musgd", "lion", "muon")
DEEPSPEED_OPTIMIZERS = [name.replace("_", "") for name in _OPTIMIZERS]
"""Names of optimizers that a config may have in any case of letters, those that are refused among them."""

OPTIMIZERS = {
    **{f"{name.upper()}_OPTIMIZER": name.replace("_", "") for name in _OPTIMIZERS},
    "DEEPSPEED_OPTIMIZERS": DEEPSPEED_OPTIMIZERS,
    "TORCH_ADAM_PARAM": "torch_adam",
    "ADAM_W_MODE": "adam_w_mode",
    "ADAM_W_MODE_DEFAULT": True,
}
"""Those of ``runtime.config``."""
