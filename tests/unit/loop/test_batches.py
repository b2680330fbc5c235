"""Batches are copied with what holds them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from infinity.loop.batches import copied

_CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "mapping of a library": (lambda x: UserDict({"x": x}), lambda batch: batch["x"]),
    "list of tuples": (lambda x: [(x, "text")], lambda batch: batch[0][0]),
    "all of them": (lambda x: [UserDict({"x": {"y": x}})], lambda batch: batch[0]["x"]["y"]),
}


@pytest.mark.parametrize("container", _CONTAINERS)
@pytest.mark.parametrize("kind", [torch.ones, np.ones])
def test_batches_are_copied_whatever_holds_them(container: str, kind: Callable[[int], Any]) -> None:
    make, look = _CONTAINERS[container]
    memory = kind(3)
    batch = make(memory)
    twin = copied(batch)
    memory[:] = 7
    assert type(twin) is type(batch)
    assert look(twin).tolist() == [1.0] * 3
