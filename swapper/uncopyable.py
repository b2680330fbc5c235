"""Base classes of objects that own files, memory or threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, SupportsIndex


class Uncopyable:
    """Refuses copies, which would release the same resource a second time."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise for ``copy.copy``, ``copy.deepcopy`` and ``pickle``, which all call this."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it owns files, memory or threads, and a copy "
            "would release them a second time; share the object, or make another one"
        )


class Closable(Uncopyable):
    """A context manager that is closed when its ``with`` block ends."""

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
    """Call ``close(*args)`` if the block raises.

    For the time between opening something and the end of the constructor whose object will close it.
    """
    try:
        yield
    except BaseException:
        close(*args)
        raise
