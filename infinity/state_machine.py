"""State machines: an enum of states, and a table that says which method leads from which state to which.

[Note: debug mode] With ``INFINITY_DEBUG=1`` in the environment, each method that changes a state is checked against its
table: the state before, when it is called, and the state after, when it returns. The tests run in debug mode.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar, cast

IS_DEBUG = os.environ.get("INFINITY_DEBUG", "0") not in ("", "0")


_Method = TypeVar("_Method", bound=Callable[..., Any])


def moves(table: Mapping[str, Mapping[Any, Enum]]) -> Callable[[_Method], _Method]:
    """Decorate a method that changes ``state`` of its object, as the table says under the method's name.

    Args:
        table: method -> state before -> state after. In debug mode anything else is a `RuntimeError`.
    """

    def decorate(method: _Method) -> _Method:
        # Read in every mode: a method that its table does not name is a KeyError at import.
        leads = table[method.__name__]
        if not IS_DEBUG:
            return method  # unwrapped: it runs several times per module and step

        @functools.wraps(method)
        def checked(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            # `state` is a property computed from fields, so it has to be read before the method changes them.
            before = owner.state
            if before not in leads:
                raise RuntimeError(f"{method.__qualname__} of {owner!r}, which is {before.name}")
            result = method(owner, *args, **kwargs)
            if owner.state is not leads[before]:
                raise RuntimeError(
                    f"{method.__qualname__} led {owner!r} from {before.name} to {owner.state.name}, not {leads[before].name}"
                )
            return result

        return cast(_Method, checked)

    return decorate
