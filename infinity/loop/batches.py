"""Batches, losses, and the call of the model under autocast and with cast inputs."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from copy import copy as shallow_copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from infinity.config import InfinityConfig
from infinity.errors import StepError
from infinity.metrics.reporter import Reporter
from infinity.torch_internals.operations import leaves, replaced


def call_with(function: Any, batch: Any) -> Any:
    """Call ``function`` with a batch: a mapping as keyword arguments, a tuple or list as arguments, else as one
    argument."""
    if isinstance(batch, Mapping):
        return function(**batch)
    if isinstance(batch, tuple | list):
        return function(*batch)
    return function(batch)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output: ``.loss``, ``["loss"]``, the first of a tuple, or the output itself.

    Raises:
        StepError: there is none.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        loss = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(loss, torch.Tensor):
        raise StepError.order(
            "engine.train_batch()",
            f"the model returned no loss but {type(output).__name__}",
            cure='Return a scalar tensor, an object with ".loss", or a tuple that begins with the loss',
        )
    return loss


def size_of(batch: Any) -> tuple[int, int | None] | None:
    """Samples and tokens of a micro-batch: the leading size of its first tensor that has one, and the elements of its first
    matrix of whole numbers (token ids, padding included; None without one). None: it has no such tensor."""
    # 0-dim tensors are options and the like, not samples.
    found = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not found:
        return None
    ids = [t.numel() for t in found if t.ndim == 2 and not t.is_floating_point() and t.dtype != torch.bool]
    return found[0].shape[0], ids[0] if ids else None


def move(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; the containers keep their types."""
    if device.type == "cpu":
        return batch
    # transformers' BatchEncoding is a mapping with a `to` of its own, which keeps its class.
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [move(value, device) for value in batch]
        # A named tuple takes its fields one by one.
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch.to(device) if hasattr(batch, "to") else batch


def cast(values: Any, dtype: torch.dtype) -> Any:
    """The values with the floating-point tensors among them in ``dtype``; containers keep their types."""
    return replaced(
        values, lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
    )


def copied(batch: Any) -> Any:
    """The batch with its tensors and containers copied: an iterator may fill the same memory again for the next one.

    A tensor that is in it twice stays one. What requires a gradient, and objects of other classes, stay as they are.
    """
    return _copied(batch, {})


def _copied(batch: Any, known: dict[int, torch.Tensor]) -> Any:
    # Not one function that calls itself: its cell would keep the copies until the garbage collector runs.
    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            if id(value) not in known:
                known[id(value)] = value.clone()
            return known[id(value)]
        if isinstance(value, MutableMapping):  # of a class that torch's trees do not know
            clone = shallow_copy(value)
            clone.update({key: _copied(item, known) for key, item in value.items()})
            return clone
        return value.copy() if isinstance(value, np.ndarray) else value

    return tree_map(copy, batch)


class ModelCall:
    """Calls the model under the config's autocast, with its arguments cast if the config says so."""

    def __init__(self, module: nn.Module, config: InfinityConfig, device: torch.device, reporter: Reporter) -> None:
        """
        Args:
            module: the model.
            config: casts, and autocast.
            device: where it computes.
            reporter: is told of samples and tokens of each micro-batch that is trained with, see `size_of`.
        """
        self._module = module
        self._reporter = reporter
        self._autocast_dtype = config.autocast_dtype
        self._input_dtype = config.compute_dtype if config.casts_inputs else None
        self._device_type = device.type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        # Samples count towards throughput only where they are trained with.
        if torch.is_grad_enabled() and self._module.training and (size := size_of((args, kwargs))) is not None:
            self._reporter.on_micro_batch(*size)
        if self._input_dtype is not None:
            args, kwargs = cast((args, kwargs), self._input_dtype)
        if self._autocast_dtype is None:
            return self._module(*args, **kwargs)
        with torch.autocast(self._device_type, self._autocast_dtype):
            return self._module(*args, **kwargs)
