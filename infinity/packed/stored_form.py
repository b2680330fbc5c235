"""Where the weights of a unit lie where it rests, if some of them are packed.

Pure arithmetic on a layout; knows no files.

    flat buffer  | trainable | frozen, plain |          frozen, to be packed           |
    stored form  | trainable | frozen, plain | padding | packed weights |              4096-byte blocks
                 ^ byte for byte             ^ `raw_bytes`

Trainable weights come first in both, so updates read and write chunks as if nothing were packed. Packed bytes are read into the
end of the flat buffer (`landing`) and unpacked from front to back (see [Note: unpacking in place] in ``packed/kernels.py``):
the padding lies before them, so that the last of them is the last byte of the flat buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.packed.formats import PackedFormat, packed_format
from infinity.units.layout import SEGMENT_GRANULE_BYTES, Slot, UnitLayout, round_up


@dataclass(frozen=True)
class PackedSlot:
    """A packed weight: ``start`` is its first byte behind `StoredForm.raw_bytes`."""

    slot: Slot
    format: PackedFormat
    start: int
    num_bytes: int

    def of(self, packed: torch.Tensor) -> torch.Tensor:
        """Its bytes among all packed ones of the unit."""
        return packed[self.start : self.start + self.num_bytes]

    def values(self, memory: torch.Tensor) -> torch.Tensor:
        """Its weights in a flat buffer (uint8): 1-D, in C order."""
        spec = self.slot.spec
        start = self.slot.offset_bytes
        return memory[start : start + self.slot.numel * spec.dtype.itemsize].view(spec.dtype)

    def unpack(self, packed: torch.Tensor, memory: torch.Tensor) -> None:
        """Write the weights into a flat buffer. ``packed``: see `of`."""
        self.format.unpack(self.of(packed), self.slot.spec.shape, self.values(memory))


class StoredForm:
    """How one unit is stored.

    Attributes:
        raw_bytes: the flat buffer's first bytes, which are stored as they are.
        packed_bytes: what follows them; 0 if nothing is packed.
        slots: the packed weights, in the order of memory.
    """

    def __init__(self, layout: UnitLayout) -> None:
        packed = [segment for segment in layout.segments if segment.slots[0].spec.packed is not None]
        self.raw_bytes = packed[0].start_bytes if packed else layout.num_bytes
        slots = [slot for segment in packed for slot in segment.slots]
        formats = [packed_format(slot.spec.packed or "") for slot in slots]
        sizes = [each.num_bytes(slot.spec.shape) for each, slot in zip(formats, slots, strict=True)]
        self.packed_bytes = round_up(sum(sizes), SEGMENT_GRANULE_BYTES)
        start = self.packed_bytes - sum(sizes)
        found = []
        for slot, each, size in zip(slots, formats, sizes, strict=True):
            found.append(PackedSlot(slot, each, start, size))
            start += size
        self.slots = tuple(found)

    @property
    def num_bytes(self) -> int:
        """Of all of it; a multiple of 4096."""
        return self.raw_bytes + self.packed_bytes

    def landing(self, memory: torch.Tensor) -> torch.Tensor:
        """Where in a flat buffer (uint8) packed bytes lie to be unpacked in place."""
        return memory[memory.numel() - self.packed_bytes :]

    def unpack(self, packed: torch.Tensor, memory: torch.Tensor) -> None:
        """Write all packed weights into a flat buffer. ``packed`` may be its `landing`."""
        for each in self.slots:
            each.unpack(packed, memory)
