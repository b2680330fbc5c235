"""Caches of keys and values that a library hands to every block, though training has no use for them."""

from __future__ import annotations

from typing import Any


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with empty caches of transformers replaced by None.

    A cache is filled by the call: a second call would find its own keys in it. Transformers leaves it out for the same
    reason when it recomputes a layer itself.
    """
    if not any(_is_empty_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    args = tuple(None if _is_empty_cache(value) else value for value in args)
    kwargs = {name: None if _is_empty_cache(value) else value for name, value in kwargs.items()}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return args, kwargs


def _is_empty_cache(value: Any) -> bool:
    if not any(
        kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(value).__mro__
    ):
        return False
    return bool(value.get_seq_length() == 0)
