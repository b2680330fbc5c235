"""Batches are copied with what holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from infinity.loop.batches import copied


@dataclasses.dataclass(frozen=True)
class Example:
    x: torch.Tensor


_CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "read-only mapping": (lambda x: MappingProxyType({"x": x}), lambda batch: batch["x"]),
    "dataclass": (Example, lambda batch: batch.x),
    "list of both": (lambda x: [MappingProxyType({"x": Example(x)})], lambda batch: batch[0]["x"].x),
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
