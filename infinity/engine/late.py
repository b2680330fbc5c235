"""The upper parts of an engine, for the lower ones, which are made before them and tell them things."""

from __future__ import annotations

from typing import Generic, TypeVar

from infinity.gradients.listener import GradientListener
from infinity.paging.listener import PagerListener, WeightWriter
from infinity.paging.parameter_handler import Gatherer, GradientHost

Part = TypeVar("Part")


class Late(Generic[Part]):
    """A part that is not there yet. Lower parts get this in their constructors, and call it for the one there is by now."""

    def __init__(self, until_then: Part) -> None:
        self._part = until_then
        self._is_connected = False

    def connect(self, part: Part) -> None:
        """It is ``part`` from now on, for good."""
        if self._is_connected:
            raise RuntimeError(f"{type(self._part).__name__} is connected already")
        self._part, self._is_connected = part, True

    def __call__(self) -> Part:
        """The part; before `connect`, what stands for it."""
        return self._part


class UpperParts:
    """All of them. See [How the engine hears of things] in ``infinity.paging.listener``."""

    def __init__(self) -> None:
        self.pager_listener = Late(PagerListener())
        self.gradient_listener = Late(GradientListener())
        self.writer: Late[WeightWriter | None] = Late(None)
        self.gradient_host: Late[GradientHost | None] = Late(None)
        self.gatherer: Late[Gatherer | None] = Late(None)
