"""``get_accelerator()``: DeepSpeed's interface to the compute device, for scripts. The engine does not use it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from infinity.device.host_memory import free_bytes, memory_limits
from infinity.distributed.process_groups import number_of_launcher

_TENSORS = ("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor")
"""Constructors of tensors."""
# DeepSpeed's interface has names that torch.cuda has deprecated.
_EARLIER_NAMES = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}
_ON_A_CPU: dict[str, Callable[..., Any]] = {
    **{name: lambda *_: None for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")},
    **{
        name: lambda *_: 0
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    },
    "memory_stats": lambda *_: {},
    "is_bf16_supported": lambda *_: True,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "initial_seed": torch.initial_seed,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
}
"""Functions of ``torch.cuda`` -> what they do without a GPU."""


class Accelerator:
    """The current GPU, or the CPU without one. Other names are looked up in ``torch.cuda`` or ``torch.cpu``."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._namespace: Any = torch.cuda if self._name == "cuda" else torch.cpu

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            on_cpu: Any = getattr(torch, name)
            return (
                on_cpu
                if self._name == "cpu"
                else functools.partial(torch.tensor, dtype=on_cpu.dtype, device=self._name)
            )
        name = _EARLIER_NAMES.get(name, name)
        if name in _ON_A_CPU:
            function = _ON_A_CPU[name] if self._name == "cpu" else getattr(torch.cuda, name)
            # DeepSpeed's argument `device_index` is torch's first one. None is left out: it means the current device.
            return lambda *args, **named: function(*(each for each in (*args, *named.values()) if each is not None))
        found = None if name.startswith("_") else getattr(self._namespace, name, None)
        if found is None:
            raise AttributeError(
                f"get_accelerator() has no '{name}' here, nor has torch.{self._name}. Call what torch has for it, for the device "
                "get_accelerator().current_device_name()",
                name=name,
                obj=self,
            )
        return found

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda:0" for an index; without one, and on a CPU, the device's type."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """The device. On a GPU, a context manager that makes it the current one."""
        return torch.device(self.device_name(device_index)) if self._name == "cpu" else torch.cuda.device(device_index)

    def current_device_name(self) -> str:
        """With the index of the current GPU, or "cpu"."""
        return f"cuda:{torch.cuda.current_device()}" if self._name == "cuda" else "cpu"

    def device_count(self) -> int:
        """Number of GPUs. On a CPU, the number of processes on this machine, by the launcher's variables."""
        if self._name == "cuda":
            return torch.cuda.device_count()
        return number_of_launcher("LOCAL_SIZE", str(number_of_launcher("LOCAL_WORLD_SIZE", "1")))

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes of trainable weights."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16."""
        return True

    def communication_backend_name(self) -> str:
        """The backend of ``torch.distributed``."""
        return "nccl" if self._name == "cuda" else "gloo"

    def random(self) -> Any:
        """The module of torch's random numbers."""
        return torch.random

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        """The random generator of a device."""
        return torch.cuda.default_generators[device_index] if self._name == "cuda" else torch.default_generator

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of GPU memory, or of host memory within this process's limits."""
        if self._name == "cuda":
            return torch.cuda.get_device_properties("cuda" if device_index is None else device_index).total_memory
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min([whole, *(limit.limit_bytes for limit in memory_limits())])

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of it that are free."""
        return torch.cuda.mem_get_info(device_index)[0] if self._name == "cuda" else free_bytes()

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """The tensor in pinned host memory, if there is a GPU to pin it for."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is in pinned host memory."""
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether it is on this kind of device."""
        return tensor.device.type == self._name

    def is_synchronized_device(self) -> bool:
        """Whether calls return when their work is done: on a CPU."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Begin a range of NVTX; nothing on a CPU."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        """End it."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Initialize the GPU, and call ``callback``."""
        if self._name == "cuda":
            torch.cuda.init()
        callback()


@functools.cache
def get_accelerator() -> Accelerator:
    """The one of this process."""
    return Accelerator()
