"""What lies where in the extents of a unit, in words: FQNs for the messages of I/O errors.

Knows layouts; must not know files or handles. Each function returns a ``name_of(start, stop)`` for ``Swapper.allocate``:
the bytes ``[start, stop)`` of an extent to what lies in them, in order, and nothing for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from infinity.layout import Chunk, UnitLayout
from swapper import NameOf

_FP32_BYTES = 4
_MOST_NAMES = 4
_MAIN_NAMES = {4: "main weight", 2: "remainder of the main weight"}


def weight_contents(layout: UnitLayout) -> NameOf:
    """For an extent that is laid out byte for byte like a unit's flat buffer."""

    def name_of(start: int, stop: int) -> str:
        return _listed(
            slot.spec.fqn
            for slot in sorted(layout.slots, key=lambda slot: slot.offset_bytes)
            if slot.numel
            and slot.offset_bytes < stop
            and start < slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize
        )

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


def record_contents(chunks: Sequence[Chunk], ends: Sequence[int], state_names: Sequence[str]) -> NameOf:
    """For an extent of optimizer state.

    Args:
        chunks: the unit's chunks, each with one record.
        ends: where each record begins, and where the last one ends.
        state_names: the fp32 states at the end of each record; what lies before them is the main weight, or a part of it.
    """

    def name_of(start: int, stop: int) -> str:
        return _listed(_in_records(start, stop))

    def _in_records(start: int, stop: int) -> Iterator[str]:
        for chunk, (low, high) in zip(chunks, pairwise(ends), strict=True):
            if low >= stop or start >= high:
                continue
            main_bytes = high - low - chunk.numel * _FP32_BYTES * len(state_names)
            main_itemsize = main_bytes // chunk.numel
            fields = [(_MAIN_NAMES.get(main_itemsize, "main weight"), low, main_itemsize)] if main_itemsize else []
            for index, name in enumerate(state_names):
                fields.append((name, low + main_bytes + index * chunk.numel * _FP32_BYTES, _FP32_BYTES))
            for kind, origin, itemsize in fields:
                for piece in chunk.pieces:
                    first = origin + piece.offset * itemsize
                    if first < stop and start < first + piece.numel * itemsize:
                        yield f"{kind} of {piece.slot.spec.fqn}"

    return name_of


def _listed(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:_MOST_NAMES])
    return f"{shown} and {len(unique) - _MOST_NAMES} more" if len(unique) > _MOST_NAMES else shown
