"""torch's loss scaling with the rule of DeepSpeed's."""

from __future__ import annotations

from typing import Any

import torch


class DeepSpeedScaler(torch.amp.GradScaler):
    """DeepSpeed 0.19.8 doubles the scale with the first finite step after as many as the window has, torch with the last of them.

    That step then counts as the first of the next window.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_growth_tracker = -1

    def update(self, new_scale: Any = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        if self.get_scale() < before:
            self._growth_tracker.fill_(-1)  # type: ignore[union-attr]
