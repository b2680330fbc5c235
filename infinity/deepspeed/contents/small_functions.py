"""DeepSpeed's helper functions that scripts use without an engine."""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import torch

from infinity.deepspeed.contents.accelerator import get_accelerator
from infinity.deepspeed.contents.messages import logger
from infinity.distributed.meshes import current_mesh
from infinity.distributed.process_groups import process_rank
from infinity.errors import ConfigError, ModelError, size

_PARTS = ("model_parallel", "slice_parallel", "tensor_model_parallel", "pipe_parallel", "pipeline_model_parallel")
_PART_SIZES = [f"get_{kind}_world_size" for kind in _PARTS]
"""Methods of an ``mpu`` that give numbers of parts, by the names of DeepSpeed and Megatron."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag for the script) and ``--deepspeed_config`` (a path, for ``args`` of `initialize`)."""
    group = parser.add_argument_group("DeepSpeed", "the config of infinity-offload, in DeepSpeed's format")
    group.add_argument("--deepspeed", default=False, action="store_true", help="a flag for the script's own use")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of a JSON config")
    # DeepSpeed still accepts these older names.
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


def set_random_seed(seed: int) -> None:
    """Seed python's, NumPy's and torch's generators."""
    random.seed(seed)
    # NumPy takes seeds of 32 bits, torch of 64 with a sign.
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed % (1 << 63))


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_``. With an engine, ``gradient_clipping`` of the config does it.

    Args:
        parameters: a tensor, or several.
        max_norm: largest norm.
        norm_type: of which kind.
        mpu: no effect if each process has the whole model.

    Returns:
        The norm before.

    Raises:
        ConfigError: processes have different parts of the model. Each part would be clipped by its own norm.
        AccessError: as reading ``param.grad`` does.
    """
    # An mpu has those that its version knows. One size above 1 means that each process sees only a part of the
    # gradients.
    sizes = [getattr(mpu, name)() for name in _PART_SIZES if callable(getattr(mpu, name, None))]
    if max(sizes, default=1) > 1 or (mpu is not None and current_mesh().is_divided):
        raise ConfigError(
            "clip_grad_norm_ with an mpu whose processes have different parts of the model: each part would be clipped by a "
            'norm of its own. Set "gradient_clipping" in the config, which takes the norm of all parts'
        )
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def see_memory_usage(message: str, force: bool = False, **_: Any) -> None:
    """With ``force``, the first process logs the used memory of its GPU and of the machine."""
    if force and process_rank() == 0:
        memory, accelerator = psutil.virtual_memory(), get_accelerator()
        of_gpu, of_machine = accelerator.memory_allocated(), memory.total - memory.available
        found = (size(each) for each in (of_gpu, accelerator.max_memory_allocated(), of_machine, memory.total))
        logger.info("%s: GPU %s (most so far %s), machine %s of %s", message, *found)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """An attribute of attributes, by its name with dots."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set such an attribute."""
    above, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, last, module)


def instrument_w_nvtx(func: Any) -> Any:
    """Returns ``func``: config key ``infinity.timeline`` shows what an engine does."""
    return func


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> Iterator[None]:
    """Inside the ``with`` block tensors are made on ``device``, and floating-point ones in ``dtype``."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def clone_tensors_for_torch_save(item: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns ``item``: its tensors do not share a larger storage, which ``torch.save`` would write as well."""
    return item


def is_zero_param(parameter: Any) -> bool:
    """Whether an engine or `infinity.deepspeed.zero.Init` holds the parameter."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def zero_wrapper_for_fp_tensor_constructor(fn: Any, *_: Any, **__: Any) -> Any:
    """Returns ``fn``. transformers replaces this function while it builds a model."""
    return fn


_orig_torch_arange = torch.arange


def has_moe_layers(m: Any) -> tuple[bool, int]:
    """(False, 0): DeepSpeed's MoE layer does not exist here."""
    return False, 0


def is_moe_param(param: Any) -> bool:
    """Whether ``param.allreduce`` is False, which marks a parameter of DeepSpeed's MoE layer."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    """The groups as a list, unchanged: DeepSpeed's MoE layer does not exist here.

    Raises:
        ModelError: a group has a parameter of such a layer.
    """
    groups: list[Any] = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = list(group["params"])
        if any(map(is_moe_param, group["params"])):
            raise ModelError(
                "a parameter has allreduce = False: it belongs to an expert that DeepSpeed places on some processes "
                "only",
                cure="Experts in a ModuleList need no groups of their own: only those that tokens are routed to are "
                "read",
            )
    return groups
