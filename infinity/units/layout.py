"""Where a unit's parameters lie in its flat buffer, and how its optimizer state is cut into chunks. Pure arithmetic.

    flat buffer of a unit (bytes)
    |<-------- segment: trainable, compute dtype -------->|<-- segment: frozen -->| ...
    | slot 0 | pad | slot 1 | pad | slot 2 |   padding    | slot 3 |    padding   |
    ^ every slot starts at a multiple of 64 elements       ^ every segment starts at a multiple of 4096 bytes

    chunks of the trainable segment (elements), each with its optimizer state stored as one record
    |    chunk 0    |    chunk 1    |  chunk 2 |          cuts lie at multiples of CHUNK_GRANULE elements

[Note: why 64 elements] An element-wise kernel gives the same bits on a slice as on the whole tensor only if the slice
starts where the whole tensor's vector loop would have started an iteration, and ``F.linear`` chooses its kernel by the
alignment of the weight. Slots at multiples of 64 elements (128 bytes and more) and cuts at multiples of 2048 satisfy both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

SLOT_GRANULE = 64
"""Every parameter starts at a multiple of this many elements of its segment."""
CHUNK_GRANULE = 2048
"""Chunks are cut at multiples of this many elements: 4096 bytes of bf16, 8192 of fp32, so O_DIRECT can address them."""
SEGMENT_GRANULE_BYTES = 4096
"""Segments start and end at multiples of this many bytes."""


def round_up(value: int, granule: int) -> int:
    """The smallest multiple of ``granule`` that is not below ``value``."""
    return -(-value // granule) * granule


@dataclass(frozen=True)
class ParameterSpec:
    """FQN, shape, strides (in elements) and dtype of one parameter, and whether it is trained.

    ``packed``: the format (``infinity.packed``) in which a frozen parameter is stored; None: as it is in memory.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_trainable: bool
    packed: str | None = None

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def formed(self, elements: torch.Tensor) -> torch.Tensor:
        """A view of ``elements`` (1-D, in memory order) with the parameter's shape and strides."""
        return elements.as_strided(self.shape, self.stride, elements.storage_offset())


# Slots are compared by identity. They are keys of dicts in code that runs once per gradient, and a generated __eq__ and
# __hash__ would go through the spec each time.
@dataclass(frozen=True, eq=False)
class Slot:
    """The place of one parameter: ``start`` counts elements of its segment, ``offset_bytes`` bytes of the flat
    buffer."""

    index: int
    spec: ParameterSpec
    start: int
    offset_bytes: int

    @cached_property
    def numel(self) -> int:
        return self.spec.numel

    @cached_property
    def stop(self) -> int:
        return self.start + self.spec.numel

    @property
    def is_in_order(self) -> bool:
        """Whether the parameter's elements lie in memory in C order."""
        # torch ignores strides of dimensions of size 1, because no element is reached by them: (1, 5) has any first stride.
        return torch.empty_strided(self.spec.shape, self.spec.stride, dtype=torch.uint8, device="meta").is_contiguous()


def in_slot_order(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """``tensor``, or a copy of it, with the parameter's shape and strides. It has as many elements as the parameter."""
    spec = slot.spec
    if not tensor.is_sparse and (tuple(tensor.stride()), tuple(tensor.shape)) == (spec.stride, spec.shape):
        return tensor
    ordered = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
    return ordered.copy_((tensor.to_dense() if tensor.is_sparse else tensor).reshape(spec.shape))


def in_memory_order(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """As `in_slot_order`, but 1-D, in memory order."""
    ordered = in_slot_order(tensor.detach(), slot)
    return ordered.as_strided((ordered.numel(),), (1,), ordered.storage_offset())


@dataclass(frozen=True)
class Segment:
    """Consecutive slots of one dtype, all trainable or all frozen. ``numel`` includes the padding."""

    dtype: torch.dtype
    is_trainable: bool
    start_bytes: int
    numel: int
    slots: tuple[Slot, ...]

    @cached_property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterSlice:
    """Elements ``[start, stop)`` of a slot's parameter, lying at ``offset`` (elements) of a chunk."""

    slot: Slot
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Elements ``[start, stop)`` of the trainable segment, and the slices of parameters in them."""

    index: int
    start: int
    stop: int
    slices: tuple[ParameterSlice, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


class UnitLayout:
    """The layout of one unit's flat buffer: first the trainable segment, then frozen ones, then those stored packed."""

    def __init__(self, specs: Sequence[ParameterSpec], state_block_numel: int = 1) -> None:
        """
        Args:
            specs: the parameters.
            state_block_numel: elements of an optimizer state that share one scale; 1 where states are not quantized.
        """
        # Worked example: bf16, two trained parameters of 100 and 5000 elements, one frozen of 10.
        #   trainable: slot 0 starts at element 0, slot 1 at 128 (100 rounded up to 64s) and ends at 5128
        #              numel = 6144 = 3 * 2048
        #   frozen:    starts at byte 12288 = 6144 * 2, has 2048 elements (4096 bytes), of which 10 are used
        #   num_bytes = 12288 + 4096 = 16384
        # The key sorts False first: trainable before frozen, plain before packed. `StoredForm` relies on packed weights
        # being last, and on trainable ones having the same offsets with and without packing.
        groups: dict[tuple[bool, bool, str], list[tuple[int, ParameterSpec]]] = {}
        for index, spec in enumerate(specs):
            key = (not spec.is_trainable, spec.packed is not None, str(spec.dtype))
            groups.setdefault(key, []).append((index, spec))
        # A parameter starts a new block of its quantized states, so that two parameters never share a scale.
        slot_granule = math.lcm(SLOT_GRANULE, state_block_numel)
        segments: list[Segment] = []
        start_bytes = 0
        for (is_frozen, _, _), members in sorted(groups.items(), key=lambda item: item[0]):
            dtype = members[0][1].dtype
            slots: list[Slot] = []
            position = 0
            for index, spec in members:
                slots.append(Slot(index, spec, position, start_bytes + position * dtype.itemsize))
                position = round_up(position + spec.numel, SLOT_GRANULE if is_frozen else slot_granule)
            # Whole 4096-byte blocks, which O_DIRECT needs. A trainable segment is a multiple of CHUNK_GRANULE, so that
            # its last chunk ends at a multiple of it as well.
            granule = SEGMENT_GRANULE_BYTES // dtype.itemsize if is_frozen else CHUNK_GRANULE
            numel = round_up(max(position, 1), max(granule, 1))
            segments.append(Segment(dtype, not is_frozen, start_bytes, numel, tuple(slots)))
            start_bytes = round_up(start_bytes + numel * dtype.itemsize, SEGMENT_GRANULE_BYTES)
        self.segments = tuple(segments)
        self.num_bytes = start_bytes
        self.slots: tuple[Slot, ...] = tuple(sorted((s for g in segments for s in g.slots), key=lambda s: s.index))
        trainable = [segment for segment in segments if segment.is_trainable]
        if len(trainable) > 1:
            raise ValueError(
                f"trainable parameters of one unit must share a dtype, got {[str(s.dtype) for s in trainable]}"
            )
        self.trainable: Segment | None = trainable[0] if trainable else None
        self.trainable_numel = trainable[0].numel if trainable else 0
        """Elements of the trainable segment, padding included; 0 for a frozen unit."""

    def chunks(self, chunk_numel: int, split: int = 0, span: tuple[int, int] | None = None) -> tuple[Chunk, ...]:
        """Cut the trainable segment into chunks of at most ``chunk_numel`` elements, none of them across ``split``.

        Args:
            chunk_numel, split: multiples of CHUNK_GRANULE.
            span: cut elements [start, stop) alone, multiples of CHUNK_GRANULE; None: all.
        """
        if chunk_numel <= 0 or chunk_numel % CHUNK_GRANULE:
            raise ValueError(f"chunk_numel must be a positive multiple of {CHUNK_GRANULE}, got {chunk_numel}")
        if split < 0 or split % CHUNK_GRANULE:
            raise ValueError(f"split must be a multiple of {CHUNK_GRANULE}, got {split}")
        if self.trainable is None:
            return ()
        first, last = span or (0, self.trainable_numel)
        # Worked example: 10240 elements, chunk_numel 4096, split 6144. starts = [0, 4096] + [6144], and the chunks are
        # [0, 4096), [4096, 6144) and [6144, 10240). Records of elements below the split rest in host memory, the others
        # on drives, so a chunk across it would have half a record in each.
        starts = [*range(first, min(split, last), chunk_numel), *range(max(split, first), last, chunk_numel)]
        chunks = []
        for index, (start, stop) in enumerate(itertools.pairwise([*starts, last])):
            slices = tuple(
                ParameterSlice(slot, low - slot.start, high - slot.start, low - start)
                for slot in self.trainable.slots
                if (low := max(start, slot.start)) < (high := min(stop, slot.stop))
            )
            chunks.append(Chunk(index, start, stop, slices))
        return tuple(chunks)
