"""What the caller's thread is set to holds where its work is done: in the update thread and in a vertical step's lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from infinity.loop.batches import copied
from infinity.threads.denormals import flushes_denormals
from tests.exactness.lockstep import Lockstep


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("clips", [False, True])
def test_updates_flush_denormals_as_their_caller_does(clips: bool, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, loop="plain", changes={"gradient_clipping": 1.0} if clips else None) as both:
        for step in range(4):
            torch.set_flush_denormal(step % 2 == 1)
            assert flushes_denormals() == (step % 2 == 1)
            batch = both.batch(step)
            expected = both.reference.forward(batch) * 1e-17  # the squares of its gradients are denormal
            both.reference.backward(expected)
            both.reference.step()
            loss = both.model(**batch) * 1e-17
            loss.backward()
            both.optimizer.step()
            both.optimizer.zero_grad()
            both.engine.flush()
            both.note(f"loss {step}", expected, loss)
        torch.set_flush_denormal(False)
        both.require_equal()


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
