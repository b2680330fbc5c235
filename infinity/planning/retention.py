"""The space that the commits of a durable run take on its drives, and how many of them there is space for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Pure arithmetic.

    Attributes:
        present_bytes: the states as they are, and room for writes under way.
        commit_bytes: what a step writes of them, which each commit that is kept takes besides.
        num_kept: so many commits are kept at the most.
        room_bytes: what the drives have for all of it; None: no limit, or nobody has looked.
    """

    present_bytes: int
    commit_bytes: int
    num_kept: int
    room_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.present_bytes + self.num_kept * self.commit_bytes

    @property
    def num_fitting(self) -> int | None:
        """So many commits the drives have room for; None: as many as are wanted."""
        if self.room_bytes is None or not self.commit_bytes:
            return None
        return max(self.room_bytes - self.present_bytes, 0) // self.commit_bytes

    def __str__(self) -> str:
        kept = f"{self.num_kept} commit{'s' if self.num_kept > 1 else ''}"
        told = f"{megabytes(self.present_bytes)} of states, and {megabytes(self.commit_bytes)} for each of {kept}"
        return told if self.num_fitting is None else f"{told} (the drives have room for {self.num_fitting:,})"

    def cure(self) -> str | None:
        """What a config that keeps too much is to be; None if fewer commits do not help."""
        fitting = self.num_fitting
        if not fitting or fitting >= self.num_kept:
            return None
        return (
            f"keep_last and keep_every keep {self.num_kept} commits, of which the drives have room for {fitting}. Set "
            f"infinity.keep_last to {fitting} without keep_every, which keeps as many again"
        )


def megabytes(num_bytes: int) -> str:
    """In words, as plans say it."""
    return f"{num_bytes / 1e6:,.1f} MB"
