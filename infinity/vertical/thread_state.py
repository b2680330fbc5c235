"""torch's settings per thread, and random generators: saved, to repeat a computation in another thread."""

from __future__ import annotations

import contextvars
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from infinity.device.compute import ComputeDevice
from infinity.torch_internals.names import DeviceContext, dispatch_modes, function_modes, transform

T = TypeVar("T")


def obstacle() -> str | None:
    """Why the calling thread's state cannot be carried over to another thread; None if it can."""
    # A mode is an object of the user's that collects what it sees. Entered on several threads, it would see their
    # operations interleaved. `torch.device` as a context is a mode too, but has no state.
    if torch.is_inference_mode_enabled():
        return "inference mode is on"
    if not torch.is_grad_enabled():
        return "gradients are switched off"
    if dispatch_modes():
        return "a torch dispatch mode is active, and would not see the other threads"
    if any(not isinstance(mode, DeviceContext) for mode in function_modes()):
        return "a torch function mode is active, and would not see the other threads"
    if transform() is not None:
        return "a torch.func transform is active, and would not see the other threads"
    return None


class ThreadState:
    """A snapshot of the calling thread's autocast settings, default device, stream and context variables."""

    def __init__(self, device: ComputeDevice) -> None:
        """``device``: the compute device."""
        self._carried = device.carried()
        self._autocasts = {kind: _autocast(kind) for kind in ("cpu", device.torch_device.type)}
        self._devices = [mode.device for mode in function_modes() if isinstance(mode, DeviceContext)]
        self._context = contextvars.copy_context()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the settings to the calling thread inside the ``with`` block, except the context variables."""
        with ExitStack() as stack:
            stack.enter_context(self._carried())
            for kind, (is_enabled, dtype, caches) in self._autocasts.items():
                now = _autocast(kind)
                # Entered only if it changes something: leaving the outermost autocast clears torch's cache of cast
                # weights.
                if now != (is_enabled, dtype, caches) and (is_enabled or now[0]):
                    stack.enter_context(torch.autocast(kind, dtype, is_enabled, caches))
            present = [mode.device for mode in function_modes() if isinstance(mode, DeviceContext)]
            if self._devices and self._devices != present:
                stack.enter_context(torch.device(self._devices[-1]))
            yield

    def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` with all of it, context variables included. A context cannot be entered twice at a time."""
        return self._context.run(self._call, function)

    def _call(self, function: Callable[[], T]) -> T:
        with self.entered():
            return function()


def _autocast(device_type: str) -> tuple[bool, torch.dtype, bool]:
    """Whether autocast is on, its dtype, and whether it caches casts, in the calling thread."""
    is_enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return is_enabled, dtype, torch.is_autocast_cache_enabled()


class RandomState:
    """The state of the global random generators: torch's for CPU and compute device, Python's and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._now()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def _now(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def is_unchanged(self) -> bool:
        """Whether nothing has been drawn since."""
        # NumPy's state is (name, key array, position, has_gauss, cached_gaussian): the array needs a comparison of its
        # own.
        numpy: Any = np.random.get_state()
        is_same_numpy = numpy[2:] == self._numpy[2:] and np.array_equal(numpy[1], self._numpy[1])
        return (
            random.getstate() == self._python
            and is_same_numpy
            and all(torch.equal(a, b) for a, b in zip(self._states, self._now(), strict=True))
        )

    def restore(self) -> None:
        """Set all generators back to this state."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state(self._states[1], self._device)
