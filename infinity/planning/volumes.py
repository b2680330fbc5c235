"""What is opened on drives: in which directories, for what, and how much of them. For engines, and for forecasts.

Pure arithmetic on sizes; must not know tensors, or open files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.config import InfinityConfig
from infinity.planning.inputs import Request, UnitSize
from infinity.planning.placement import Placement
from infinity.planning.resting import resting_bytes
from infinity.planning.retention import Retention
from swapper.volumes.directory import Directory

TierKey = tuple[str, tuple[Directory, ...]]
"""A tier ("none", "cpu", "nvme" or "durable") and, on drives, its directories: what has the same key shares one volume."""


@dataclass(frozen=True)
class Volumes:
    """Where what does not stay in memory lies.

    Attributes:
        param_key: of weights.
        state_key: of main weights and states.
        spill_key: of gradients that are spilled; None if nothing can be.
        num_bytes: of each volume on drives, what may lie in it at the same time.
        retention: of the drives, what a durable run takes.
    """

    param_key: TierKey
    state_key: TierKey
    spill_key: TierKey | None
    num_bytes: Mapping[TierKey, int]
    retention: Retention | None

    @classmethod
    def of(cls, config: InfinityConfig, sizes: Sequence[UnitSize], request: Request, placement: Placement) -> Volumes:
        """Those of one engine."""
        resting = resting_bytes(sizes, request, placement)["nvme"]
        spilled_bytes = resting.pop("gradients")
        all_bytes = sum(resting.values())
        param_key: TierKey = (config.offload_param.device, config.offload_param.nvme_directories)
        state_key: TierKey = (config.offload_optimizer.device, config.offload_optimizer.nvme_directories)
        spill_key = next((key for key in (state_key, param_key) if key[0] == "nvme"), None)
        needed: dict[TierKey, int] = {}
        durable = config.infinity.durable
        if durable is not None:  # what is spilled stays in scratch files
            param_key = state_key = ("durable", durable.directories)
            needed[param_key] = all_bytes
        if param_key[0] == "nvme":
            needed[param_key] = resting["weights"]
        if state_key[0] == "nvme":
            needed[state_key] = needed.get(state_key, 0) + all_bytes - resting["weights"]
        if spill_key is not None:
            needed[spill_key] = needed.get(spill_key, 0) + spilled_bytes
        return cls(param_key, state_key, spill_key, needed, _retention(config, sizes, request, all_bytes))

    @property
    def durable_bytes(self) -> int:
        """Of the drives, what a durable run takes."""
        return 0 if self.retention is None else self.retention.num_bytes

    @property
    def reserved_bytes(self) -> dict[tuple[Directory, ...], int]:
        """By directories, what is reserved in them together."""
        return {key[1]: self.durable_bytes if key[0] == "durable" else size for key, size in self.num_bytes.items()}


def _retention(config: InfinityConfig, sizes: Sequence[UnitSize], request: Request, all_bytes: int) -> Retention | None:
    durable = config.infinity.durable
    if durable is None:
        return None
    itemsize = request.record_format.weight_dtype.itemsize
    frozen_bytes = sum(size.stored_weight_bytes - size.written_numel * itemsize for size in sizes)
    # What is frozen is written once. Of the rest, writes that run beside each other and blocks at the edges need a little.
    spare_bytes = min(all_bytes, config.io.max_inflight * config.io.request_bytes)
    return Retention(all_bytes + spare_bytes, all_bytes - frozen_bytes, durable.most_kept)
