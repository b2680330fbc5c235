"""Pages bytes between host memory and drives: extents, aligned memory, handles, priorities, and errors that say what
to do.

It knows nothing of models or optimizers. Paging plain tensors:

    >>> import tempfile, torch
    >>> from swapper import Priority, StagingPool, Swapper
    >>> directory = tempfile.mkdtemp()
    >>> with Swapper.open([directory], capacity_bytes=64 << 20) as swapper:
    ...     weight = torch.arange(1_000_000, dtype=torch.float32)
    ...     extent = swapper.allocate(weight.nbytes, name="weight")
    ...     written = swapper.write(extent, weight)  # returns at once; keep ``weight`` as it is ...
    ...     written.wait()  # ... until its bytes have left
    ...     copy = torch.empty_like(weight)
    ...     handle = swapper.read(extent, copy, priority=Priority.PREFETCH)
    ...     # ... compute something else meanwhile ...
    ...     handle.wait()  # somebody needs it now: served first
    ...     torch.equal(copy, weight)
    True

Memory from a :class:`StagingPool` is page-aligned, so the drive reads and writes it without a copy, and its size is
fixed, so host memory does not grow:

    >>> with StagingPool(buffer_bytes=1 << 20, num_buffers=2) as staging_pool, Swapper.in_memory(16 << 20) as swapper:
    ...     extent = swapper.allocate(1 << 20, name="state")
    ...     with staging_pool.lease(owner="example") as buffer:
    ...         _ = buffer.tensor.fill_(7)
    ...         swapper.write(extent, buffer.tensor).wait()
    ...     swapper.statistics().write_bytes
    1048576

Nothing is left in the directory, whatever ends the process:

    >>> import os
    >>> os.listdir(directory)
    []
    >>> os.rmdir(directory)
"""

from typing import TYPE_CHECKING

from swapper.errors import (
    ArgumentError,
    BackendUnavailableError,
    ChecksumMismatchError,
    DurableRunError,
    ExtentError,
    LimitError,
    OutOfSpaceError,
    ReentryError,
    StagingExhaustedError,
    StallError,
    SwapperClosedError,
    SwapperError,
    TransferError,
    VolumeError,
    VolumeTooSmallError,
)
from swapper.lazy_names import lazy_names

if TYPE_CHECKING:
    from swapper.backend import Direction, IOBackend
    from swapper.config import ALIGNMENT, Priority, SwapperConfig
    from swapper.extents.extent import Extent, NameOf
    from swapper.memory.held import hang_error, is_held
    from swapper.memory.region import AlignedRegion
    from swapper.memory.staging import StagingBuffer, StagingPool
    from swapper.meters import BusySeconds, BusyTimes, TransferRecord
    from swapper.scheduling.operation import Handle
    from swapper.scheduling.statistics import Statistics
    from swapper.swapper import Swapper
    from swapper.sync.bell import Bell, Latch
    from swapper.versioned import Versions
    from swapper.volumes.directory import Directory
    from swapper.volumes.file_system import Drive, describe_drive
    from swapper.volumes.run_directory import RunDirectory
    from swapper.volumes.volume import Volume
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "ALIGNMENT",
    "AlignedRegion",
    "ArgumentError",
    "BackendUnavailableError",
    "Bell",
    "BusySeconds",
    "BusyTimes",
    "ChecksumMismatchError",
    "Direction",
    "Directory",
    "Drive",
    "DurableRunError",
    "Extent",
    "ExtentError",
    "Handle",
    "IOBackend",
    "Latch",
    "LimitError",
    "NameOf",
    "OutOfSpaceError",
    "Priority",
    "ReentryError",
    "RunDirectory",
    "StagingBuffer",
    "StagingExhaustedError",
    "StagingPool",
    "StallError",
    "Statistics",
    "Swapper",
    "SwapperClosedError",
    "SwapperConfig",
    "SwapperError",
    "TransferError",
    "TransferRecord",
    "Versions",
    "Volume",
    "VolumeError",
    "VolumeTooSmallError",
    "describe_drive",
    "hang_error",
    "is_held",
]
