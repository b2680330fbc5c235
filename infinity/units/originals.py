"""What the parameters were before `initialize`, until it has got through: a failure gives them back bit for bit.

Knows parameters and how the engine stores them; must not know why it failed.

[Note: what is kept] The engine stores a trainable parameter as fp32 and a frozen one in its compute dtype. Where that holds
every bit (nearly always), it is the copy from which the parameter comes back. Anything else, an fp64 weight, a frozen fp32 one
under bf16 or one that is stored packed, is kept as it came, on a drive if there is one: memory is given back as units are taken
over. What lies on a drive already (see `infinity.loading`) stays there until then, and what comes back to such a parameter lies
there again.
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

_PART_NUMEL = 1 << 20


@dataclass(eq=False)
class Originals:
    """Begins before the first unit is taken over, and ends when `initialize` returns."""

    _units: list[Unit]
    """All that are to be taken over."""
    cuts_nans: bool
    """Whether trainable weights are split, which know one NaN only."""
    stored: Callable[[nn.Parameter], torch.Tensor]
    """What is stored of a parameter that is held: its main weight, or its weight if it is frozen."""
    open_space: Callable[[int], Swapper]
    """Gives a volume on the drives for so many bytes; raises if there is none."""
    close_space: Callable[[Swapper], None]
    """Releases it."""
    _swapper: Swapper | None = None
    _in_memory: dict[int, torch.Tensor] = field(default_factory=dict)
    _on_drive: dict[int, Extent] = field(default_factory=dict)

    def __post_init__(self) -> None:
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
        """The parameters that had a gradient, and what it was."""
        parameters = [parameter for unit in self._units for parameter in unit.parameters]
        found = ((parameter, self._facts[id(parameter)][3]) for parameter in parameters)
        return [(parameter, gradient) for parameter, gradient in found if gradient is not None]

    def keep(self, unit: Unit) -> None:
        """Take note of a unit's parameters, which are still ordinary, as far as storing them loses anything."""
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            value = parameter.detach()
            dtype = torch.float32 if slot.spec.is_trainable else slot.spec.dtype
            is_rounded = slot.spec.packed is not None
            if not value.numel() or (not is_rounded and self._survives(value, dtype, is_split=slot.spec.is_trainable)):
                continue
            swapper = None if (value.dtype == dtype and not is_rounded) or on_drive(value) else self._space()
            if swapper is None:
                self._in_memory[id(parameter)] = value
                continue
            source = raw_bytes(value.cpu())
            extent = swapper.allocate(source.numel(), f"'{slot.spec.fqn}' as it was")
            swapper.write(extent, source).wait()
            self._on_drive[id(parameter)] = extent

    def _survives(self, value: torch.Tensor, dtype: torch.dtype, *, is_split: bool) -> bool:
        if is_split and self.cuts_nans and bool(value.sum().isnan()):
            return False
        if value.dtype == dtype:
            return True
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
                self._swapper = self.open_space(sum(-(-size // 4096) * 4096 for size in lossy))
            except (BudgetTooSmallError, StorageError):
                return None  # no drive, or a full one
        return self._swapper

    def restore(self) -> None:
        """Whatever is held already becomes ordinary again, as it was: values, dtype, device, strides, gradient.

        What cannot be read any more stays paged out; the error is raised when all else is back.
        """
        failure: BaseException | None = None
        for unit in self._units:
            values: dict[nn.Parameter, torch.Tensor] = {}  # all first: to read one opens the unit
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
            if step == 0:  # as many looked at one element
                value = value[(slice(None),) * dim + (slice(0, 1),)]
        if drives is not None:
            place = drives.empty(value.shape, dtype, stride=stride)
        else:
            place = torch.empty_strided(value.shape, stride, dtype=dtype, device=device)
        return place.copy_(value).expand(parameter.shape)

    def forget(self) -> None:
        """They are not needed any more."""
        self._in_memory.clear()
        self._on_drive.clear()
        self._facts.clear()
        swapper, self._swapper = self._swapper, None
        if swapper is not None:
            self.close_space(swapper)
