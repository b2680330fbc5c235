"""Saves what a computation depends on besides its arguments, and restores it, to repeat the computation.

That is the state of a thread (autocast, default device, stream, context variables), of random generators, and of a model
(buffers and attributes).

A block is computed twice. So buffers that its forward writes to (batch norms, spectral norms) are restored before the
second computation. Between blocks only batch norms may write, since each uses its own buffers at one place of the
model. Any other buffer may be read elsewhere, where the micro-batches arrive in another order. A step that changes one
is repeated in the ordinary order.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from infinity.device.compute import ComputeDevice
from infinity.errors import ModelError
from infinity.numerics.random_states import random_states, set_random_states
from infinity.torch_internals.names import (
    DeviceContext,
    NormBase,
    dispatch_modes,
    function_modes,
    transform,
    version_of,
)
from infinity.units.tiles import TiledWeight

# Attributes that are not saved: the dicts of a module, which are handled by themselves or do not change, and the two
# that `Interception` replaces during a step.
_OF_THE_SCHEDULE = frozenset({"_parameters", "_buffers", "_modules", "forward", "gradient_checkpointing"})
# A buffer above 64 MiB is not copied before each step. If a step that fails has written to one, that is an error.
_MOST_COPIED_BYTES = 1 << 26


T = TypeVar("T")


def thread_state_obstacle() -> str | None:
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


class BlockBuffers:
    """The buffers of a block and of the modules in it."""

    def __init__(self, block: nn.Module) -> None:
        self.modules = list(dict.fromkeys(block.modules()))
        self.are_written = False
        """Whether a forward of the block has changed them."""

    def on_write(self) -> None:
        """Record that a forward has changed them."""
        self.are_written = True

    def marks(self) -> list[object]:
        """A list that compares unequal after a buffer was replaced or written to."""
        marks: list[object] = [(id(buffer), version_of(buffer)) for _, _, buffer in self._present()]
        if any(
            isinstance(module, NormBase) and module.training and module.track_running_stats for module in self.modules
        ):
            # torch's norm kernels update running statistics without counting it in the version. A fresh object equals
            # no other, so a training batch norm always counts as written to.
            marks.append(object())
        return marks

    def capture(self) -> Callable[[], None]:
        """Copy their present values. Returns a function that puts the same tensors with these values back."""
        copies = [(home, name, buffer, buffer.detach().clone()) for home, name, buffer in self._present()]

        def restore() -> None:
            for home, name, buffer, values in copies:
                _put_back(buffer, values)
                home[name] = buffer

        return restore

    def _present(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        for module in self.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module._buffers, name, buffer


class StepStart:
    """A model's buffers and attributes and the random generators before a step, to repeat it.

    Attributes are restored by reference, and the objects in them are not copied.
    """

    # Attributes matter for a rotary embedding that grows in forward: it stores its new table in a buffer and the length
    # of that in an attribute. Restoring the buffer alone would leave a length for which there is no table.

    def __init__(self, model: nn.Module, before: StepStart | None = None) -> None:
        """``before``: of the step before; its copies of unchanged buffers are reused."""
        self._random = random_states()
        self._modules = [(module, dict(_attributes(module)), dict(module._buffers)) for module in model.modules()]
        earlier = {} if before is None else before._kept
        self._kept: dict[int, _Buffer] = {}
        for module, _, buffers in self._modules:
            for name, buffer in buffers.items():
                if buffer is None or id(buffer) in self._kept:
                    continue
                known = earlier.get(id(buffer))
                if known is None or not known.is_surely_unchanged():
                    known = _Buffer(f"{type(module).__name__}.{name}", buffer, counts=not isinstance(module, NormBase))
                self._kept[id(buffer)] = known

    def changed_buffer(self, known: Container[nn.Module]) -> str | None:
        """Class and name of a buffer that was replaced or written to; those of ``known`` modules and norms do not
        count."""
        for module, _, before in self._modules:
            if module in known or isinstance(module, NormBase):
                continue
            for name in {**before, **module._buffers}:
                buffer = module._buffers.get(name)
                if buffer is not before.get(name) or (buffer is not None and not self._kept[id(buffer)].is_unchanged()):
                    return f"{type(module).__name__}.{name}"
        return None

    def restore(self) -> None:
        """Restore everything.

        Raises:
            ModelError: a buffer that was too large to be copied has been written to.
        """
        set_random_states(self._random)
        for module, attributes, buffers in self._modules:
            for name in [name for name, _ in _attributes(module) if name not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer in self._kept.values():
            buffer.restore()


class _Buffer:
    """A buffer with a copy of its values."""

    def __init__(self, name: str, buffer: torch.Tensor, *, counts: bool) -> None:
        """``counts``: whether its version counts all writes, which it does not for the statistics of norms."""
        self._name = name
        self._counts = counts
        self._buffer = buffer
        self._version = version_of(buffer)
        self._values = buffer.detach().clone() if buffer.nbytes <= _MOST_COPIED_BYTES else None

    def is_unchanged(self) -> bool:
        """Whether its version is the same as before."""
        return version_of(self._buffer) == self._version

    def is_surely_unchanged(self) -> bool:
        return self._counts and self.is_unchanged()

    def restore(self) -> None:
        if self.is_surely_unchanged():
            return
        if self._values is not None:
            _put_back(self._buffer, self._values)
            self._version = version_of(self._buffer)  # restoring is a write too; the next step may reuse this copy
        elif not self.is_unchanged():
            raise ModelError(
                f"the model's forward writes to '{self._name}', which forbids running micro-batches together, and the "
                "buffer is too large to be restored to its value before the step",
                cure="Set config key 'infinity.schedule' to \"ordinary\"",
            )


def _put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give ``tensor`` these values, and their shape."""
    # The shape changes too: torch's quantization observers start with empty buffers, which the first forward resizes.
    with torch.no_grad():
        if tensor.shape != values.shape:
            tensor.resize_(values.shape)
        tensor.copy_(values)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in module.__dict__.items():
        if name not in _OF_THE_SCHEDULE and not isinstance(value, nn.Parameter | TiledWeight):
            yield name, value
