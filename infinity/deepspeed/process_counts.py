"""Whether a library that hands out data counts the processes as the engine does. Knows libraries by name; imports none."""

from __future__ import annotations

import sys
from typing import Any

from infinity.errors import ConfigError


def check_accelerate(num: int) -> None:
    """Refuse ``num`` processes where accelerate trains with "DeepSpeed" and counts others.

    It does so on machines without a GPU, where it takes each process under DeepSpeed for the only one: every rank would get
    the same data.

    Raises:
        ConfigError: the numbers, and what to take instead.
    """
    state: dict[str, Any] = getattr(
        getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None), "_shared_state", {}
    )
    if state.get("deepspeed_plugins") and state.get("num_processes", num) != num:
        raise ConfigError(
            f"accelerate counts {state['num_processes']} process(es), and {num} train together, so each would get the same data: "
            "without a GPU, accelerate knows several processes only where DeepSpeed is switched off. Take "
            "infinity.integrations (InfinityTrainer with use_cpu=True, InfinityAccelerator with cpu=True), or one process"
        )
