"""Refuses models that cannot be taken over, before anything is written."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from infinity.errors import MetaParameterError, ModelInUseError, NoTrainableParameterError, UnsupportedModelError
from infinity.parameter import PagedParameter, ResidentParameter, host_of


def check_model(model: nn.Module) -> None:
    """Check modules and parameters.

    Raises:
        ModelError: a subclass says what is wrong with which module or parameter, and the cure.
    """
    for fqn, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedModelError(
                f"module '{fqn}' has max_norm, which changes its weight inside forward",
                cure="Set max_norm=None and renormalise inside `with infinity.GatheredParameters(...)` between steps",
                fqn=fqn,
            )
        compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if compiled or isinstance(module, torch.jit.ScriptModule):
            how = "torch.jit" if isinstance(module, torch.jit.ScriptModule) else "torch.compile"
            raise UnsupportedModelError(
                f"module '{fqn or type(module).__name__}' was compiled with {how}, which hides its accesses to parameters",
                cure="Pass the model as it was before compiling",
                fqn=fqn,
            )
    parameters = list(model.named_parameters())
    meta = [fqn for fqn, parameter in parameters if parameter.is_meta]
    if meta:
        raise MetaParameterError(meta[0], num_others=len(meta) - 1)
    for fqn, parameter in parameters:
        if isinstance(parameter, PagedParameter | ResidentParameter) or host_of(parameter) is not None:
            raise ModelInUseError(fqn)
        if parameter.is_sparse or type(parameter) is not nn.Parameter:
            raise UnsupportedModelError(
                f"parameter '{fqn}' is a {type(parameter).__name__}{' (sparse)' if parameter.is_sparse else ''}",
                cure="Only dense torch.nn.Parameter can be paged: materialise or convert it first",
                fqn=fqn,
            )
        if parameter.requires_grad and parameter.is_complex():
            raise UnsupportedModelError(
                f"trainable parameter '{fqn}' is complex",
                fqn=fqn,
                cure="Keep it as two real parameters (torch.view_as_real)",
            )
    _check_memory(parameters)
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise NoTrainableParameterError(num_parameters=len(parameters))


def _check_memory(parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that look at the same memory: they would be torn apart."""
    spans = sorted(
        (parameter.untyped_storage().data_ptr(), parameter.data_ptr(), parameter.data_ptr() + _extent(parameter), fqn)
        for fqn, parameter in parameters
        if parameter.numel()
    )
    for (storage, _, stop, first), (other, start, _, second) in itertools.pairwise(spans):
        if storage == other and start < stop:
            raise UnsupportedModelError(
                f"parameters '{first}' and '{second}' are different objects over the same memory",
                cure="Tie them by assigning one nn.Parameter to both places, or clone one of them",
                fqn=second,
            )


def _extent(parameter: nn.Parameter) -> int:
    last = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
    return (last + 1) * parameter.element_size()
