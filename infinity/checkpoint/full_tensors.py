"""Single parameters' full fp32 values, states and gradients, under DeepSpeed's names.

For a parameter that no engine holds, they use its own data and gradient. Copies are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.loop.parameter_handler import ParameterHandler
from infinity.units.parameter import PagedView, host_of


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of the fp32 main weight, of the parameter's shape. None if it is frozen, as in DeepSpeed."""
    access = _access_of(param)
    if access is None:
        return param.detach().float().cpu().clone()
    return access.gather_main_weight(param) if param.requires_grad else None


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the fp32 main weight; the model weight becomes its cast.

    Raises:
        ValueError: ``value`` has another shape; nothing has been changed.
    """
    access = _access_of(param)
    if access is not None:
        access.load_main_weight(param, value.detach())
        return
    if value.shape != param.shape:
        raise ValueError(f"value has shape {tuple(value.shape)}, but the parameter has shape {tuple(param.shape)}")
    with torch.no_grad():
        param.copy_(value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A copy of an element-wise state ("exp_avg"), fp32, of the parameter's shape; None before the first update."""
    found = _required_access(param).gather_state(param).get(optim_state_key)
    return found if isinstance(found, torch.Tensor) else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace one element-wise state; the parameter's others stay as they are.

    Raises:
        ValueError: ``value`` has another shape, or the parameter has no such state yet; nothing has been changed.
    """
    access = _required_access(param)
    state = access.gather_state(param)
    if optim_state_key not in state:
        raise ValueError(f"the parameter has no state '{optim_state_key}'. It has {', '.join(state) or 'none yet'}")
    access.load_state(param, {**state, optim_state_key: value})


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of the gradient, fp32, between backward and step; None without one.

    Raises:
        AccessError: as reading ``param.grad`` does.
    """
    gradient = param.grad
    return None if gradient is None else gradient.detach().float().cpu().clone()


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient between backward and step.

    Raises:
        AccessError: as assigning ``param.grad`` does.
        ValueError: ``value`` has another shape.
    """
    gradient = param.grad
    # torch requires a gradient on the device that the parameter reports. copy=True: the script may go on to change
    # `value`.
    dtype = torch.float32 if gradient is None else gradient.dtype
    param.grad = value.detach().to(param.device if gradient is None else gradient.device, dtype, copy=True)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """As `safe_get_full_fp32_param`, 1-D: the whole on every rank, where DeepSpeed gives the rank's shard."""
    return _flat(safe_get_full_fp32_param(param) if param.requires_grad else None)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """As `safe_set_full_fp32_param`, from as many elements in any shape.

    Raises:
        ValueError: there are not as many; nothing has been changed.
    """
    safe_set_full_fp32_param(param, _shaped(param, value))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """As `safe_get_full_optimizer_state`, 1-D, on every rank."""
    return _flat(safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """As `safe_set_full_optimizer_state`, from as many elements in any shape.

    Raises:
        ValueError: there are not as many, or the parameter has no such state yet; nothing has been changed.
    """
    safe_set_full_optimizer_state(param, _shaped(param, value), optim_state_key)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """As `safe_get_full_grad`, 1-D.

    Raises:
        AccessError: as reading ``param.grad`` does.
    """
    return _flat(safe_get_full_grad(param))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """As `safe_set_full_grad`, from as many elements in any shape.

    Raises:
        AccessError: as assigning ``param.grad`` does.
        ValueError: there are not as many.
    """
    safe_set_full_grad(param, _shaped(param, value))


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace gradients between backward and step, one after the other, by ``update_func(gradient, parameter)``.

    Args:
        param_list: parameters without a gradient are skipped.
        update_func: from the gradient (fp32, of the parameter's shape) to the new one.

    Raises:
        AccessError: as reading ``param.grad`` does.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _flat(found: torch.Tensor | None) -> torch.Tensor | None:
    return None if found is None else found.flatten()


def _shaped(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    if value.numel() != param.numel():
        raise ValueError(f"value has {value.numel()} elements, but the parameter has {param.numel()}")
    return value.reshape(param.shape)


def _access_of(param: nn.Parameter) -> Any:
    """What reads and writes a held parameter (``infinity.engine.consistent_access``); None if no engine holds it."""
    host = host_of(param)
    # A `PagedView` stands for a part of a paged weight, such as `p.data`: it has values, but no main weight and no
    # states.
    if host is None or isinstance(param, PagedView):
        return None
    if not isinstance(host, ParameterHandler) or host.gatherer is None:
        raise ModelError("the engine that holds this parameter is not ready")
    return host.gatherer


def _required_access(param: nn.Parameter) -> Any:
    """As `_access_of`, but raises `ModelError` if no engine holds the parameter."""
    access = _access_of(param)
    if access is None:
        raise ModelError(
            "no engine holds this parameter, so its optimizer state is not known here. Read it from your optimizer: "
            "optimizer.state[parameter]"
        )
    return access
