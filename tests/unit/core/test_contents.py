"""What lies where in an extent, compared byte by byte with the layout."""

from __future__ import annotations

import pytest
import torch

from infinity.contents import gradient_contents, record_contents, weight_contents
from infinity.layout import ParameterSpec, UnitLayout


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


@pytest.mark.parametrize(("main_itemsize", "main"), [(4, "main weight"), (2, "remainder of the main weight"), (0, "")])
def test_records(main_itemsize: int, main: str) -> None:
    chunks = _LAYOUT.chunks(2048)
    assert len(chunks) == 3
    names = ("exp_avg", "exp_avg_sq")
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + chunk.numel * (main_itemsize + 8))
    name_of = record_contents(chunks, ends, names)
    for chunk, start in zip(chunks, ends, strict=False):
        fields = [(main, start, main_itemsize)] if main_itemsize else []
        fields += [(name, start + chunk.numel * (main_itemsize + 4 * i), 4) for i, name in enumerate(names)]
        for kind, origin, itemsize in fields:
            for piece in chunk.pieces:
                label = f"{kind} of {piece.slot.spec.fqn}"
                first, last = origin + piece.offset * itemsize, origin + (piece.offset + piece.numel) * itemsize - 1
                assert name_of(first, first + 1) == name_of(last, last + 1) == label
    everything = name_of(0, ends[-1])
    assert everything.endswith("more") and everything.count(" of ") - everything.count("remainder of") == 4


def test_empty_parameters_are_left_out() -> None:
    layout = UnitLayout([_spec("a", 64), _spec("none", 0), _spec("b", 64)])
    assert weight_contents(layout)(0, 1000) == gradient_contents(layout, lambda: 4)(0, 1000) == "a, b"


def test_long_lists_are_cut() -> None:
    layout = UnitLayout([_spec(f"p{index}", 10) for index in range(7)])
    assert weight_contents(layout)(0, layout.num_bytes) == "p0, p1, p2, p3 and 3 more"
    assert weight_contents(layout)(0, layout.slots[3].offset_bytes + 1) == "p0, p1, p2, p3"
