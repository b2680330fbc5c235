"""A contiguous byte range of a volume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from swapper.config import round_up
from swapper.sync.callbacks import log_raised

NameOf = Callable[[int, int], str]
"""``name_of(start, stop)`` returns, for error messages, what is stored in these bytes of an extent."""


class ExtentState(Enum):
    """The state of an extent. The comments say who owns its space."""

    LIVE = "live"  # its holder
    FREEING = "freeing"  # requests that still run; new ones are refused
    FREED = "freed"  # the allocator


@dataclass(slots=True, eq=False, repr=False)
class Extent:
    """A byte range of a volume. Made by ``Swapper.allocate``.

    Attributes:
        name: What error messages call it.
        num_bytes: Usable size: the requested one rounded up to 4096.
        requested_bytes: The size that was asked for.
        start: Its first byte in the volume, a multiple of 4096.
        owner: The swapper it belongs to.
        state: See :class:`ExtentState`.
        is_prewritten: It may be read before it is written, since an earlier swapper has written its bytes.
        name_of: See :data:`NameOf`.
    """

    name: str
    start: int
    requested_bytes: int
    owner: object
    is_prewritten: bool = field(default=False, kw_only=True)
    name_of: NameOf | None = field(default=None, kw_only=True)
    state: ExtentState = field(default=ExtentState.LIVE, init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = round_up(self.requested_bytes)

    def __repr__(self) -> str:
        return f"Extent({self.name!r}, {self.num_bytes} bytes at {self.start}, {self.state.value})"

    def contents(self, start: int, stop: int) -> str:
        """Return what is stored in the bytes ``[start, stop)``; empty without ``name_of``."""
        if self.name_of is None:
            return ""
        try:
            return self.name_of(max(0, start), min(stop, self.requested_bytes))  # the padding behind has no name
        except BaseException as error:  # of a user's function, which is called while an error is made
            log_raised(error, f"naming what lies in bytes {start} to {stop} of extent {self.name!r}")
            return ""
