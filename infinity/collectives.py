"""Everything that concerns other processes. The only place that knows ``torch.distributed``."""

from __future__ import annotations

import torch

from infinity.errors import ConfigError


def check_single_process() -> None:
    """Refuse to start in a group of several processes.

    Raises:
        ConfigError: ``torch.distributed`` runs with more than one process.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ConfigError(
            f"torch.distributed runs with {distributed.get_world_size()} processes: training on several is not "
            "supported yet. Start one process"
        )
