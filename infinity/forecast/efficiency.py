"""How long a step takes, and how efficient it is, from what it computes and what it sends over which link.

Pure arithmetic. The efficiency is that of section 4 of the ZeRO-Infinity paper (arXiv 2104.07857): the time of computing
over that of computing and communicating, where nothing overlaps. A kind of data goes over one link after the other, in
pieces, so the slowest of its links counts; kinds go one after the other, and their times add up. With one kind and one link,
and a step that computes I operations per byte sent, that is I · bandwidth / (I · bandwidth + operations per second).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COMPUTE = "compute"


@dataclass(frozen=True)
class StepTime:
    """Of one rank.

    Attributes:
        compute_seconds: without any waiting.
        kinds: for each kind of data, the seconds that each link it goes over is busy with it.
    """

    compute_seconds: float
    kinds: Mapping[str, Mapping[str, float]]

    @property
    def communication_seconds(self) -> float:
        """Where kinds follow each other."""
        return sum(max(links.values(), default=0.0) for links in self.kinds.values())

    @property
    def efficiency(self) -> float:
        """Between 0 and 1, where nothing overlaps: a lower bound."""
        return self.compute_seconds / self.seconds if self.seconds else 1.0

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Of the processors and of each link."""
        busy = {COMPUTE: self.compute_seconds}
        for links in self.kinds.values():
            for link, seconds in links.items():
                busy[link] = busy.get(link, 0.0) + seconds
        return busy

    @property
    def overlapped_seconds(self) -> float:
        """Of a step in which everything overlaps, as an engine's plan has it: the busiest decides. A lower bound."""
        return max(self.busy_seconds.values())

    @property
    def seconds(self) -> float:
        """Of a step in which nothing overlaps."""
        return self.compute_seconds + self.communication_seconds

    @property
    def overlapped_efficiency(self) -> float:
        """Between 0 and 1, where everything overlaps: an upper bound."""
        return self.compute_seconds / self.overlapped_seconds if self.overlapped_seconds else 1.0

    @property
    def bound_by(self) -> str:
        """What is busiest."""
        busy = self.busy_seconds
        return max(busy, key=lambda name: busy[name])
