"""Bytes stored in each tier by kind, and the volumes on drives for them. Pure arithmetic on sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from infinity.config import InfinityConfig
from infinity.config.schema.directories import describe_directories
from infinity.errors import format_bytes
from infinity.numerics.chunk_format import MainWeight
from infinity.plan.machine import RoomBytes
from infinity.plan.placement import Placement
from infinity.plan.sizes import FP32_BYTES, Request, UnitSize
from swapper.volumes.directory import Directory


def spilled_bytes(sizes: Sequence[UnitSize], request: Request, placement: Placement) -> int:
    """Bytes of drives that are reserved for spilled gradients."""
    # A single bf16 gradient may become an fp32 sum, twice as large. Then units may be spilled as well that have room in
    # memory for bf16 only, and all of them need space for fp32.
    widens = request.gradient_itemsize < FP32_BYTES and not request.rounds_gradients
    return sum(
        size.trainable_numel * (FP32_BYTES if widens else request.gradient_itemsize)
        for index, size in enumerate(sizes)
        if index not in placement.gradients_in_memory or (widens and placement.gradient_scratch_bytes)
    )


def resting_bytes(sizes: Sequence[UnitSize], request: Request, placement: Placement) -> dict[str, dict[str, int]]:
    """Bytes stored in each tier ("device", "host", "nvme"), by kind.

    Kinds are "weights", "remainders" or "main weights", "states", and "gradients": those spilled to drives, or those
    that stay on a GPU.
    """
    flat_tier = "host" if request.uses_host_memory else "device"
    form = request.record_format
    main = "remainders" if form.main is MainWeight.REMAINDER else "main weights"
    tiers = {tier: dict.fromkeys(("weights", main, "states"), 0) for tier in ("device", "host", "nvme")}

    def add_records(tier: str, numel: int, num_states: int) -> None:
        num_bytes = form.record_bytes(numel, num_states)
        if tier == "nvme":  # each record is padded to whole blocks there; the padding counts as states
            num_bytes = form.stored_bytes(numel, num_states, placement.chunk_numel)
        tiers[tier][main] += form.main_bytes(numel)
        tiers[tier]["states"] += num_bytes - form.main_bytes(numel)

    for index, (size, kept) in enumerate(zip(sizes, placement.states_in_memory, strict=True)):
        is_hosted = index in placement.hosted_units
        tier = flat_tier if index in placement.resident_units else "host" if is_hosted else "nvme"
        if index in placement.resident_units:
            tiers[tier]["weights"] += size.weight_bytes
        else:
            tiers[tier]["weights"] += size.stored_weight_bytes
            tiers["device"]["weights"] += size.codes_on_device
        if request.records_on_device:
            add_records("device", size.state_numel, size.num_states)
        else:
            add_records("host", kept, size.num_states)
            add_records("nvme", size.state_numel - kept, size.num_states)
    tiers["nvme"]["gradients"] = spilled_bytes(sizes, request, placement) if request.can_spill else 0
    if placement.gradients_on_device:
        tiers["device"]["gradients"] = placement.gradient_bytes
    return tiers


@dataclass(frozen=True)
class Retention:
    """The space that a durable run needs on drives.

    Attributes:
        present_bytes: the current states, and space for writes under way.
        commit_bytes: bytes that a step rewrites, which each further kept commit needs.
        num_kept: the most commits that are kept.
        room_bytes: free space for all of it; None: no limit, or unknown.
    """

    present_bytes: int
    commit_bytes: int
    num_kept: int
    room_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """All bytes."""
        return self.present_bytes + self.num_kept * self.commit_bytes

    @property
    def num_fitting(self) -> int | None:
        """The number of commits that fit; None: no limit."""
        if self.room_bytes is None or not self.commit_bytes:
            return None
        return max(self.room_bytes - self.present_bytes, 0) // self.commit_bytes

    def __str__(self) -> str:
        kept = f"{self.num_kept} commit{'s' if self.num_kept > 1 else ''}"
        text = f"{megabytes(self.present_bytes)} of states, and {megabytes(self.commit_bytes)} for each of {kept}"
        return text if self.num_fitting is None else f"{text} (the drives have room for {self.num_fitting:,})"

    def cure(self) -> str | None:
        """How to change a config that keeps too many commits; None if fewer commits do not help."""
        fitting = self.num_fitting
        if not fitting or fitting >= self.num_kept:
            return None
        return (
            f"keep_last and keep_every keep {self.num_kept} commits, and the drives have room for {fitting}. Set "
            f"infinity.keep_last to {fitting}, and remove infinity.keep_every, which keeps as many again"
        )


def megabytes(num_bytes: int) -> str:
    """A size as plans print it: "1,234.5 MB"."""
    return f"{num_bytes / 1e6:,.1f} MB"


TierKey = tuple[str, tuple[Directory, ...]]
"""A tier ("none", "cpu", "nvme" or "durable") and its directories on drives. Equal keys share one volume."""


@dataclass(frozen=True)
class Volumes:
    """The volumes of an engine.

    Attributes:
        param_key: of weights.
        state_key: of main weights and states.
        spill_key: of spilled gradients; None if there is no NVMe tier.
        num_bytes: the most bytes that each volume on drives holds at a time.
        retention: the space of a durable run; None if the run is not durable.
        checkpoint_bytes: the most that a checkpoint of this process takes. No volume includes it, as it may go
            elsewhere.
    """

    param_key: TierKey
    state_key: TierKey
    spill_key: TierKey | None
    num_bytes: Mapping[TierKey, int]
    retention: Retention | None
    checkpoint_bytes: int

    @classmethod
    def of(cls, config: InfinityConfig, sizes: Sequence[UnitSize], request: Request, placement: Placement) -> Volumes:
        """The volumes for a placement."""
        resting = resting_bytes(sizes, request, placement)["nvme"]
        spilled_bytes = resting.pop("gradients")
        all_bytes = sum(resting.values())
        param_key: TierKey = (config.offload_param.device, config.offload_param.nvme_directories)
        state_key: TierKey = (config.offload_optimizer.device, config.offload_optimizer.nvme_directories)
        spill_key = next((key for key in (state_key, param_key) if key[0] == "nvme"), None)
        needed: dict[TierKey, int] = {}
        durable = config.infinity.durable
        # Spilled gradients are worthless after a step, so they stay in scratch files, outside of a durable run's
        # directories.
        if durable is not None:
            param_key = state_key = ("durable", durable.directories)
            needed[param_key] = all_bytes
        if param_key[0] == "nvme":
            needed[param_key] = resting["weights"]
        if state_key[0] == "nvme":  # may be the weights' key: then one volume holds both
            needed[state_key] = needed.get(state_key, 0) + all_bytes - resting["weights"]
        if spill_key is not None:
            needed[spill_key] = needed.get(spill_key, 0) + spilled_bytes
        # Stored bytes that no step writes: frozen segments, and the padding behind them.
        itemsize = request.record_format.weight_dtype.itemsize
        frozen_bytes = sum(size.stored_weight_bytes - size.written_numel * itemsize for size in sizes)
        retention = None
        if durable is not None:
            # Frozen weights are written once, and all commits share them. A new version never overwrites an old one
            # that is still needed, so writes under way need space of their own.
            spare_bytes = min(all_bytes, config.io.max_inflight * config.io.request_bytes)
            retention = Retention(all_bytes + spare_bytes, all_bytes - frozen_bytes, durable.most_kept)
        in_fp32 = sum(size.state_numel * (1 + size.num_states) for size in sizes) * FP32_BYTES
        return cls(param_key, state_key, spill_key, needed, retention, in_fp32 + frozen_bytes)

    @property
    def durable_bytes(self) -> int:
        """Bytes that a durable run needs on the drives."""
        return 0 if self.retention is None else self.retention.num_bytes

    @property
    def reserved_bytes(self) -> dict[tuple[Directory, ...], int]:
        """Directories -> bytes that are reserved in them together."""
        return {key[1]: self.durable_bytes if key[0] == "durable" else size for key, size in self.num_bytes.items()}

    def problem(self, room_bytes: RoomBytes) -> str | None:
        """Which drives are too small, in words; None if everything fits."""
        # Each volume is checked, and then all together: volumes in different directories may share a file system.
        needs = self.reserved_bytes
        everywhere = tuple(dict.fromkeys(each for directories in needs for each in directories))
        for directories, needed in [*needs.items(), (everywhere, sum(needs.values()))]:
            room = room_bytes(directories) if directories else None
            if room is not None and needed > room:
                is_plain = directories == everywhere and all(each.capacity_bytes is None for each in directories)
                where = "the drives" if is_plain else describe_directories(directories)
                text, cure = f"{format_bytes(needed)} on {where}, of which {format_bytes(room)} are free", None
                if self.retention is not None and directories == self.state_key[1]:
                    cure = replace(self.retention, room_bytes=room).cure()
                return f"{text}: {cure}" if cure else text
        return None

    def checkpoint_problem(self, room_bytes: RoomBytes) -> str | None:
        """Why a checkpoint does not fit on the drives beside the volumes; None if it does."""
        needs = self.reserved_bytes
        everywhere = tuple(dict.fromkeys(each for directories in needs for each in directories))
        room, reserved = room_bytes(everywhere) if everywhere else None, sum(needs.values())
        if room is None or reserved + self.checkpoint_bytes <= room:
            return None
        return (
            f"a checkpoint takes up to {format_bytes(self.checkpoint_bytes)}, and beside the {format_bytes(reserved)} that are "
            f"reserved the drives have {format_bytes(max(room - reserved, 0))}"
        )
