"""The dtype that modules of Lightning say they have. DeepSpeed casts a model by its methods, which keep it up to date."""

from __future__ import annotations

import torch
from torch import nn


def note_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """The weights of ``model`` have this dtype now: ``module.dtype`` of each module of Lightning in it says so."""
    for module in model.modules():
        if any(cls.__name__ == "_DeviceDtypeModuleMixin" for cls in type(module).__mro__):
            module._dtype = dtype  # type: ignore[assignment]  # its property has no setter, and `to` would cast buffers
