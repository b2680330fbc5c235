"""Which rank keeps the states of which elements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.units.layout import CHUNK_GRANULE, SEGMENT_GRANULE_BYTES, ParameterSpec, UnitLayout
from infinity.units.shards import Shards
from infinity.units.unit import Unit


def _unit(index: int, sizes: list[int]) -> Unit:
    specs = [ParameterSpec(f"p{i}", (size,), (1,), torch.float32, True) for i, size in enumerate(sizes)]
    parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    return Unit(index, f"unit {index}", parameters, UnitLayout(specs))


@given(num=st.integers(1, 9), index=st.integers(0, 20), sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=6))
def test_each_element_has_one_owner(num: int, index: int, sizes: list[int]) -> None:
    unit, shards = _unit(index, sizes), Shards(0, num)
    spans = sorted(span for span in shards.spans(unit) if span[0] < span[1])
    assert [span[0] for span in spans] == [0, *(span[1] for span in spans)][: len(spans)]
    assert spans[-1][1] == unit.layout.trainable_numel
    assert all(bound % CHUNK_GRANULE == 0 for span in spans for bound in span)
    lengths = [stop - start for start, stop in shards.spans(unit)]
    assert max(lengths) - min(lengths) <= CHUNK_GRANULE
    for slot in unit.layout.slots:
        owned = [element for part in shards.parts_of_parameter(unit, slot) for element in range(*part)]
        assert sorted(owned) == list(range(slot.numel))


@pytest.mark.parametrize("num", [1, 2, 5])
def test_chunks_of_all_shares_are_the_whole(num: int) -> None:
    unit = _unit(3, [5000, 17, 40_000])
    granule = CHUNK_GRANULE
    for split in (0, 4 * granule):
        found = [
            chunk
            for span in Shards(0, num).spans(unit)
            for chunk in unit.layout.chunks(3 * granule, split=max(split, span[0]), span=span)
        ]
        slices = [
            (param_slice.slot.index, element)
            for chunk in found
            for param_slice in chunk.slices
            for element in range(param_slice.start, param_slice.stop)
        ]
        assert sorted(slices) == [(slot.index, element) for slot in unit.layout.slots for element in range(slot.numel)]
        assert not any(chunk.start < split < chunk.stop for chunk in found)


@given(num=st.integers(1, 9), index=st.integers(0, 20), sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=6))
def test_each_byte_of_weights_has_one_keeper(num: int, index: int, sizes: list[int]) -> None:
    dtypes = [torch.bfloat16, torch.float64, torch.uint8]
    specs = [
        ParameterSpec(f"p{i}", (size,), (1,), dtypes[i % 3], is_trainable=i % 3 == 0) for i, size in enumerate(sizes)
    ]
    parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    unit = Unit(index, "unit", parameters, UnitLayout(specs))
    shards = Shards(0, num)
    spans = sorted(span for rank in range(num) for span in Shards(rank, num).weight_spans(unit))
    assert spans == sorted(part for of_ranks in shards.weight_parts(unit) for part in of_ranks if part[0] < part[1])
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == unit.num_bytes
    for bounds in spans:
        assert bounds[0] < bounds[1] and all(bound % SEGMENT_GRANULE_BYTES == 0 for bound in bounds)
    for rank in range(num):  # a rank keeps the weights that it updates
        start, stop = (element * 2 for element in shards.span(unit, rank))
        assert start == stop or (start, stop) in Shards(rank, num).weight_spans(unit)
