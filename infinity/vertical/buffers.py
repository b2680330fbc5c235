"""A model's buffers, attributes and random numbers before a step, and what its forward does to the buffers.

A block is computed twice, so buffers that it writes to (batch norms, spectral norms) are set back for the second time.
Between blocks only batch norms may write: each uses its own buffers, at one place. Any other buffer might be read at another
place, which the micro-batches reach in another order, so a step that changes one is taken again in the ordinary order.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.torch_internals.names import NormBase, version_of
from infinity.units.tiles import TiledWeight
from infinity.vertical.thread_state import RandomState

_OF_THE_SCHEDULE = frozenset({"_parameters", "_buffers", "_modules", "forward", "gradient_checkpointing"})
_MOST_COPIED_BYTES = 1 << 26


class BlockBuffers:
    """The buffers of a block and of the modules in it."""

    def __init__(self, block: nn.Module) -> None:
        self.modules = list(dict.fromkeys(block.modules()))
        self.are_written = False
        """Whether a forward has been seen to change them."""

    def on_write(self) -> None:
        """A forward has changed them."""
        self.are_written = True

    def marks(self) -> list[object]:
        """Something that differs after a buffer was replaced or written to."""
        marks: list[object] = [(id(buffer), version_of(buffer)) for _, _, buffer in self._present()]
        if any(
            isinstance(module, NormBase) and module.training and module.track_running_stats for module in self.modules
        ):
            marks.append(object())  # their kernels write past the version
        return marks

    def capture(self) -> BufferValues:
        """Their present values."""
        return BufferValues([(home, name, buffer, buffer.detach().clone()) for home, name, buffer in self._present()])

    def _present(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        for module in self.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module._buffers, name, buffer


class BufferValues:
    """Values of buffers at one moment."""

    def __init__(self, entries: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]) -> None:
        self._entries = entries

    def restore(self) -> None:
        """The buffers are the same tensors with the same values again."""
        for home, name, buffer, values in self._entries:
            _put_back(buffer, values)
            home[name] = buffer


class StepStart:
    """A model and the random generators as they are before a step, to begin it anew.

    Attributes are put back as they were, but not what they hold: a rotary table that has grown comes with the length for
    which it was made.
    """

    def __init__(self, model: nn.Module, device: torch.device, before: StepStart | None = None) -> None:
        """``before``: of an earlier step; copies of buffers that have not changed since are taken from it."""
        self._random = RandomState(device)
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
        """A buffer that has been replaced or written to since, by class and name; not of ``known`` modules or batch norms."""
        for module, _, before in self._modules:
            if module in known or isinstance(module, NormBase):
                continue
            for name in {**before, **module._buffers}:
                buffer = module._buffers.get(name)
                if buffer is not before.get(name) or (buffer is not None and not self._kept[id(buffer)].is_unchanged()):
                    return f"{type(module).__name__}.{name}"
        return None

    def restore(self) -> None:
        """All is as it was.

        Raises:
            ModelError: something too large to be copied beforehand has been written to.
        """
        self._random.restore()
        for module, attributes, buffers in self._modules:
            for name in [name for name, _ in _attributes(module) if name not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer in self._kept.values():
            buffer.restore()


class _Buffer:
    """One of them, with its values."""

    def __init__(self, name: str, buffer: torch.Tensor, *, counts: bool) -> None:
        """``counts``: whether its version shows all writes; the kernels of batch norms write past it."""
        self._name = name
        self._counts = counts
        self._buffer = buffer
        self._version = version_of(buffer)
        self._values = buffer.detach().clone() if buffer.nbytes <= _MOST_COPIED_BYTES else None

    def is_unchanged(self) -> bool:
        """Whether nobody has written to it, as far as torch counts."""
        return version_of(self._buffer) == self._version

    def is_surely_unchanged(self) -> bool:
        return self._counts and self.is_unchanged()

    def restore(self) -> None:
        if self.is_surely_unchanged():
            return
        if self._values is not None:
            _put_back(self._buffer, self._values)
            self._version = version_of(self._buffer)
        elif not self.is_unchanged():
            raise ModelError(
                f"the model's forward writes to '{self._name}' in a way that forbids taking micro-batches together, and it is "
                "too large to be put back as it was before the step",
                cure="Set config key 'infinity.schedule' to \"ordinary\"",
            )


def _put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """``tensor`` has these values again, and their shape: observers of quantization give theirs one in the first forward."""
    with torch.no_grad():
        if tensor.shape != values.shape:
            tensor.resize_(values.shape)
        tensor.copy_(values)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in module.__dict__.items():
        if name not in _OF_THE_SCHEDULE and not isinstance(value, nn.Parameter | TiledWeight):
            yield name, value
