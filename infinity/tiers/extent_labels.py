"""Names for the bytes of an extent, for I/O errors: "exp_avg of layers.3.mlp.weight" and not "bytes 4096 to 8191".

Each function returns a ``name_of(start, stop)`` for ``Swapper.allocate``. That returns the names of what the bytes
``[start, stop)`` contain, in order, and an empty string for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from infinity.numerics.chunk_format import ChunkFormat
from infinity.packed.stored_form import StoredForm
from infinity.units.layout import Chunk, Slot, UnitLayout
from swapper import NameOf

_MOST_NAMES = 4  # a failed transfer may cover a whole unit, with hundreds of parameters
# By bytes per element of the record's first array. With fp32 compute there are 0: the model weight is the main weight.
_MAIN_NAMES = {4: "main weight", 2: "remainder of the main weight"}

_Span = tuple[int, int, str]
"""First byte, end, and what is there."""


def weight_contents(layout: UnitLayout, form: StoredForm | None = None) -> NameOf:
    """For an extent with the bytes of a unit's flat buffer, or, with packed weights, in the given ``form``."""
    packed = {} if form is None else {each.slot: each for each in form.slots}
    raw_bytes = layout.num_bytes if form is None else form.raw_bytes

    def span(slot: Slot) -> tuple[int, int]:
        # Packed weights lie behind the plain ones, in an order of their own: see the picture in
        # `infinity.packed.stored_form`.
        if slot in packed:
            start = raw_bytes + packed[slot].start
            return start, start + packed[slot].num_bytes
        return slot.offset_bytes, slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize

    return _name_of(lambda: sorted((*span(slot), slot.spec.fqn) for slot in layout.slots))


def gradient_contents(layout: UnitLayout, itemsize_now: Callable[[], int]) -> NameOf:
    """For an extent with ``itemsize_now()`` bytes per element of a unit's trainable segment."""

    # A function, because spilled gradients may be bf16 in one step and fp32 sums in the next, in the same extent.
    def contents() -> Iterator[_Span]:
        itemsize = itemsize_now()
        for slot in layout.trainable.slots if layout.trainable is not None else ():
            yield slot.start * itemsize, slot.stop * itemsize, slot.spec.fqn

    return _name_of(contents)


def record_contents(
    chunks: Sequence[Chunk], starts: Sequence[int], state_names: Sequence[str], form: ChunkFormat
) -> NameOf:
    """For an extent of optimizer state.

    Args:
        chunks: the unit's chunks, each with one record.
        starts: the first byte of each record.
        state_names: the states, in the order of the record. Before them is the main weight, or its remainder.
        form: the format of the records.
    """
    # Worked example: AdamW with bf16 remainders, a chunk of 2048 elements whose record starts at byte 0.
    #   [0, 4096)  remainder     [4096, 12288)  exp_avg     [12288, 20480)  exp_avg_sq
    # A slice at elements [64, 164) of the chunk has its remainder at bytes [128, 328), and its exp_avg at 4096 + [256,
    # 656). With int8 states `num_bytes` counts whole blocks of codes with their scale, so the bounds are those of
    # blocks.

    def contents() -> Iterator[_Span]:
        main_itemsize = form.main_bytes(1)
        for chunk, low in zip(chunks, starts, strict=False):
            states, state_bytes = low + form.main_bytes(chunk.numel), form.states.num_bytes(chunk.numel)
            fields = [(_MAIN_NAMES[main_itemsize], low, form.main_bytes)] if main_itemsize else []
            fields += [(name, states + i * state_bytes, form.states.num_bytes) for i, name in enumerate(state_names)]
            for kind, origin, num_bytes in fields:
                for param_slice in chunk.slices:
                    first = origin + num_bytes(param_slice.offset)
                    last = origin + num_bytes(param_slice.offset + param_slice.numel)
                    yield first, last, f"{kind} of {param_slice.slot.spec.fqn}"

    return _name_of(contents)


def _name_of(contents: Callable[[], Iterable[_Span]]) -> NameOf:
    def name_of(start: int, stop: int) -> str:
        # Without empty ones, and each once.
        names = [*dict.fromkeys(name for first, last, name in contents() if max(first, start) < min(last, stop))]
        shown = ", ".join(names[:_MOST_NAMES])
        return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown

    return name_of
