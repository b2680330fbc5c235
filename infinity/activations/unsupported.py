"""Why something cannot be kept, or computed once more."""

from __future__ import annotations


class UnsupportedSchedule(Exception):
    """The inputs of a block cannot be kept, or its forward cannot be repeated from them. The message says why.

    Never reaches the user: the step is done in the ordinary order instead, and the message stands in its report.
    """


class NeverSupportedSchedule(UnsupportedSchedule):
    """It would be the same in each step."""
