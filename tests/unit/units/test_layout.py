"""Flat buffers and chunks: nothing overlaps, everything is aligned, and slices cover what is trained exactly once."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.units.layout import CHUNK_GRANULE, SLOT_GRANULE, ParameterSpec, UnitLayout

_PAGE = 4096


def _spec(index: int, shape: tuple[int, ...], dtype: torch.dtype, is_trainable: bool) -> ParameterSpec:
    stride = torch.empty(shape, device="meta").stride()
    return ParameterSpec(f"p{index}", shape, tuple(stride), dtype, is_trainable)


@st.composite
def layouts(draw: st.DrawFn) -> UnitLayout:
    """Units as models have them: trainable parameters of one dtype, frozen ones of any."""
    trainable_dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    dims = st.lists(st.sampled_from([0, 1, 2, 3, 7, 63, 64, 65, 130]), max_size=3).map(tuple)
    frozen = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
    members = draw(st.lists(st.tuples(dims, st.booleans(), frozen), min_size=1, max_size=8))
    return UnitLayout(
        [
            _spec(index, shape, trainable_dtype if is_trainable else dtype, is_trainable)
            for index, (shape, is_trainable, dtype) in enumerate(members)
        ]
    )


@given(layouts())
@settings(max_examples=120, deadline=None)
def test_slots_are_aligned_and_do_not_overlap(layout: UnitLayout) -> None:
    assert [slot.index for slot in layout.slots] == list(range(len(layout.slots)))
    assert layout.num_bytes % _PAGE == 0
    spans = []
    for segment in layout.segments:
        assert segment.start_bytes % _PAGE == 0
        assert segment.start_bytes + segment.num_bytes <= layout.num_bytes
        for slot in segment.slots:
            assert slot.start % SLOT_GRANULE == 0
            assert slot.offset_bytes == segment.start_bytes + slot.start * segment.dtype.itemsize
            assert slot.stop <= segment.numel
            assert (slot.spec.dtype, slot.spec.is_trainable) == (segment.dtype, segment.is_trainable)
            spans.append((slot.offset_bytes, slot.offset_bytes + slot.numel * segment.dtype.itemsize))
    assert len(spans) == len(layout.slots)
    spans = sorted(span for span in spans if span[0] < span[1])
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@given(layouts(), st.integers(1, 6).map(lambda number: number * CHUNK_GRANULE))
@settings(max_examples=120, deadline=None)
def test_pieces_cover_each_trained_element_once(layout: UnitLayout, chunk_numel: int) -> None:
    chunks = layout.chunks(chunk_numel)
    assert sum(chunk.numel for chunk in chunks) == layout.trainable_numel
    covered = {slot.index: [0] * slot.numel for slot in layout.slots if slot.spec.is_trainable}
    position = 0
    for number, chunk in enumerate(chunks):
        assert (chunk.index, chunk.start) == (number, position)
        assert chunk.start % CHUNK_GRANULE == 0
        assert chunk.numel % CHUNK_GRANULE == 0
        assert 0 < chunk.numel <= chunk_numel
        position = chunk.stop
        for param_slice in chunk.slices:
            assert param_slice.numel > 0
            assert param_slice.start % SLOT_GRANULE == 0, "an element-wise kernel would give other bits"
            assert param_slice.stop % SLOT_GRANULE == 0 or param_slice.stop == param_slice.slot.numel
            assert param_slice.slot.start + param_slice.start == chunk.start + param_slice.offset
            assert param_slice.offset + param_slice.numel <= chunk.numel
            for element in range(param_slice.start, param_slice.stop):
                covered[param_slice.slot.index][element] += 1
    assert all(set(counts) <= {1} for counts in covered.values())


def test_no_chunk_lies_across_a_border() -> None:
    layout = UnitLayout([ParameterSpec("a", (7 * CHUNK_GRANULE,), (1,), torch.bfloat16, True)])
    for split in range(0, 9 * CHUNK_GRANULE, CHUNK_GRANULE):
        chunks = layout.chunks(3 * CHUNK_GRANULE, split)
        assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
        assert chunks[-1].stop == layout.trainable_numel
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert all(chunk.stop <= split or chunk.start >= split for chunk in chunks)
        assert all(0 < chunk.numel <= 3 * CHUNK_GRANULE for chunk in chunks)
    with pytest.raises(ValueError, match="split"):
        layout.chunks(CHUNK_GRANULE, 1)
