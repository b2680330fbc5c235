"""`zero_optimization` and `aio`: models of the JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from infinity.config.schema.block import Block, Count, Flag, NoEffect
from infinity.config.schema.directories import parse_directories
from infinity.config.schema.inert import with_deepspeed_only_keys
from infinity.config.schema.quantities import parse_bytes, parse_choice
from swapper.volumes.directory import Directory

EXACT_EXCHANGE = (
    "no effect: one process exchanges nothing. Several processes average gradients, and only communication_data_type "
    "rounds them; with several processes, another value is an error"
)


@with_deepspeed_only_keys
class OffloadBlock(Block):
    """`offload_param` and `offload_optimizer`. Each takes the other's keys too: files in the wild mix them up."""

    device: Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(parse_choice)] = "none"
    """Where these states are stored: in the compute device's memory, in host memory, or on drives."""
    nvme_path: Annotated[tuple[Directory, ...], BeforeValidator(parse_directories)] = ()
    """A directory on the drive, or a list of directories, one per drive, over which data is striped. Each may be an
    object that limits how much is used: `{"path": "/mnt/nvme", "capacity": "400GB"}`. `~`, `$NAME` and `${NAME}` are
    expanded. A missing directory is made if its parent exists. Scratch files in it have no name, and vanish with the
    process."""

    # "none" is DeepSpeed's word for a block that is switched off.
    def is_active(self) -> bool:
        return self.device != "none"


@with_deepspeed_only_keys
class ZeroBlock(Block):
    """`zero_optimization`."""

    stage: Annotated[Count | None, Field(le=3)] = None
    """What several processes divide among them. Stages 1 and 2 divide main weights, optimizer states and their updates;
    stage 3 also divides model weights. The numbers are the same in all stages (but see `bf16.check_grad_overflow`).
    With one process, every stage runs as 3. If you leave it out, it is 3 if `offload_param` or `offload_optimizer`
    names a device, and 0 otherwise, as in DeepSpeed."""
    # An empty block is the same as none: its device is "none".
    offload_param: OffloadBlock = OffloadBlock()
    offload_optimizer: OffloadBlock = OffloadBlock()

    zero_quantized_weights: Annotated[Flag, NoEffect(EXACT_EXCHANGE, silent=(False,))] = False
    zero_quantized_gradients: Annotated[Flag, NoEffect(EXACT_EXCHANGE, silent=(False,))] = False


@with_deepspeed_only_keys
class AioBlock(Block):
    """`aio`. Two of DeepSpeed's own tools write the number of threads under names that DeepSpeed does not read."""

    block_size: Annotated[int | None, BeforeValidator(parse_bytes)] = None
    """Largest single request in bytes, rounded up to a multiple of 4096; 1 MiB by default."""
    queue_depth: Annotated[Count | None, Field(gt=0)] = None
    """Requests in flight per thread; 8 by default."""
    intra_op_parallelism: Annotated[Count | None, Field(gt=0)] = None
    """Threads for each direction (read, write) and each drive; at least 4 are used."""
    use_gds: Flag = False
    """`true` is an error: GPUDirect Storage is not implemented, and data goes through host memory."""
