"""Exceptions that say why a step cannot go vertically."""

from __future__ import annotations


class UnsupportedSchedule(Exception):
    """The inputs of a block cannot be kept, or its forward cannot be repeated from them. The message says why.

    The user never gets it: the step runs in the ordinary order instead, and its report has the message.
    """


class NeverSupportedSchedule(UnsupportedSchedule):
    """The reason holds for all later steps, too, so none is tried again."""
