"""Parameters that were added to the optimizer after `initialize`: ordinary ones, which no engine holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infinity.optim.groups import Groups
from infinity.optim.template import Template
from infinity.optim.worker import Worker


class LooseParameters:
    """Updates them in memory, one by one, as torch does: gradient in ``p.grad``, state in `state`, in their own dtype.

    They are in no budget and not stored on any drive.

    Args:
        template: its groups say which they are.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._worker: Worker | None = None
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        """What the optimizer keeps for each: live, as in torch."""

    def present(self) -> Iterator[Tensor]:
        """Those that are in a group now."""
        return (param for param in self._template.params() if param not in self._template)

    def update(self, groups: Groups, coefficient: Tensor | None) -> None:
        """One step for each that has a gradient.

        Args:
            groups: of this step.
            coefficient: 0-dim fp32 tensor that every gradient is multiplied with, in place, or None.
        """
        for param in groups.params.values():
            values = groups.of(param)
            if param in self._template or param.grad is None or values is None:
                continue
            if coefficient is not None:
                param.grad.mul_(coefficient.to(param.grad.device))
            self._worker = self._worker or Worker(self._template.optimizer)
            with torch.no_grad():
                (state,) = self._worker.run(dict(values), [param.detach()], [param.grad], [self.state[param]])
            self.state[param].update(state)

    def zero_grad(self, set_to_none: bool) -> None:
        """As `Optimizer.zero_grad`."""
        for param in self.present():
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad = torch.zeros_like(param.grad)
