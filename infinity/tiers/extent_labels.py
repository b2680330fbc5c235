"""What lies where in the extents of a unit, in words: FQNs for the messages of I/O errors.

Knows layouts; must not know files or handles. Each function returns a ``name_of(start, stop)`` for ``Swapper.allocate``:
the bytes ``[start, stop)`` of an extent to what lies in them, in order, and nothing for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from infinity.numerics.chunk_format import ChunkFormat
from infinity.packed.stored_form import StoredForm
from infinity.units.layout import Chunk, Slot, UnitLayout
from swapper import NameOf

_MOST_NAMES = 4
_MAIN_NAMES = {4: "main weight", 2: "remainder of the main weight"}


def weight_contents(layout: UnitLayout, form: StoredForm | None = None) -> NameOf:
    """For an extent that is laid out byte for byte like a unit's flat buffer, or where weights are packed as ``form`` says."""
    packed = {} if form is None else {each.slot: each for each in form.slots}
    raw_bytes = layout.num_bytes if form is None else form.raw_bytes

    def span(slot: Slot) -> tuple[int, int]:
        if slot in packed:
            start = raw_bytes + packed[slot].start
            return start, start + packed[slot].num_bytes
        return slot.offset_bytes, slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize

    def name_of(start: int, stop: int) -> str:
        places = sorted((*span(slot), slot.spec.fqn) for slot in layout.slots if slot.numel)
        return _listed(fqn for first, last, fqn in places if first < stop and start < last)

    return name_of


def gradient_contents(layout: UnitLayout, itemsize_now: Callable[[], int]) -> NameOf:
    """For an extent that holds ``itemsize_now()`` bytes for each element of a unit's trainable segment."""

    def name_of(start: int, stop: int) -> str:
        itemsize = itemsize_now()
        slots = layout.trainable.slots if layout.trainable is not None else ()
        return _listed(
            slot.spec.fqn
            for slot in slots
            if slot.numel and slot.start * itemsize < stop and start < slot.stop * itemsize
        )

    return name_of


def record_contents(
    chunks: Sequence[Chunk], starts: Sequence[int], state_names: Sequence[str], form: ChunkFormat
) -> NameOf:
    """For an extent of optimizer state.

    Args:
        chunks: the unit's chunks, each with one record.
        starts: where each record begins.
        state_names: the states at the end of each record; what lies before them is the main weight, or a part of it.
        form: of the records.
    """

    def name_of(start: int, stop: int) -> str:
        return _listed(_in_records(start, stop))

    def _in_records(start: int, stop: int) -> Iterator[str]:
        main_itemsize = form.main_bytes(1)
        for chunk, low in zip(chunks, starts, strict=False):
            states, state_bytes = low + form.main_bytes(chunk.numel), form.states.num_bytes(chunk.numel)
            if low >= stop or start >= states + state_bytes * len(state_names):
                continue
            fields = [(_MAIN_NAMES[main_itemsize], low, form.main_bytes)] if main_itemsize else []
            for index, name in enumerate(state_names):
                fields.append((name, states + index * state_bytes, form.states.num_bytes))
            for kind, origin, num_bytes in fields:
                for param_slice in chunk.slices:
                    first, last = (
                        origin + num_bytes(param_slice.offset),
                        origin + num_bytes(param_slice.offset + param_slice.numel),
                    )
                    if param_slice.numel and first < stop and start < last:
                        yield f"{kind} of {param_slice.slot.spec.fqn}"

    return name_of


def _listed(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:_MOST_NAMES])
    return f"{shown} and {len(unique) - _MOST_NAMES} more" if len(unique) > _MOST_NAMES else shown
