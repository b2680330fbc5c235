"""A contiguous byte range of a volume."""

from __future__ import annotations

from enum import Enum

from swapper.config import round_up


class ExtentState(Enum):
    """Who owns the space of an extent."""

    LIVE = "live"  # its holder; reads and writes are taken
    FREEING = "freeing"  # requests that still run; no new ones are taken
    FREED = "freed"  # the volume again


LEGAL_EXTENT_TRANSITIONS = {
    ExtentState.LIVE: frozenset({ExtentState.FREEING}),
    ExtentState.FREEING: frozenset({ExtentState.FREED}),
    ExtentState.FREED: frozenset[ExtentState](),
}


class Extent:
    """Knows a byte range of a volume and who owns it; must not know what is stored there, files or threads.

    Made by ``Swapper.allocate``.

    Attributes:
        name: What error messages call it.
        num_bytes: Usable size: the requested one rounded up to 4096.
        requested_bytes: The size that was asked for.
        start: Its first byte in the volume, a multiple of 4096.
        owner: The swapper it belongs to.
        state: See :class:`ExtentState`.
    """

    __slots__ = ("name", "num_bytes", "owner", "requested_bytes", "start", "state")

    def __init__(self, name: str, start: int, requested_bytes: int, owner: object) -> None:
        self.name = name
        self.start = start
        self.requested_bytes = requested_bytes
        self.num_bytes = round_up(requested_bytes)
        self.owner = owner
        self.state = ExtentState.LIVE

    def __repr__(self) -> str:
        return f"Extent({self.name!r}, {self.num_bytes} bytes at {self.start}, {self.state.value})"

    def move_to(self, state: ExtentState) -> None:
        """Change the state; only legal transitions are possible."""
        if state not in LEGAL_EXTENT_TRANSITIONS[self.state]:
            raise RuntimeError(f"extent {self.name!r} cannot go from {self.state.value} to {state.value}")
        self.state = state
