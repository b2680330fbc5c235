"""The compute device: flat buffers, copies between host and device, and the order between streams.

Everything that only a GPU needs is in this file. On the CPU the same calls exist and do nothing, or copy at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.device.host_memory import free_bytes, is_unified, trim_heap
from infinity.errors import size
from infinity.numerics.norms import narrow_norm
from infinity.torch_internals.names import norms_of_each, set_default_gpu
from swapper import AlignedRegion, SwapperError, hang_error, is_held

logger = logging.getLogger(__name__)


class FlatBuffer:
    """The memory of one unit, which all its parameters are views of. It stays allocated until the last tensor over it
    dies.

    [Note: counting views without private API] A tensor over the memory is made from an owner: a numpy array on the
    host, a `_CudaExporter` on a GPU. The tensor's storage holds a reference to the owner, and all views of the tensor
    share that storage. A dead weak reference to the owner therefore means that no view is left, inside autograd's graph
    either.
    """

    def __init__(self, num_bytes: int, address: int, memory: Any) -> None:
        """
        Args:
            num_bytes: its size.
            address: of the first byte: ``untyped_storage().data_ptr()`` of every view.
            memory: what owners are made of. No tensor over it is handed out, so `release` can drop it while views live.
        """
        self.num_bytes = num_bytes
        self.address = address
        self._memory: Any = memory
        """None after `release`: asking for a tensor is an error then."""
        self._owner: weakref.ref[Any] | None = None

    def tensor(self) -> torch.Tensor:
        """uint8 tensor of shape (num_bytes,) over the memory. Its storage keeps the memory alive."""
        tensor, self._owner = FlatBuffer.tracked_tensor(self, self._owner)
        return tensor

    def tracked_tensor(self, known: weakref.ref[Any] | None) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """A tensor as of `tensor`, and a reference that dies with its last view. Such tensors do not count in
        `has_views`.

        ``known``: the reference that the last call returned. While it is alive, it covers the new tensor as well.
        """
        owner = known() if known is not None else None
        if owner is None:
            owner = self._owner_of(self._memory)
        return self._tensor_of(owner), weakref.ref(owner)

    @property
    def has_views(self) -> bool:
        """Whether any view of this memory is alive, autograd's saved ones included."""
        return self._owner is not None and self._owner() is not None

    @property
    def is_held(self) -> bool:
        """Whether a read or write still uses this memory, even if nobody waits for it any more."""
        return is_held(self.address, self.num_bytes)

    @property
    def hang_error(self) -> SwapperError | None:
        """The error of a read or write that uses this memory and hangs; None without one."""
        return hang_error(self.address, self.num_bytes)

    def discard_front(self, num_bytes: int) -> int:
        """Return memory of at most the first ``num_bytes`` to the system. They are not used again. Returns how much."""
        return 0  # a block of an allocator is given back as a whole

    def release(self) -> None:
        """Free the memory, as soon as its last view is dead."""
        self._memory = None

    def _owner_of(self, memory: Any) -> Any:
        raise NotImplementedError

    def _tensor_of(self, owner: Any) -> torch.Tensor:
        raise NotImplementedError


class HostFlatBuffer(FlatBuffer):
    """A page-aligned region of host memory."""

    def __init__(self, num_bytes: int) -> None:
        self._region = AlignedRegion(num_bytes)
        super().__init__(num_bytes, self._region.address, self._region.array())

    def tensor(self) -> torch.Tensor:
        # What the base class does, without its calls: nothing else is asked for as often in a step.
        owner = self._owner() if self._owner is not None else None
        if owner is None:
            owner = self._memory[:]
            self._owner = weakref.ref(owner)
        return torch.from_numpy(owner)

    def discard_front(self, num_bytes: int) -> int:
        return self._region.discard(num_bytes)

    def release(self) -> None:
        super().release()
        self._region.release()

    def _owner_of(self, memory: Any) -> Any:
        # A new array over the same memory, of which nobody else has a reference: its death says that the views are
        # gone.
        return memory[:]

    def _tensor_of(self, owner: Any) -> torch.Tensor:
        return torch.from_numpy(owner)


class _CudaExporter:
    """Gives CUDA memory to torch through the CUDA array interface, so that a weak reference can count the borrowers."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base
        # torch.as_tensor keeps the object alive that has this attribute, for as long as its storage lives. |u1 is
        # uint8.
        self.__cuda_array_interface__ = {
            "shape": (base.numel(),),
            "typestr": "|u1",
            "data": (base.data_ptr(), False),
            "version": 3,
        }


class CudaFlatBuffer(FlatBuffer):
    """A block of the caching allocator. Allocated and freed on the compute stream, so reuse follows its order."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._device = device
        super().__init__(num_bytes, memory.data_ptr(), memory)

    def _owner_of(self, memory: Any) -> Any:
        return _CudaExporter(memory)

    def _tensor_of(self, owner: Any) -> torch.Tensor:
        return torch.as_tensor(owner, device=self._device)


Fence = Any
"""What `upload`, `download` and `mark` return: a CUDA event on a GPU, None on the CPU."""


@dataclass(frozen=True)
class Copy:
    """One copy between host and device, with the points of its stream (`ComputeDevice.stamp`) at both ends."""

    name: str
    num_bytes: int
    first: Any
    last: Any


_MOST_COPIES = 1 << 16
"""Entries of ``ComputeDevice._copies``. If nobody calls `pop_copies`, the oldest are dropped: only the report lacks
them."""


class ComputeDevice:
    """The CPU as compute device: host memory is device memory, and every copy is complete when the call returns."""

    uses_host_memory = True
    """Whether the swapper can read straight into a flat buffer."""
    is_unified = False
    """Whether it is a GPU whose memory is the host's: one pool, of which each gets half."""
    pin: Callable[[int, int], Callable[[], None] | None] | None = None
    """Registers host memory with the driver: ``pin(address, num_bytes)`` returns what undoes it, or None if it cannot."""

    def __init__(self, torch_device: torch.device | None = None) -> None:
        self.torch_device = torch_device or torch.device("cpu")
        self._copies: deque[Copy] = deque(maxlen=_MOST_COPIES)

    def allocate_flat(self, num_bytes: int) -> FlatBuffer:
        """Uninitialised memory for one unit."""
        return HostFlatBuffer(num_bytes)

    def free_bytes(self, model: nn.Module) -> int | None:
        """Memory of the device that is free once ``model``'s parameters have left it. None: it is the host's."""
        return None

    def peak_bytes(self) -> int | None:
        """The most that torch has allocated on the device so far. None: it is the host's."""
        return None

    def release_unused(self) -> None:
        """Give memory back that allocators keep for reuse: the C library's on the host, torch's on a GPU."""
        trim_heap()

    @contextlib.contextmanager
    def background_thread(self) -> Iterator[None]:
        """A context for the whole life of a background thread of the engine.

        The thread launches on this device, in a stream of its own, and records no gradients. Other settings that torch
        keeps per thread (autocast, inference mode, default device) are those of a new thread, not the user's.
        """
        with torch.no_grad():
            yield

    def carried(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Make a context for another thread, which then launches on the calling thread's device and stream."""
        return contextlib.nullcontext

    def mark(self) -> Fence:
        """A fence behind everything launched so far in the calling thread's stream."""
        return None

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Fence) -> Fence:
        """Copy host to device without waiting, after ``after``; ``source`` must stay untouched until the fence is done."""
        target.copy_(source)
        return None

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Fence) -> Fence:
        """Copy device to host without waiting, after ``after``; ``target`` holds the data when the fence is done.

        ``source`` may be freed at once; nothing may write to it before that.
        """
        target.copy_(source)
        return None

    def is_done(self, fence: Fence) -> bool:
        """Whether everything before the fence has finished."""
        return True

    def synchronize(self, fence: Fence) -> None:
        """Block the calling thread until the fence is done. For background threads, not for the training thread."""

    def compute_waits_for(self, fence: Fence) -> None:
        """Make the calling thread's stream wait for the fence. The host does not wait."""

    # Called several times for each module: without Python in between.
    stamp: Callable[[], Any] = staticmethod(time.perf_counter)
    """Return a timing mark behind everything launched so far in the compute stream, for `seconds_at`."""
    seconds_at: Callable[[Any], float | None] = staticmethod(float)
    """Return when the device passed a mark, in seconds of ``time.perf_counter``; None: not yet."""

    def pop_copies(self) -> list[tuple[Copy, float, float]]:
        """Copies that have ended since the last call, with begin and end in seconds. From one thread at a time."""
        # In order of submission. The deque is left at the first copy that has not ended, even if one of the other
        # stream has.
        taken: list[tuple[Copy, float, float]] = []
        while self._copies:
            begin, end = self.seconds_at(self._copies[0].first), self.seconds_at(self._copies[0].last)
            if begin is None or end is None:
                break
            taken.append((self._copies.popleft(), begin, end))
        return taken


class CudaDevice(ComputeDevice):
    """One GPU. Copies in each direction have a stream of their own; compute waits for events, the host does not.

    The compute stream is that in which the user's thread launches; autograd's thread takes it over by itself.
    """

    uses_host_memory = False

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self.is_unified = is_unified(torch_device)
        # One stream a direction: a GPU has a copy engine for each, and a download never waits behind uploads.
        self._uploads = torch.cuda.Stream(torch_device)
        self._downloads = torch.cuda.Stream(torch_device)
        # See `_new_anchor`. Made before the first stamp, which needs one.
        self._anchors = torch.cuda.Stream(torch_device)
        self._anchor = self._new_anchor()
        self.pin = functools.partial(_register_with_driver, torch_device)

    def allocate_flat(self, num_bytes: int) -> FlatBuffer:
        return CudaFlatBuffer(num_bytes, self.torch_device)

    def free_bytes(self, model: nn.Module) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        # Unified memory: half of the system's free memory, which counts the page cache as free. The driver does not.
        if self.is_unified:
            free = free_bytes() // 2
        # Blocks that torch's allocator keeps can be allocated again, though the driver counts them as used.
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        there = sum(p.nbytes for p in model.parameters() if p.device == self.torch_device)
        return int(free) + cached + there

    def peak_bytes(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def release_unused(self) -> None:
        super().release_unused()
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def background_thread(self) -> Iterator[None]:
        # A stream of the device's: entering it makes that device the thread's, which would begin with number 0.
        with super().background_thread(), torch.cuda.stream(torch.cuda.Stream(self.torch_device)):
            yield

    def carried(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        # Both, because a script may compute on this device while another one is its current device.
        stream, index = torch.cuda.current_stream(self.torch_device), torch.cuda.current_device()

        @contextlib.contextmanager
        def carried() -> Iterator[None]:
            with torch.cuda.stream(stream), torch.cuda.device(index):
                yield

        return carried

    def mark(self) -> Fence:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Fence) -> Fence:
        return self._copy(self._uploads, target, source, after)

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Fence) -> Fence:
        return self._copy(self._downloads, target, source, after)

    def _copy(
        self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor, after: Fence
    ) -> torch.cuda.Event:
        # Between two places on the GPU (an optimizer that runs there), one of them is working memory of the calling
        # thread: its kernels have to have written the source, or left what was in the target's memory before.
        here = self.mark() if source.is_cuda and target.is_cuda else None
        with torch.cuda.stream(stream):
            # The host does not wait here; the copy stream does.
            for fence in (after, here):
                if fence is not None:
                    stream.wait_event(fence)
            begin = torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            if source.is_cuda:
                # The caching allocator must not hand the source's memory out again before this copy has run.
                source.record_stream(stream)
            # Blocking: background threads that wait leave the core to others.
            event = torch.cuda.Event(blocking=True, enable_timing=True)
            event.record(stream)
        # Copies within the GPU are no traffic between host and device, so the report leaves them out.
        if source.is_cuda != target.is_cuda:
            name = "upload" if target.is_cuda else "download"
            self._copies.append(Copy(name, source.nbytes, (self._anchor, begin), (self._anchor, event)))
        return event

    def is_done(self, fence: Fence) -> bool:
        return fence is None or bool(fence.query())

    def synchronize(self, fence: Fence) -> None:
        if fence is not None:
            fence.synchronize()

    def compute_waits_for(self, fence: Fence) -> None:
        if fence is not None:
            torch.cuda.current_stream(self.torch_device).wait_event(fence)

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return self._anchor, event

    def seconds_at(self, stamp: Any) -> float | None:
        (anchor, anchor_seconds), event = stamp
        # elapsed_time is in milliseconds.
        return anchor_seconds + anchor.elapsed_time(event) * 1e-3 if event.query() else None

    def pop_copies(self) -> list[tuple[Copy, float, float]]:
        taken = super().pop_copies()
        self._anchor = self._new_anchor()
        return taken

    def _new_anchor(self) -> tuple[torch.cuda.Event, float]:
        """An event that the GPU passes now, and ``time.perf_counter()`` at that moment: the base for `seconds_at`."""
        # Renewed by each `pop_copies`, because the GPU's clock drifts against the host's. Also, CUDA returns the time
        # between two events as a 32-bit float of milliseconds, which gets coarse. On a stream of its own, so that
        # `synchronize` waits for nothing that was launched before.
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._anchors)
        event.synchronize()
        return event, time.perf_counter()


def _register_with_driver(torch_device: torch.device, address: int, num_bytes: int) -> Callable[[], None] | None:
    runtime: Any = torch.cuda.cudart()
    try:
        with torch.cuda.device(torch_device):  # else the driver would take memory of device 0 as well
            torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
    except RuntimeError as error:  # some systems allow little of it, WSL2 for one
        logger.warning(
            "%s of host memory cannot be pinned (%s): copies to and from the GPU are slower, and block the thread that "
            "launches kernels. The driver may allow more after `ulimit -l unlimited`",
            size(num_bytes),
            error,
        )
        return None

    def unregister() -> None:
        with torch.cuda.device(torch_device):
            runtime.cudaHostUnregister(address)

    return unregister


def device_for(torch_device: torch.device) -> ComputeDevice:
    """The compute device of a torch device: CPU or CUDA."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else ComputeDevice(torch_device)


def gradient_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """2-norm of each gradient in fp32, as ``torch.nn.utils.get_total_norm`` takes them per tensor: 0-dim fp32 tensors.

    A bf16 gradient gives the same bits as its fp32 copy would. It must have no gaps in memory: on the CPU there is no copy.
    """
    if gradients and gradients[0].is_cpu and {each.dtype for each in gradients} == {torch.float32}:
        return list(norms_of_each(gradients, 2.0))  # the same kernel, without Python in between
    norms: list[torch.Tensor] = []
    for gradient in gradients:
        if gradient.device.type != "cpu":
            # One at a time: an fp32 copy of each bf16 gradient, of which only one is in memory.
            norms.append(norms_of_each([gradient.float()], 2.0)[0])
        elif gradient.dtype == torch.bfloat16:
            norms.append(narrow_norm(gradient))
        else:
            norms.append(torch.linalg.vector_norm(gradient, 2.0, dtype=torch.float32))
    return norms


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """`gradient_norms` of one."""
    return gradient_norms([gradient])[0]


def choose_device(model: nn.Module, device: torch.device | str | None, number: int = 0) -> torch.device:
    """Resolve ``device``. None: the model's GPU, else the current GPU, else the CPU.

    ``number``: local rank. If an index is missing, this GPU becomes the current one, see `set_default_gpu`.
    """
    if device is not None:
        chosen = torch.device(device)
    else:
        chosen = next((p.device for p in model.parameters() if p.device.type == "cuda"), torch.device("cpu"))
        if chosen.type == "cpu" and torch.cuda.is_available():
            chosen = torch.device("cuda")
    # Without an index. All later code compares devices, so the index is filled in here.
    if str(chosen) == "cuda":
        set_default_gpu(number)
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
