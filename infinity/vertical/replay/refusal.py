"""Why a step cannot go vertically. These never reach the user: the step is done in the ordinary order instead."""

from __future__ import annotations


class NotVertical(Exception):
    """The step has to be done in the ordinary order. The message says why, in words for the report."""


class Abandoned(BaseException):
    """Raised inside a micro-batch's thread when nobody waits for it any more.

    Not an `Exception`, so that the model's own ``except`` clauses let it pass.
    """
