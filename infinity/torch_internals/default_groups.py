"""Process groups that torch's functions have as defaults of their arguments, which keeps them alive. In torch 2.6 to 2.13.

``torch.distributed.nn.functional`` has ``group=group.WORLD``; whoever imports it after the group was made (an optimizer does, by
way of ``torch._dynamo``) keeps that group.
"""

from __future__ import annotations

import inspect
import sys


def forget_default_groups() -> None:
    """These functions take the group that is the default one when they are called. Nothing where torch has none of them."""
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        if inspect.isfunction(function) and function.__defaults__:
            function.__defaults__ = tuple(
                None if type(value).__name__ == "ProcessGroup" else value for value in function.__defaults__
            )
