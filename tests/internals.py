"""What tests outside of `tests/unit` use of the packages' internals, for what there is no public name.

A module that moves changes one line here. Public ways come first: each name is here only because a test needs to look at, or to
replace, something that users cannot reach.
"""

# ruff: noqa: F401 (names are handed on)

from __future__ import annotations

from collections.abc import Sequence

from infinity.checkpoint import arrays, checkpoint_loading, foreign_arrays, manifest, saved, training_checkpoint
from infinity.checkpoint.saved import Checkpoint, seal, tags, writing
from infinity.checkpoint.training_checkpoint import BackgroundSave, Saving
from infinity.device import drive_tensors, host_memory
from infinity.device.compute import (
    ComputeDevice,
    Copy,
    CudaDevice,
    CudaFlatBuffer,
    Fence,
    FlatBuffer,
    HostFlatBuffer,
    device_for,
    gradient_norm,
)
from infinity.device.drive_tensors import has_drive_tensors, on_drive
from infinity.device.flat_pool import FlatPool
from infinity.device.host_memory import trim_heap
from infinity.distributed import agreement, causes
from infinity.distributed.process_groups import destroy_at_exit
from infinity.distributed.world import world
from infinity.engine.resources import EngineResources
from infinity.engine.shutdown import end_all_at_exit, wait_for_collected
from infinity.gradients import store as gradient_store
from infinity.gradients.main_gradients import Arrivals, MainGradDtype
from infinity.gradients.store import GradientStore
from infinity.metrics.clock import StepClock
from infinity.optim.registry import BY_NAME
from infinity.plan import cost_model, placement
from infinity.plan.cost_model import predict
from infinity.tiers import user_copies
from infinity.tiers.divided_weights import DividedWeights, WeightExchange
from infinity.tiers.weight_store import WeightStore
from infinity.units.layout import CHUNK_GRANULE, ParameterSpec, Slot, UnitLayout
from infinity.units.partition import find_blocks
from infinity.units.shards import Shards
from infinity.units.unit import Arrival, Unit
from swapper.versioned import open_backend
from swapper.volumes import publish, scratch_file
from swapper.volumes.block_files import BlockFile
from swapper.volumes.scratch_file import ScratchFile
from tools.bench.cgroup import Cgroup, MemoryGroup, block_device, set_bandwidth, why_unavailable


def main(words: Sequence[str]) -> int:
    """Run `infinity` with these arguments in this process; return its exit status."""
    from infinity.cli.main import main

    return main(words)


def compile_kernels() -> None:
    """Compile or load the kernels now: numba takes memory and time, which tests of memory measure."""
    import infinity.numerics.kernels
