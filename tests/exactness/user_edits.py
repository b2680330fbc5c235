"""Both sides with an optimizer that the user has made, in each way to train: for tests that change its groups and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.exactness.lockstep import BF16, IN_MEMORY, Lockstep

Named = Mapping[str, Any]
"""Parameters by their names."""
MODES: dict[str, dict[str, Any]] = {
    "in backward": {},
    "in backward, bf16": BF16,
    "deferred": {"gradient_clipping": 0.1},
    "step": {"infinity": {"update": "step"}},
    "resident": IN_MEMORY,
    "vertical": {"gradient_accumulation_steps": 2},
}


def start(tmp_path: Path, mode: str, make: Callable[[Any], torch.optim.Optimizer]) -> Lockstep:
    return Lockstep.start(tmp_path, changes=MODES[mode], optimizer=make)


def take_step(both: Lockstep, mode: str, number: int) -> None:
    both.batch_step(number) if mode == "vertical" else both.engine_step(number)


def sides(both: Lockstep) -> list[tuple[Any, dict[str, Any]]]:
    """Each side's optimizer, and what is in its groups by FQN."""
    return [(both.reference.optimizer, both.reference.main), (both.optimizer, dict(both.model.named_parameters()))]
