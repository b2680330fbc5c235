"""The call of the model itself, with what the config puts around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infinity.config import InfinityConfig
from infinity.loop.batches import cast


class ModelCall:
    """Calls the model under the config's autocast, with its arguments cast if the config says so."""

    def __init__(self, module: nn.Module, config: InfinityConfig, device: torch.device) -> None:
        """``module``: the model; ``device``: where it computes."""
        self._module = module
        self._autocast_dtype = config.autocast_dtype
        self._input_dtype = config.compute_dtype if config.casts_inputs else None
        self._device_type = device.type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        if self._input_dtype is not None:
            args, kwargs = cast((args, kwargs), self._input_dtype)
        if self._autocast_dtype is None:
            return self._module(*args, **kwargs)
        with torch.autocast(self._device_type, self._autocast_dtype):
            return self._module(*args, **kwargs)
