"""What rests where: bytes of each tier, by kind.

Pure arithmetic on sizes; must not know tensors or files.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.numerics.chunk_format import MainWeight
from infinity.planning.inputs import FP32_BYTES, Request, UnitSize
from infinity.planning.placement import Placement


def spilled_bytes(sizes: Sequence[UnitSize], request: Request, placement: Placement) -> int:
    """Of main gradients that may be spilled. Sums that are too wide to stay in RAM are, too."""
    widens = request.gradient_itemsize < FP32_BYTES and not request.rounds_gradients
    return sum(
        size.trainable_numel * (FP32_BYTES if widens else request.gradient_itemsize)
        for index, size in enumerate(sizes)
        if index not in placement.gradients_in_memory or (widens and placement.gradient_scratch_bytes)
    )


def resting_bytes(sizes: Sequence[UnitSize], request: Request, placement: Placement) -> dict[str, dict[str, int]]:
    """Bytes that rest in each tier ("device", "host", "nvme"), by kind.

    Kinds are "weights", what the main weights need besides those ("remainders" or "main weights"), "states", and "gradients":
    on drives room for those that are spilled, on a device for all, where they stay there.
    """
    flat_tier = "host" if request.shares_host_memory else "device"
    form = request.record_format
    main = "remainders" if form.main is MainWeight.REMAINDER else "main weights"
    tiers = {tier: dict.fromkeys(("weights", main, "states"), 0) for tier in ("device", "host", "nvme")}

    def add_records(tier: str, numel: int, num_states: int) -> None:
        num_bytes = form.record_bytes(numel, num_states)
        if tier == "nvme":
            num_bytes = form.stored_bytes(numel, num_states, placement.chunk_numel)
        tiers[tier][main] += form.main_bytes(numel)
        tiers[tier]["states"] += num_bytes - form.main_bytes(numel)

    for index, (size, kept) in enumerate(zip(sizes, placement.states_in_memory, strict=True)):
        is_hosted = index in placement.hosted_units
        tier = flat_tier if index in placement.resident_units else "host" if is_hosted else "nvme"
        tiers[tier]["weights"] += size.weight_bytes if index in placement.resident_units else size.stored_weight_bytes
        if request.records_on_device:
            add_records("device", size.state_numel, size.num_states)
        else:
            add_records("host", kept, size.num_states)
            add_records("nvme", size.state_numel - kept, size.num_states)
    tiers["nvme"]["gradients"] = spilled_bytes(sizes, request, placement) if request.can_spill else 0
    if placement.gradients_on_device:
        tiers["device"]["gradients"] = placement.gradient_bytes
    return tiers
