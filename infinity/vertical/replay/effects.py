"""What a forward leaves behind in a model besides its result, so that it can be undone or done again.

Knows modules' buffers and attributes, and random generators; must not know units or schedules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from infinity.torch_internals.names import NormBase
from infinity.units.tiles import TiledWeight
from infinity.vertical.replay.ambient import RandomState
from infinity.vertical.replay.buffer_watch import Key, buffers_of
from infinity.vertical.replay.object_state import ObjectState, is_same_value, same_bits, too_large

_HOOKS = tuple(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict) and "hooks" in name)
"""Containers that every module has, nearly always empty; what users' hooks keep is theirs."""
_HOOKS_OF_TENSORS = "_backward_hooks", "_post_accumulate_grad_hooks"
_NONE: dict[Any, Any] = {}
_IGNORED = frozenset({"_parameters", "_buffers", "_modules", "forward", "gradient_checkpointing", *_HOOKS})
"""Attributes that are compared elsewhere, or that the schedule itself sets."""
_MOST_COPIED_BYTES = 1 << 26
_SMALL_BYTES = 1 << 16
"""Up to this size, copying costs less than trusting a tensor's version: batch norms write past it."""


class Buffers:
    """The buffers of a module and its descendants: their values at some moments, cloned only where they change."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(dict.fromkeys(module.modules()))
        self.are_written = False
        """Whether a forward has been seen to change them."""

    def note_written(self) -> None:
        """A forward has changed them."""
        self.are_written = True

    def __iter__(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module._buffers, name, buffer

    def marks(self) -> list[object]:
        """Something that differs after a buffer was replaced or written to."""
        marks: list[object] = [(id(buffer), buffer._version) for _, _, buffer in self]
        if any(
            isinstance(module, NormBase) and module.training and module.track_running_stats for module in self._modules
        ):
            marks.append(object())  # their kernels write past the version
        return marks

    def capture(self) -> BufferValues:
        """Their present values."""
        return BufferValues([(home, name, buffer, buffer.detach().clone()) for home, name, buffer in self])


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
    """A model and the generators as they are before a step, to begin it anew."""

    def __init__(
        self, model: nn.Module, device: torch.device, before: StepStart | None = None, written: Collection[Key] = ()
    ) -> None:
        """
        Args:
            model, device: whose state it is.
            before: of an earlier step; clones of what has not changed since are taken from it.
            written: buffers that a forward writes to, perhaps past their versions.
        """
        self._model = model
        self._random = RandomState(device)
        self._modules = list(model.modules())
        earlier = {} if before is None else before._tensors
        self._tensors: dict[Key, _Tensor] = {}
        for home, name, value in self._present_tensors():
            key = id(home), name
            known = earlier.get(key)
            # Of what is small the copy may be out of date: see `_SMALL_BYTES`.
            if known is None or not known.is_same(value) or value.nbytes <= _SMALL_BYTES or key in written:
                known = _Tensor(home, value)
            self._tensors[key] = known
        self._attributes = [(module, dict(_others_of(module))) for module in self._modules]
        self._holders = ObjectState(
            (f"{type(module).__name__}.{name}", value)
            for module, attributes in self._attributes
            for name, value in attributes.items()
        )
        self.too_much = self._holders.too_much
        """An attribute that holds more than can be compared, by class and name."""
        owners: list[tuple[Any, str]] = [(module, name) for module in self._modules for name in _HOOKS]
        owners += [(parameter, name) for parameter in model.parameters() for name in _HOOKS_OF_TENSORS]
        self._hooks = [
            (owner, name, dict(found) if (found := _hooks_of(owner, name)) else _NONE) for owner, name in owners
        ]

    def _present_tensors(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        for module in self._modules:
            for home in (module._buffers, module.__dict__):
                for name, value in list(home.items()):
                    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter | TiledWeight):
                        yield home, name, value

    def changed(self, *, is_thorough: bool) -> str | None:
        """An attribute of a module that a forward has changed since, by class and name; buffers do not count.

        Args:
            is_thorough: compare the values of large tensors, too, and not only their versions.
        """
        for module, before in self._attributes:
            now = dict(_others_of(module))
            for name in {*now, *before}:
                if name not in now or name not in before or not is_same_value(now[name], before[name]):
                    return f"{type(module).__name__}.{name}"
        for home, name, value in self._present_tensors():
            known = self._tensors.get((id(home), name))
            if "_buffers" in home and (known is None or not known.has_same_bits(value, is_thorough=is_thorough)):
                return f"the tensor '{name}' of a module"
        if any(_hooks_of(owner, name).keys() != before.keys() for owner, name, before in self._hooks):
            return "the hooks of a module or parameter"
        return self._holders.changed()

    def written_buffers(self, *, is_thorough: bool) -> dict[Key, str]:
        """The buffers that a forward has replaced or written to since, with their names for messages.

        Args:
            is_thorough: see `changed`.
        """
        return {
            key: f"{type(module).__name__}.{name}"
            for key, module, name, value in buffers_of(self._model)
            if (known := self._tensors.get(key)) is None or not known.has_same_bits(value, is_thorough=is_thorough)
        }

    def restore(self) -> None:
        """All is as it was.

        Raises:
            UnsupportedModelError: something too large to be copied beforehand has been written to.
        """
        self._random.restore()
        for module, before in self._attributes:
            for name in [name for name, _ in _others_of(module) if name not in before]:
                del module.__dict__[name]
            module.__dict__.update(before)
        for owner, name, hooks in self._hooks:
            container = _hooks_of(owner, name)
            if container.keys() != hooks.keys():
                container.clear()
                container.update(hooks)
        self._holders.restore()
        for home, name, _ in list(self._present_tensors()):
            if (id(home), name) not in self._tensors:
                del home[name]
        for (_, name), tensor in self._tensors.items():
            tensor.restore(name)


class _Tensor:
    """A tensor in a module's dictionary, with its values."""

    def __init__(self, home: dict[str, Any], value: torch.Tensor) -> None:
        self._home = home
        self._value = value
        self._version = value._version
        self._clone = value.detach().clone() if value.nbytes <= _MOST_COPIED_BYTES else None

    def is_same(self, value: torch.Tensor) -> bool:
        """Whether ``value`` is this very tensor, and nobody has written to it."""
        return value is self._value and value._version == self._version

    def has_same_bits(self, value: torch.Tensor, *, is_thorough: bool) -> bool:
        """Whether ``value`` is this very tensor, and as it was: by its values if it is small, else by its version."""
        is_small = is_thorough or value.nbytes <= _SMALL_BYTES
        if not self.is_same(value) or self._clone is None or not is_small or value.layout is not torch.strided:
            return self.is_same(value)
        return same_bits(value, self._clone)

    def restore(self, name: str) -> None:
        """The tensor is in its place again, with its values."""
        if not self.has_same_bits(self._value, is_thorough=True):
            if self._clone is None:
                raise too_large(name)
            _put_back(self._value, self._clone)
            self._version = self._value._version
        self._home[name] = self._value


def _put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """``tensor`` has these values again, and their shape: observers of quantization give theirs one in the first forward."""
    with torch.no_grad():
        if tensor.shape != values.shape:
            tensor.resize_(values.shape)
        tensor.copy_(values)


def _hooks_of(owner: Any, name: str) -> dict[Any, Any]:
    found: dict[Any, Any] | None = getattr(owner, name, None)
    return _NONE if found is None else found


def _others_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in list(module.__dict__.items()):
        if name not in _IGNORED and not isinstance(value, torch.Tensor):
            yield name, value
