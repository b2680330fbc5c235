"""``get_accelerator()``: the compute device as scripts for DeepSpeed ask for it. For scripts; the engine does not use it."""

from __future__ import annotations

from typing import Any

import torch


class Accelerator:
    """Answers of the current GPU if there is one, else of the CPU, by DeepSpeed's names.

    What it does not know is looked up in ``torch.cuda`` or ``torch.cpu``.
    """

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._namespace: Any = torch.cuda if self._name == "cuda" else torch.cpu

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._namespace, name)

    def is_available(self) -> bool:
        """True: there is always a CPU."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda:0" for an index; without one, and on a CPU, the device's type."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """On a GPU a context manager that makes it the current one."""
        return torch.device(self.device_name(device_index)) if self._name == "cpu" else torch.cuda.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make that GPU the current one."""
        if self._name != "cpu":
            torch.cuda.set_device(device_index)

    def current_device(self) -> Any:
        """Index of the current GPU, or "cpu"."""
        return torch.cuda.current_device() if self._name == "cuda" else "cpu"

    def current_device_name(self) -> str:
        """With the index of the current GPU, or "cpu"."""
        return f"cuda:{torch.cuda.current_device()}" if self._name == "cuda" else "cpu"

    def device_count(self) -> int:
        """Number of GPUs, or 1."""
        return torch.cuda.device_count() if self._name == "cuda" else 1

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the GPU."""
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def supported_dtypes(self) -> list[torch.dtype]:
        """Of weights that are trained."""
        narrow = [(torch.float16, self.is_fp16_supported()), (torch.bfloat16, self.is_bf16_supported())]
        return [torch.float32, *(dtype for dtype, is_supported in narrow if is_supported)]

    def communication_backend_name(self) -> str:
        """Of ``torch.distributed``."""
        return "nccl" if self._name == "cuda" else "gloo"

    def manual_seed(self, seed: int) -> Any:
        """Seed the current device's generator."""
        return torch.cuda.manual_seed(seed) if self._name == "cuda" else torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self) -> torch.Tensor:
        """Of the current device's generator, uint8."""
        return torch.cuda.get_rng_state() if self._name == "cuda" else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        """What `get_rng_state` gave."""
        torch.cuda.set_rng_state(new_state) if self._name == "cuda" else torch.set_rng_state(new_state)

    def empty_cache(self) -> None:
        """Give cached GPU memory back."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16."""
        return True

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of GPU memory; 0 on a CPU."""
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Most bytes of GPU memory so far; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(device_index) if self._name == "cuda" else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forget that most."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)


_accelerators: list[Accelerator] = []


def get_accelerator() -> Accelerator:
    """The one of this process."""
    if not _accelerators:
        _accelerators.append(Accelerator())
    return _accelerators[0]
