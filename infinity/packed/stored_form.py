"""How the weights of a unit are stored if some of them are packed. Pure arithmetic on the unit's layout.

    flat buffer  | trainable | frozen, plain |          frozen, to be packed           |
    stored form  | trainable | frozen, plain | padding | packed weights |              4096-byte blocks
                 ^ byte for byte             ^ `raw_bytes`

Trainable weights come first in both, so updates read and write chunks as if nothing were packed. Packed bytes are read
into the end of the flat buffer (`landing`) and unpacked front to back: see [Note: unpacking in place] in
``packed/kernels.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from infinity.packed.formats import PackedFormat, packed_format
from infinity.units.layout import SEGMENT_GRANULE_BYTES, Slot, UnitLayout, round_up


@dataclass(frozen=True)
class PackedSlot:
    """A packed weight. ``start`` counts bytes from `StoredForm.raw_bytes` on."""

    slot: Slot
    format: PackedFormat
    start: int
    num_bytes: int

    def of(self, packed: torch.Tensor) -> torch.Tensor:
        """Its bytes in ``packed``: all packed bytes of the unit, from `StoredForm.raw_bytes` on."""
        return packed[self.start : self.start + self.num_bytes]

    def values(self, memory: torch.Tensor) -> torch.Tensor:
        """A view of its weights in a flat buffer (uint8): 1-D, in C order."""
        spec = self.slot.spec
        start = self.slot.offset_bytes
        return memory[start : start + self.slot.numel * spec.dtype.itemsize].view(spec.dtype)


class StoredForm:
    """The layout of one stored unit, in RAM or on a drive: some weights packed, the others as in the flat buffer.

    Attributes:
        raw_bytes: number of bytes at the start of the flat buffer that are stored as they are.
        packed_bytes: number of bytes that follow, padding included; 0 if nothing is packed.
        slots: the packed weights, in the order of memory.
    """

    def __init__(self, layout: UnitLayout) -> None:
        packed = [segment for segment in layout.segments if segment.slots[0].spec.packed is not None]
        self.raw_bytes = packed[0].start_bytes if packed else layout.num_bytes
        slots = [slot for segment in packed for slot in segment.slots]
        formats = [packed_format(slot.spec.packed or "") for slot in slots]
        sizes = [each.num_bytes(slot.spec.shape) for each, slot in zip(formats, slots, strict=True)]
        self.packed_bytes = round_up(sum(sizes), SEGMENT_GRANULE_BYTES)
        # The padding comes first, so that the last packed byte is the last byte of the flat buffer. Two nf4 weights of
        # 64 * 64 elements, after 8192 raw bytes, in bf16: 2 * 64 * 36 = 4608 packed bytes, in 8192 stored ones. The
        # padding has 3584, the weights start at 3584 and 5888. In the flat buffer, the 16384 bytes from 8192 on are
        # theirs: `landing` is its last 8192 bytes.
        starts = accumulate(sizes[:-1], initial=self.packed_bytes - sum(sizes))
        self.slots = tuple(map(PackedSlot, slots, formats, starts, sizes))

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored unit; a multiple of 4096."""
        return self.raw_bytes + self.packed_bytes

    def landing(self, memory: torch.Tensor) -> torch.Tensor:
        """The end of a flat buffer (uint8), from which packed bytes are unpacked in place."""
        return memory[memory.numel() - self.packed_bytes :]

    def unpack(self, packed: torch.Tensor, memory: torch.Tensor) -> None:
        """Write all packed weights into a flat buffer. ``packed`` may be its `landing`."""
        for each in self.slots:
            each.format.unpack(each.of(packed), each.slot.spec.shape, each.values(memory))
