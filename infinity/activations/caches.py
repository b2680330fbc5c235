"""Caches of keys and values that a library hands to every block, though training has no use for them."""

from __future__ import annotations

from typing import Any

from torch import nn


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
