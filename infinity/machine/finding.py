"""Findings of `infinity doctor`: what was found, what it means for a training, and what would help."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a finding means for a training."""

    GOOD = "good"
    NOTE = "note"
    """Neither: good to know."""
    POOR = "poor"
    """It works, and more would be possible."""
    BAD = "bad"
    """It prevents a training."""


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        verdict: what it means.
        what: its subject.
        text: what was found.
        cure: what would help; empty if nothing is to be done.
        directory: its directory; empty if it concerns none.
    """

    verdict: Verdict
    what: str
    text: str
    cure: str = ""
    directory: str = ""


# In the order of `Verdict`: good("memory", "64 GB") is Finding(Verdict.GOOD, "memory", "64 GB").
good, note, poor, bad = (functools.partial(Finding, verdict) for verdict in Verdict)
