"""The call of the model itself, with what the config puts around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity.config import InfinityConfig
from infinity.loop.batches import cast, size_of


class ModelCall:
    """Calls the model under the config's autocast, with its arguments cast if the config says so."""

    def __init__(
        self,
        module: nn.Module,
        config: InfinityConfig,
        device: torch.device,
        note_size: Callable[[int, int | None], None],
    ) -> None:
        """
        Args:
            module: the model.
            config: casts, and autocast.
            device: where it computes.
            note_size: called with samples and tokens of each micro-batch that is trained with, see `size_of`.
        """
        self._module = module
        self._note_size = note_size
        self._autocast_dtype = config.autocast_dtype
        self._input_dtype = config.compute_dtype if config.casts_inputs else None
        self._device_type = device.type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        if torch.is_grad_enabled() and self._module.training and (size := size_of((args, kwargs))) is not None:
            self._note_size(*size)
        if self._input_dtype is not None:
            args, kwargs = cast((args, kwargs), self._input_dtype)
        if self._autocast_dtype is None:
            return self._module(*args, **kwargs)
        with torch.autocast(self._device_type, self._autocast_dtype):
            return self._module(*args, **kwargs)
