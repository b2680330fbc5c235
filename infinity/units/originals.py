"""Undo of a failed `initialize`: restores the parameters bit for bit.

[Note: what is kept] The engine stores a trainable parameter as fp32 and a frozen one in its compute dtype. Where that
keeps every bit (nearly always), the parameter is restored from there. Anything else is kept as it was: an fp64 weight,
a frozen fp32 one under bf16, or one that is stored packed. It is kept on a drive if there is one, because `initialize`
releases memory unit by unit. A parameter that was on a drive before (see `infinity.loading`) is restored there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path

import torch
from torch import nn

from infinity.device.drive_tensors import DriveTensors, drives_of, is_dense, on_drive, write_out
from infinity.errors import StorageError
from infinity.numerics.raw_bytes import raw_bytes
from infinity.units.parameter import PagedParameter, plain_grad, release_parameters, set_plain_grad
from infinity.units.unit import Unit

# Elements that are cast and compared at a time: bounds the two temporary copies to 8 MiB each for fp64.
_PART_NUMEL = 1 << 20


@dataclass(eq=False)
class Originals:
    """What makes the model as it was before, if `infinity.initialize` fails. Forgotten when that returns."""

    _units: list[Unit]
    """All units of the engine to be."""
    cuts_nans: bool
    """Whether main weights are split into bf16 and a remainder, which keeps only one bit pattern of NaN."""
    stored: Callable[[nn.Parameter], torch.Tensor]
    """Reads what the engine stores of a parameter: its main weight, or its weight if it is frozen."""
    directories: InitVar[Sequence[Path]]
    """On drives, for copies; none: originals that are kept stay in memory."""
    _in_memory: dict[int, torch.Tensor] = field(default_factory=dict)
    """``id`` of a parameter -> the very tensor that it had."""
    _on_drive: dict[int, torch.Tensor] = field(default_factory=dict)
    """``id`` of a parameter -> a copy of its values."""

    def __post_init__(self, directories: Sequence[Path]) -> None:
        self._drives = DriveTensors(directories) if directories else None
        # By id. All of it is lost when a parameter becomes a paged one.
        parameters = [parameter for unit in self._units for parameter in unit.parameters]
        self._gradients = {id(parameter): parameter.grad for parameter in parameters}
        self._facts = {
            id(parameter): (parameter.dtype, parameter.device, tuple(parameter.stride()), drives_of(parameter))
            for parameter in parameters
        }

    def gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters that had a gradient before, with that gradient."""
        parameters = [parameter for unit in self._units for parameter in unit.parameters]
        found = ((parameter, self._gradients[id(parameter)]) for parameter in parameters)
        return [(parameter, gradient) for parameter, gradient in found if gradient is not None]

    def keep(self, unit: Unit) -> None:
        """Keep copies of a unit's parameters that the engine's storage would round: see [Note: what is kept].

        They must still be ordinary ones.
        """
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            value = parameter.detach()
            dtype = torch.float32 if slot.spec.is_trainable else slot.spec.dtype
            is_rounded = slot.spec.packed is not None
            if not value.numel() or (not is_rounded and self._survives(value, dtype, is_split=slot.spec.is_trainable)):
                continue
            # A value of the right dtype is here for its NaNs only (`cuts_nans`), and one on a drive takes no memory:
            # both are kept as they are. Others are copied to a drive, if there is one with room.
            if self._drives is not None and (value.dtype != dtype or is_rounded) and not on_drive(value):
                with contextlib.suppress(StorageError):
                    self._on_drive[id(parameter)] = self._drives.like(value).copy_(value)
                    continue
            self._in_memory[id(parameter)] = value
        if any(id(parameter) in self._on_drive for parameter in unit.parameters):
            write_out()  # else copies would wait in memory, beside the budget, for a window's worth of them

    def _survives(self, value: torch.Tensor, dtype: torch.dtype, *, is_split: bool) -> bool:
        # The sum is NaN if any element is (or if inf and -inf meet: then a copy is kept that is not needed).
        if is_split and self.cuts_nans and bool(value.sum().isnan()):
            return False
        if value.dtype == dtype:
            return True
        # Bytes are compared, as NaN does not equal NaN, and -0 equals 0.
        parts = value.as_strided((value.numel(),), (1,)).split(_PART_NUMEL) if is_dense(value) else [value]
        return all(torch.equal(raw_bytes(part.to(dtype).to(value.dtype)), raw_bytes(part)) for part in parts)

    def restore(self) -> None:
        """Make all parameters ordinary again, with their values, dtype, device, strides and gradient.

        A parameter that cannot be read stays paged out. The error is raised when all others are restored.
        """
        failure: BaseException | None = None
        for unit in self._units:
            # All values are read before any parameter is released: reading one opens the unit, which binds all of them.
            values: dict[nn.Parameter, torch.Tensor] = {}
            for parameter in unit.parameters:
                if isinstance(parameter, PagedParameter):
                    try:
                        values[parameter] = self._value_of(parameter)
                    except Exception as error:
                        failure = failure or error
            release_parameters(values)
            for parameter, value in values.items():
                parameter.data = value
            for parameter in unit.parameters:
                if plain_grad(parameter) is None:
                    set_plain_grad(parameter, self._gradients[id(parameter)])
        if failure is not None:
            raise failure

    def _value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        dtype, device, stride, drives = self._facts[id(parameter)]
        key = id(parameter)
        if key in self._in_memory:
            return self._in_memory[key]
        value = self._on_drive[key] if key in self._on_drive else self.stored(parameter)
        for dim, step in enumerate(stride):
            if step == 0:  # an expanded parameter: one element of memory stands for all of this dimension
                value = value[(slice(None),) * dim + (slice(0, 1),)]
        if drives is not None:
            place = drives.empty(value.shape, dtype, stride=stride)
        else:
            place = torch.empty_strided(value.shape, stride, dtype=dtype, device=device)
        return place.copy_(value).expand(parameter.shape)

    def forget(self) -> None:
        """Release all copies."""
        self._in_memory.clear()
        self._on_drive.clear()
        self._facts.clear()
        self._gradients.clear()
