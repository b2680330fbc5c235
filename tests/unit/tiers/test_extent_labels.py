"""What lies where in an extent of records, compared byte by byte with the layout."""

from __future__ import annotations

import pytest
import torch

from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.numerics.state_format import StateFormat
from infinity.tiers.extent_labels import record_contents
from infinity.units.layout import ParameterSpec, UnitLayout

_NAMES = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("states", StateFormat)
@pytest.mark.parametrize(
    ("kind", "main"),
    [
        (MainWeight.FP32, "main weight"),
        (MainWeight.REMAINDER, "remainder of the main weight"),
        (MainWeight.MODEL_WEIGHT, ""),
    ],
)
def test_records(kind: MainWeight, main: str, states: StateFormat) -> None:
    form = ChunkFormat(torch.bfloat16, kind, states)
    specs = [
        ParameterSpec(fqn, (numel,), (1,), torch.bfloat16, True)
        for fqn, numel in {"a": 5000, "b": 3, "c": 1000}.items()
    ]
    chunks = UnitLayout(specs, states.block_numel).chunks(2048)
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + form.stored_bytes(chunk.numel, len(_NAMES)))
    name_of = record_contents(chunks, ends, _NAMES, form)
    for chunk, start in zip(chunks, ends, strict=False):
        numbers = [states.num_bytes(chunk.numel) * index + start + form.main_bytes(chunk.numel) for index in range(2)]
        fields = [
            *zip(_NAMES, numbers, [states.num_bytes] * 2, strict=True),
            *([(main, start, form.main_bytes)] if main else []),
        ]
        for what, origin, num_bytes in fields:
            for param_slice in chunk.slices:
                first, last = (
                    origin + num_bytes(param_slice.offset),
                    origin + num_bytes(param_slice.offset + param_slice.numel) - 1,
                )
                assert name_of(first, first + 1) == name_of(last, last + 1) == f"{what} of {param_slice.slot.spec.fqn}"
    assert name_of(0, ends[-1]).endswith("more")
