"""Objects of which there can be only one: they own files, memory or threads."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from swapper.errors import NotCopyableError


class Uncopyable:
    """Knows that a copy would own the same resource a second time, and release it a second time."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse ``copy.copy``, ``copy.deepcopy`` and ``pickle`` in words."""
        raise NotCopyableError(type(self).__name__)
