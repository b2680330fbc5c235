"""Undo of a failed `initialize`: restores the parameters bit for bit.

[Note: what is kept] The engine stores a trainable parameter as fp32 and a frozen one in its compute dtype. Where that
keeps every bit (nearly always), the parameter is restored from there. Anything else is kept as it was: an fp64 weight,
a frozen fp32 one under bf16, or one that is stored packed. It is kept on a drive if there is one, because `initialize`
releases memory unit by unit. A parameter that was on a drive before (see `infinity.loading`) is restored there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.device.drive_tensors import drives_of, is_dense, on_drive
from infinity.errors import BudgetTooSmallError, StorageError
from infinity.numerics.raw_bytes import raw_bytes
from infinity.units.parameter import PagedParameter, plain_grad, release_parameters, set_plain_grad
from infinity.units.unit import Unit
from swapper import Extent, Swapper

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
    open_space: Callable[[int], Swapper]
    """Opens a volume of so many bytes on the drives; raises if there is none."""
    close_space: Callable[[Swapper], None]
    """Closes that volume."""
    _swapper: Swapper | None = None
    _in_memory: dict[int, torch.Tensor] = field(default_factory=dict)
    _on_drive: dict[int, Extent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # By id: dtype, device, strides, gradient and drives. All of it is lost when a parameter becomes a paged one.
        self._facts = {
            id(parameter): (
                parameter.dtype,
                parameter.device,
                tuple(parameter.stride()),
                parameter.grad,
                drives_of(parameter),
            )
            for unit in self._units
            for parameter in unit.parameters
        }

    def gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters that had a gradient before, with that gradient."""
        parameters = [parameter for unit in self._units for parameter in unit.parameters]
        found = ((parameter, self._facts[id(parameter)][3]) for parameter in parameters)
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
            # both are kept as they are. Others are written to the volume of `_space`, if there is one.
            swapper = None if (value.dtype == dtype and not is_rounded) or on_drive(value) else self._space()
            if swapper is None:
                self._in_memory[id(parameter)] = value
                continue
            source = raw_bytes(value.cpu())
            extent = swapper.allocate(source.numel(), f"'{slot.spec.fqn}' as it was")
            swapper.write(extent, source).wait()
            self._on_drive[id(parameter)] = extent

    def _survives(self, value: torch.Tensor, dtype: torch.dtype, *, is_split: bool) -> bool:
        # The sum is NaN if any element is (or if inf and -inf meet: then a copy is kept that is not needed).
        if is_split and self.cuts_nans and bool(value.sum().isnan()):
            return False
        if value.dtype == dtype:
            return True
        # Bytes are compared, as NaN does not equal NaN, and -0 equals 0.
        parts = value.as_strided((value.numel(),), (1,)).split(_PART_NUMEL) if is_dense(value) else [value]
        return all(torch.equal(raw_bytes(part.to(dtype).to(value.dtype)), raw_bytes(part)) for part in parts)

    def _space(self) -> Swapper | None:
        if self._swapper is None:
            lossy = [
                parameter.numel() * parameter.element_size()
                for unit in self._units
                for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True)
                if self._facts[id(parameter)][0] != slot.spec.dtype or slot.spec.packed is not None
            ]
            try:
                # An extent fills whole 4096-byte blocks.
                self._swapper = self.open_space(sum(-(-size // 4096) * 4096 for size in lossy))
            except (BudgetTooSmallError, StorageError):
                return None  # no drive, or a full one
        return self._swapper

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
                    set_plain_grad(parameter, self._facts[id(parameter)][3])
        if failure is not None:
            raise failure

    def _value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        dtype, device, stride, _, drives = self._facts[id(parameter)]
        key = id(parameter)
        if key in self._in_memory:
            return self._in_memory[key]
        if key in self._on_drive and self._swapper is not None:
            value = torch.empty(parameter.shape, dtype=dtype, device="cpu")
            self._swapper.read(self._on_drive[key], value.reshape(-1).view(torch.uint8)).wait()
        else:
            value = self.stored(parameter)
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
        swapper, self._swapper = self._swapper, None
        if swapper is not None:
            self.close_space(swapper)
