"""Activation checkpointing of blocks, by torch's non-reentrant checkpoint: the config's `activation_checkpointing`.

What is computed twice must not get the caches of keys and values that a library hands to every block: see `without_caches`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.paging.compiled_forwards import InPlaceOfMethod
from infinity.paging.saved_tensors import is_checkpointed
from infinity.torch_internals.names import in_backward
from infinity.units.unit import Unit


class RecomputedForward(InPlaceOfMethod):
    """Replaces the ``forward`` of a block: runs it under torch's non-reentrant checkpoint when the block is trained."""

    def __init__(
        self,
        module: nn.Module,
        inside_module: Callable[[Sequence[Unit]], AbstractContextManager[None]],
        units: Sequence[Unit],
    ) -> None:
        """
        Args:
            module: the block.
            inside_module: `ParameterCoordinator.inside_module`; holds the units while forward runs again.
            units: those that the block's hooks enter.
        """
        forward = module.forward
        super().__init__(module, "forward", forward)
        self.forward = forward
        """That of the block without checkpointing."""
        self._inside_module = inside_module
        self._units = list(units)
        self._layer = layer_of(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What is compiled becomes a part of a forward that is checkpointed as a whole.
        if torch.compiler.is_compiling() or not self._is_due():
            return self.forward(*args, **kwargs)
        args, kwargs = without_caches(args, kwargs, self._layer)
        if any(is_cache(value) for value in (*args, *kwargs.values())):
            return self.forward(*args, **kwargs)  # a second call would append its keys again
        return checkpoint(self._compute, *args, use_reentrant=False, **kwargs)

    def _is_due(self) -> bool:
        """False in evaluation, in a recomputation, and inside a checkpoint of the model's own."""
        module = self._module()
        if module is None or not module.training or not torch.is_grad_enabled() or in_backward():
            return False
        return not is_checkpointed()  # by the model or the script

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        # In forward, the block's hooks enter its unit. The recomputation calls `forward` without them.
        with self._inside_module(self._units) if in_backward() else nullcontext():
            return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.forward, memo)


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any], layer: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with caches of transformers that have nothing of a layer replaced by None.

    A cache is filled by the call: a second call would find its own keys in it. Transformers leaves it out for the same
    reason when it recomputes a layer itself.
    """
    # The very objects come back if there is nothing to replace.
    if not any(_is_empty_cache(value, layer) for value in (*args, *kwargs.values())):
        return args, kwargs
    args = tuple(None if _is_empty_cache(value, layer) else value for value in args)
    kwargs = {name: None if _is_empty_cache(value, layer) else value for name, value in kwargs.items()}
    if "use_cache" in kwargs:
        # Otherwise the layer makes a cache itself.
        kwargs["use_cache"] = False
    return args, kwargs


def is_cache(value: Any) -> bool:
    """Whether it is one of transformers'."""
    # By name, so that transformers need not be imported.
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(value).__mro__)


def layer_of(block: nn.Module) -> int:
    """Under which number a block of transformers finds its own part of a cache."""
    numbers = (getattr(module, "layer_idx", None) for module in block.modules())
    return next((number for number in numbers if isinstance(number, int)), 0)


def _is_empty_cache(value: Any, layer: int) -> bool:
    if not is_cache(value):
        return False
    if value.get_seq_length() == 0:
        return True
    try:
        # Length 0 of layer 0 means an empty cache. With another layer's keys in it already, this layer's part may still
        # be empty.
        return bool(layer and value.get_seq_length(layer) == 0)
    except ValueError:  # a layer of linear attention, which does not say
        return False
