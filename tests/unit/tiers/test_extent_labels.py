"""What lies where in an extent, compared byte by byte with the layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from infinity.numerics.chunk_format import ChunkFormat, MainWeight
from infinity.numerics.state_format import StateFormat
from infinity.tiers.extent_labels import gradient_contents, record_contents, weight_contents
from infinity.units.layout import ParameterSpec, UnitLayout


def _spec(fqn: str, numel: int, dtype: torch.dtype = torch.bfloat16, is_trainable: bool = True) -> ParameterSpec:
    return ParameterSpec(fqn, (numel,), (1,), dtype, is_trainable)


_LAYOUT = UnitLayout(
    [_spec("frozen", 100, torch.float32, False), _spec("a", 5000), _spec("b", 3), _spec("c", 1000), _spec("none", 0)]
)


def test_weights() -> None:
    name_of = weight_contents(_LAYOUT)
    for slot in _LAYOUT.slots:
        start, num_bytes = slot.offset_bytes, slot.numel * slot.spec.dtype.itemsize
        if num_bytes:
            assert name_of(start, start + 1) == name_of(start + num_bytes - 1, start + num_bytes) == slot.spec.fqn
    assert name_of(0, _LAYOUT.num_bytes) == "a, b, c, frozen"
    b = _LAYOUT.slots[2]
    assert name_of(b.offset_bytes + 6, b.offset_bytes + 128) == "", "padding"
    assert name_of(b.offset_bytes - 1000, b.offset_bytes + 1) == "a, b"


@pytest.mark.parametrize("itemsize", [2, 4])
def test_gradients(itemsize: int) -> None:
    name_of = gradient_contents(_LAYOUT, lambda: itemsize)
    for slot in _LAYOUT.slots[1:4]:
        assert name_of(slot.start * itemsize, slot.start * itemsize + 1) == slot.spec.fqn
        assert name_of(slot.stop * itemsize - 1, slot.stop * itemsize) == slot.spec.fqn
    assert gradient_contents(UnitLayout([_spec("x", 9, is_trainable=False)]), lambda: itemsize)(0, 100) == ""


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
    layout = UnitLayout([_spec("a", 5000), _spec("b", 3), _spec("c", 1000), _spec("none", 0)], states.block_numel)
    chunks = layout.chunks(2048)
    names = ("exp_avg", "exp_avg_sq")
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + form.stored_bytes(chunk.numel, len(names)))
    name_of = record_contents(chunks, ends, names, form)
    for chunk, start in zip(chunks, ends, strict=False):
        after_main = start + form.main_bytes(chunk.numel)
        fields: list[tuple[str, int, Callable[[int], int]]] = [(main, start, form.main_bytes)] if main else []
        for index, name in enumerate(names):
            fields.append((name, after_main + index * states.num_bytes(chunk.numel), states.num_bytes))
        for what, origin, num_bytes in fields:
            for piece in chunk.pieces:
                label = f"{what} of {piece.slot.spec.fqn}"
                first, last = origin + num_bytes(piece.offset), origin + num_bytes(piece.offset + piece.numel) - 1
                assert name_of(first, first + 1) == name_of(last, last + 1) == label
    everything = name_of(0, ends[-1])
    assert everything.endswith("more") and everything.count(" of ") - everything.count("remainder of") == 4
    filling = after_main + len(names) * states.num_bytes(chunk.numel)
    assert name_of(filling, ends[-1]) == ""
