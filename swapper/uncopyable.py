"""Objects of which there can be only one: they own files, memory or threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, SupportsIndex


class Uncopyable:
    """Knows that a copy would own the same resource a second time, and release it a second time."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse ``copy.copy``, ``copy.deepcopy`` and ``pickle`` in words."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it owns files, memory or threads, and a copy would release "
            "them a second time; share the object itself, or make another one"
        )


class Closable(Uncopyable):
    """Knows that it is closed when a ``with`` block ends."""

    __slots__ = ()

    def close(self) -> None:
        """Release everything."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def closed_unless_made(close: Callable[..., Any], *args: Any) -> Iterator[None]:
    """What is made in here becomes the owner; if it cannot be made, ``close(*args)``."""
    try:
        yield
    except BaseException:
        close(*args)
        raise
