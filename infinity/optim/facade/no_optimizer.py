"""The template of an engine that updates nothing: no groups, no states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from infinity.optim.template import Template


class _Absent(Optimizer):
    def __init__(self) -> None:
        # Not Optimizer.__init__, which refuses to have no parameters.
        super().__setstate__({"defaults": {}, "state": defaultdict(dict), "param_groups": []})

    def step(self, closure: Any = None) -> NoReturn:
        raise RuntimeError("there is no optimizer")


def absent_template(named_params: Iterable[tuple[str, Parameter]], device: torch.device) -> Template:
    """For a model that is evaluated only.

    Args:
        named_params: all parameters of the model.
        device: where updates would run.
    """
    fqns: dict[Parameter, str] = {}
    for fqn, param in named_params:
        fqns.setdefault(param, fqn)
    return Template(_Absent(), fqns, device)
