"""Arguments taken apart into tensors and a form: put together again they are the same, and who changes them is seen."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from infinity.activations.refusal import Refusal
from infinity.vertical.replay.tree import Built, Tree, tensors_in


class _Pair(NamedTuple):
    first: Any
    second: Any


class _List(list[Any]):
    note = ""


class _Dict(dict[str, Any]):
    note = ""


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
    lambda a, b: _List([a, _Dict(x=b)]),
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


def test_attributes_of_a_subclass_are_carried_along() -> None:
    for value in (_List([torch.ones(1)]), _Dict(x=torch.ones(1))):
        value.note = "seen"
        tree = Tree(value)
        built = tree.build(tree.tensors)
        assert type(built) is type(value) and built.note == "seen" and built is not value


def test_each_tensor_is_in_the_list_once_and_at_each_of_its_places() -> None:
    a, b = _tensors(2)
    tree = Tree(([a, b], {"again": a}, b.view(2)))
    assert len(tree.tensors) == 3, "a view is a tensor of its own"
    built = tree.build(["a", "b", "view of b"])
    assert built == (["a", "b"], {"again": "a"}, "view of b")


def test_containers_are_fresh_each_time() -> None:
    tree = Tree([[torch.ones(1)], {"x": {}}])
    one, other = tree.build(tree.tensors), tree.build(tree.tensors)
    one[0].append(1)
    one[1]["x"]["y"] = 2
    assert len(other[0]) == 1 and other[1] == {"x": {}}
    assert tree.build(tree.tensors)[1] == {"x": {}}


def test_the_form_holds_no_tensors() -> None:
    """They are to leave memory while the form is kept."""
    tensor = torch.ones(1)
    values = (tensor, _List([tensor]), _Dict(x=tensor), _Pair(tensor, 1), _Frozen(tensor))
    tree = Tree(values)
    tree.forget()
    assert tree.tensors == []
    waiting, seen = [tree._form], 0
    while waiting:
        form = waiting.pop()
        if hasattr(form, "items") and hasattr(form, "empty"):
            seen += 1
            assert not list(tensors_in(form.empty)), type(form.empty)
            waiting += form.items
    assert seen == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value[0].append(1),
        lambda value: value[0].__setitem__(0, torch.zeros(2)),
        lambda value: value[1].__setitem__("x", 2),
        lambda value: value[1].__setitem__("y", 1),
        lambda value: value[1].pop("x"),
        lambda value: object.__setattr__(value[2], "number", 5),
        lambda value: value[1]["in"][0].clear(),
    ],
)
def test_whoever_changes_a_container_that_he_was_given_is_seen(change: Callable[[Any], Any]) -> None:
    tree, built = Tree(([torch.ones(2)], {"x": 1, "in": ([3],)}, _Frozen(1))), Built()
    value = tree.build(tree.tensors, built)
    built.check_unchanged()
    change(value)
    with pytest.raises(Refusal, match="changes a"):
        built.check_unchanged()


def test_an_equal_number_in_the_place_of_a_number_is_no_change() -> None:
    built = Built()
    value = Tree([1000, "text"]).build([], built)
    value[0] = int("1000")
    built.check_unchanged()
    value[0] = torch.ones(1)
    with pytest.raises(Refusal):
        built.check_unchanged()


def test_a_plain_object_is_passed_as_it_is_and_must_stay_so() -> None:
    holder = SimpleNamespace(mask=torch.ones(2), count=0)
    tree = Tree((holder, torch.zeros(1)))
    assert len(tree.tensors) == 1
    assert tree.build(tree.tensors)[0] is holder
    tree.check_unchanged()
    holder.count += 1
    with pytest.raises(Refusal, match="changes a SimpleNamespace"):
        tree.check_unchanged()


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [{"x": t}], lambda t: SimpleNamespace(inner=(t,))])
def test_a_plain_object_with_gradients_inside_is_refused(wrap: Callable[[torch.Tensor], Any]) -> None:
    Tree(SimpleNamespace(inside=wrap(torch.ones(1))))
    with pytest.raises(Refusal, match="SimpleNamespace that carries gradients"):
        Tree(SimpleNamespace(inside=wrap(torch.ones(1, requires_grad=True))))


def test_functions_are_passed_and_not_looked_into() -> None:
    def function() -> None: ...

    function.tensor = torch.ones(1, requires_grad=True)  # type: ignore[attr-defined]
    tree = Tree([function])
    assert tree.tensors == [] and tree.build([])[0] is function
    function.more = 1  # type: ignore[attr-defined]
    tree.check_unchanged()


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(Refusal, match="nested too deeply"):
        Tree(value)


def test_tensors_are_found_in_containers_and_objects_that_contain_themselves() -> None:
    a, b = _tensors(2)
    value = SimpleNamespace(items=[a, {"x": _Frozen(b)}])
    value.me = value
    assert {id(tensor) for tensor in tensors_in(value)} == {id(a), id(b)}
