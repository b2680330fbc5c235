"""Arguments taken apart into tensors and a form: put together again they are the same, and what carries gradients is refused."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

from infinity.vertical.arguments import Tree, is_same


class _Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class _Frozen:
    value: Any
    number: int = 3
    derived: Any = dataclasses.field(default=None, init=False)


def _tensors(count: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(index)) for index in range(count)]


def _same(a: Any, b: Any) -> bool:
    """Whether two values are of the same types all the way down, with the very same tensors at the same places."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_same, a.values(), b.values()))
    if dataclasses.is_dataclass(a):
        return all(_same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    return bool(a == b)


_SHAPES: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda a, b: (a, [b, 3, None], {"x": a, 5: "text"}),
    lambda a, b: _Pair(a, _Pair(b, 1.5)),
    lambda a, b: collections.defaultdict(list, x=[a, b]),
    lambda a, b: collections.OrderedDict(z=a, y=[b]),
    lambda a, b: _Frozen((a, b), 4),
    lambda a, b: [[], (), {}, a, b, torch.float32, slice(1, None), frozenset({1})],
    lambda a, b: torch.Size([2, 3]),
]


@pytest.mark.parametrize("make", _SHAPES)
def test_a_value_is_put_together_as_it_was_with_other_tensors_in_their_places(make: Callable[..., Any]) -> None:
    old, new = _tensors(2), _tensors(2)
    value = make(*old)
    tree = Tree(value)
    assert all(a is b for a, b in zip(tree.tensors, old, strict=False))
    assert _same(value, tree.build(tree.tensors))
    assert _same(make(*new), tree.build(new[: len(tree.tensors)]))
    assert _same(value, make(*old)), "and the value itself is not touched"


def test_a_container_that_is_changed_is_seen() -> None:
    tensor = torch.ones(2)
    value: Any = ([tensor], {"x": 1000, "in": ([3],)})
    before = tree_leaves(value)
    value[1]["x"] = int("1000")
    assert is_same(before, tree_leaves(value)), "an equal number in the place of a number is no change"
    value[0].append(1)
    assert not is_same(before, tree_leaves(value))
    value[0][:] = [torch.ones(2)]
    assert not is_same(before, tree_leaves(value))
