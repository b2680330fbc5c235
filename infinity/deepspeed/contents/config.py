"""DeepSpeed's class for configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from infinity.config import ConfigSource, InfinityConfig, load_config
from infinity.config.reading import tidy, validate
from infinity.config.schema.block import Findings
from infinity.config.schema.blocks import RootBlock
from infinity.deepspeed.contents.names import TABLE

_NAMES = TABLE["config"]


class DeepSpeedConfig(Mapping[str, Any]):
    """A config with DeepSpeed's attributes (``zero_config.stage``, ``fp16_enabled``, ...).

    As a mapping it is the JSON. Setting attributes does not change an engine.
    """

    def __init__(self, config: ConfigSource, mpu: Any = None, mesh_device: Any = None) -> None:
        """
        Args:
            config: the path of a file, or the config as a dict or text.
            mpu, mesh_device: give the number of processes with their own data.

        Raises:
            ConfigError: config key, value and cure.
        """
        read = load_config(config, world_size=_num_data_ranks(mpu, mesh_device), check_storage=False)
        root: Any = validate(tidy(read.source, Findings()))  # inert keys have no types
        self._param_dict = dict(read.source)
        self.world_size = read.world_size
        # Attributes that show a key of the JSON, and attributes that the engine's config has under the same name.
        for key, name in _NAMES["attributes"].items():
            setattr(self, name, getattr(root, key))
        for name in _NAMES["decided"]:
            setattr(self, name, getattr(read, name))
        vars(self).update(_of_precision(read, root) | _of_zero(read, root) | _of_optimizer(read))
        mode = root.checkpoint.tag_validation
        self.checkpoint_tag_validation_enabled, self.checkpoint_tag_validation_fail = mode != "ignore", mode == "fail"
        self.load_universal_checkpoint = root.checkpoint.load_universal
        self.use_node_local_storage = root.checkpoint.use_node_local_storage
        self.monitor_config = read.monitors
        self.sparse_gradients_enabled = root.sparse_gradients
        self.elasticity_enabled = self.pld_enabled = self.eigenvalue_enabled = self.curriculum_enabled_legacy = False

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, key: str) -> Any:
        return self._param_dict[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._param_dict)

    def __len__(self) -> int:
        return len(self._param_dict)


def _num_data_ranks(mpu: Any, mesh_device: Any) -> int | None:
    if mpu is not None:
        return int(mpu.get_data_parallel_world_size())
    return None if mesh_device is None else int(mesh_device["data_parallel"].size())


def _of_precision(read: InfinityConfig, root: RootBlock) -> dict[str, Any]:
    scaling = {name: getattr(root.fp16, key) for key, name in _NAMES["loss_scaling"].items()}
    # The config has the exponent (`initial_scale_power`), DeepSpeed's loss scaler takes the scale.
    scaling["init_scale"] = 2 ** scaling["init_scale"]
    has_dtype = "communication_data_type" in root.model_fields_set
    has_scaling = root.fp16.enabled and _NAMES["loss_scaling"].keys() & root.fp16.model_fields_set
    return {
        "fp16_enabled": read.compute_dtype == torch.float16,
        "bfloat16_enabled": read.compute_dtype == torch.bfloat16,
        "fp16_auto_cast": root.fp16.auto_cast,
        "amp_enabled": False,
        "torch_autocast_enabled": read.autocast_dtype is not None,
        "torch_autocast_dtype": read.autocast_dtype or torch.bfloat16,
        "loss_scale": root.fp16.loss_scale,
        "initial_dynamic_scale": 1.0 if read.loss_scaling is None else read.loss_scaling.initial,
        "dynamic_loss_scale_args": scaling if has_scaling else None,
        "communication_data_type": read.communication_dtype if has_dtype else None,
        "grad_accum_dtype": root.data_types.grad_accum_dtype,
    }


def _of_zero(read: InfinityConfig, root: RootBlock) -> dict[str, Any]:
    block = root.zero_optimization
    values = {name: getattr(block, name) for name in type(block).model_fields}
    # DeepSpeed's attributes have no prefix: `stage3_max_live_parameters` of the JSON is
    # `zero_config.max_live_parameters`.
    values |= {name.removeprefix("stage3_"): value for name, value in values.items()} | {"stage": read.zero_stage}
    values |= {name: None for name in ("offload_param", "offload_optimizer") if name not in block.model_fields_set}
    return {
        "zero_config": SimpleNamespace(**values),
        "zero_optimization_stage": read.zero_stage,
        "zero_enabled": read.zero_stage > 0,
        "mics_shard_size": values["mics_shard_size"],
    }


def _of_optimizer(read: InfinityConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, section in (("optimizer", read.optimizer), ("scheduler", read.scheduler)):
        found[f"{what}_name"] = None if section is None else section.type
        found[f"{what}_params"] = None if section is None else dict(section.params)
    if str(found["optimizer_name"]).lower() in TABLE["constants"]["runtime.config"]["DEEPSPEED_OPTIMIZERS"]:
        found["optimizer_name"] = found["optimizer_name"].lower()
    return found
