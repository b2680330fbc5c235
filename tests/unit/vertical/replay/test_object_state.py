"""What attributes hold: each kind of change is seen, and put back."""

from __future__ import annotations

import array
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from infinity.errors import UnsupportedModelError
from infinity.vertical.replay.object_state import ObjectState


@dataclass(slots=True)
class Slotted:
    number: int = 0


class OwnDict(dict[str, Any]):
    """Its attributes are its items."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class OwnList(list[Any]):
    pass


def _plus_one(tensor: torch.Tensor) -> None:
    tensor.data += 1


_CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda: {"a": 1}, lambda v: v.update(a=2), dict),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a"), list),
    "own dict": (lambda: OwnDict(a=1), lambda v: v.update(a=2), dict),
    "list": (lambda: [1, 2], lambda v: v.append(3), list),
    "own list": (lambda: OwnList([1]), lambda v: v.append(3), list),
    "set": (lambda: {1}, lambda v: v.add(2), set),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3), list),
    "nested": (lambda: {"a": [(1, {"b": [0]})]}, lambda v: v["a"][0][1]["b"].append(1), repr),
    "object": (lambda: SimpleNamespace(a=1), lambda v: setattr(v, "a", 2), vars),
    "new attribute": (lambda: SimpleNamespace(a=1), lambda v: setattr(v, "b", 2), lambda v: dict(vars(v))),
    "slots": (Slotted, lambda v: setattr(v, "number", 3), lambda v: v.number),
    "tensor": (lambda: [torch.zeros(3)], lambda v: v[0].add_(1), lambda v: v[0].tolist()),
    "tensor by data": (lambda: {"t": torch.zeros(3)}, lambda v: _plus_one(v["t"]), lambda v: v["t"].tolist()),
    "nan": (lambda: [torch.full((2,), torch.nan)], lambda v: v[0].zero_(), lambda v: v[0].isnan().tolist()),
    "array": (lambda: np.zeros(3), lambda v: v.__setitem__(0, 1), lambda v: v.tolist()),
    "array.array": (lambda: array.array("i", [1]), lambda v: v.append(3), list),
    "bytes": (lambda: bytearray(b"a"), lambda v: v.extend(b"b"), bytes),
    "generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda v: torch.rand(1, generator=v),
        lambda v: v.get_state().tolist(),
    ),
    "python's": (lambda: random.Random(1), lambda v: v.random(), lambda v: v.getstate()),
    "numpy's": (lambda: np.random.default_rng(1), lambda v: v.random(), lambda v: str(v.bit_generator.state)),
    "numpy's old": (lambda: np.random.RandomState(1), lambda v: v.rand(), lambda v: repr(v.get_state())),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_change_is_seen_and_put_back(name: str) -> None:
    make, change, look = _CHANGES[name]
    value, other = make(), make()
    holders = ObjectState([("other", other), ("value", value)])
    before = look(value) if not isinstance(look(value), dict) else dict(look(value))
    assert holders.changed() is None
    change(value)
    assert look(value) != before and holders.changed() == "value"
    holders.restore()
    assert look(value) == before and holders.changed() is None


def test_cycles_and_common_parts_end() -> None:
    value: dict[str, Any] = {"a": []}
    value["a"] += [value, value["a"]]
    holders = ObjectState([("value", value), ("again", value["a"])])
    assert holders.changed() is None and holders.too_much is None
    value["a"].append(1)
    assert holders.changed() is not None


def test_more_than_can_be_followed_is_told() -> None:
    deep: list[Any] = []
    for _ in range(50):
        deep = [deep]
    assert ObjectState([("deep", deep)]).too_much == "deep"
    assert ObjectState([("many", [[] for _ in range(20_000)])]).too_much == "many"
    assert ObjectState([("long", list(range(20_000)))]).too_much is None


def test_what_is_too_large_to_be_copied_is_compared_and_the_error_says_what_to_do() -> None:
    value = np.zeros(1 << 20)
    holders = ObjectState([("Model.table", value)])
    assert holders.changed() is None
    value[5] = 1
    assert holders.changed() == "Model.table"
    with pytest.raises(UnsupportedModelError, match=r"Model\.table.*infinity\.schedule.*ordinary"):
        holders.restore()
