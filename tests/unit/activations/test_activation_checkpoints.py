"""Inputs of units that leave memory: what they take on their way, and what is left of them afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from infinity.activations import spilled as module
from infinity.activations.activation_checkpoints import ActivationCheckpoint, ActivationCheckpoints
from infinity.activations.spilled import SpillSpace
from infinity.metrics.clock import StepClock
from swapper import StallError, Swapper, SwapperConfig, TransferError
from swapper.backends.memory import MemoryBackend
from tests.unit.late_backend import LateBackend, stall, waits

_NUMEL = 3 * 1024
_BYTES = 3 * 4096
_NUM = 12


@pytest.fixture
def backend() -> LateBackend:
    return LateBackend(MemoryBackend(1 << 20, 8))


@pytest.fixture
def swapper(backend: LateBackend) -> Iterator[Swapper]:
    opened = Swapper(backend, SwapperConfig(deadline_seconds=1000.0))
    yield opened
    backend.answer_all()
    opened.close()


def _make(swapper: Swapper, capacity_bytes: int) -> tuple[ActivationCheckpoints, SpillSpace]:
    space = SpillSpace(lambda num_bytes: swapper)
    pack = lambda tensor: (tensor.detach(), tensor._version)  # noqa: E731
    return ActivationCheckpoints(space, StepClock(), pack, lambda saved: saved[0], capacity_bytes), space


class _Watch:
    """Bytes of the memory that things have on their way, as far as anybody still refers to it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._seen: list[weakref.ref[Any]] = []
        real = module.AlignedRegion

        def make(num_bytes: int) -> Any:
            region = real(num_bytes)
            self._seen.append(weakref.ref(region._bytes.base))
            return region

        patch.setattr(module, "AlignedRegion", make)

    @property
    def num_bytes(self) -> int:
        return sum(mapping.num_bytes for seen in self._seen if (mapping := seen()) is not None)


def _tensor(index: int) -> torch.Tensor:
    return torch.full((_NUMEL,), float(index))


@pytest.mark.parametrize("capacity", [0, 2, 4, 7])
def test_what_is_kept_stays_within_its_share_of_the_budget(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The slowest drive there is: it answers only who waits. And without threads, which hold memory for an instant longer.
    backend = LateBackend(MemoryBackend(1 << 20, 0))
    backend.is_late = lambda request: True
    watch = _Watch(monkeypatch)
    with waits(lambda *_: backend.answer_all()), Swapper(backend, SwapperConfig(deadline_seconds=1000.0)) as swapper:
        _keep_and_load(swapper, capacity, watch)


def _keep_and_load(swapper: Swapper, capacity: int, watch: _Watch) -> None:
    checkpoints, _ = _make(swapper, capacity * _BYTES)
    kept: list[ActivationCheckpoint] = []

    def check() -> None:
        there = sum(one.num_bytes for one in kept if one.source is not None and one.place is None)
        assert there + watch.num_bytes <= max(capacity, 2) * _BYTES

    for index in range(_NUM):
        kept.append(checkpoints.keep(_tensor(index)))
        check()
    assert checkpoints.spilled_bytes >= (_NUM - capacity) * _BYTES
    checkpoints.begin_backward(reversed(kept))
    for index in reversed(range(_NUM)):
        assert torch.equal(checkpoints.load(kept[index]), _tensor(index))
        check()
        checkpoints.release(kept[index])
        kept.pop()
    checkpoints.close()
    assert watch.num_bytes == 0, "and nothing of it is left"
    assert checkpoints._held_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(5,), (3, 1000), (64, 64, 3)])
def test_what_comes_back_is_what_left_wherever_it_lay(
    shape: tuple[int, ...], dtype: torch.dtype, swapper: Swapper
) -> None:
    checkpoints, _ = _make(swapper, 0)
    tensors = [torch.randn(shape).to(dtype), torch.randn(shape).to(dtype).mT if len(shape) > 1 else torch.ones(7)]
    kept = [checkpoints.keep(tensor) for tensor in tensors]
    checkpoints.begin_backward(kept)
    for one, tensor in zip(kept, tensors, strict=True):
        loaded = checkpoints.load(one)
        assert torch.equal(loaded, tensor) and loaded.stride() == tensor.stride() and loaded.dtype == tensor.dtype
        checkpoints.release(one)
    assert swapper.backend.num_bounced == 0


def test_an_extent_under_a_request_that_hangs_is_not_used_again(swapper: Swapper, backend: LateBackend) -> None:
    backend.is_late = lambda request: True
    checkpoints, space = _make(swapper, 0)
    free_bytes = swapper.free_bytes
    with waits(lambda scheduler, operation: stall(scheduler)), pytest.raises(StallError):
        for index in range(_NUM):
            checkpoints.keep(_tensor(index))
    backend.is_late = lambda request: False
    checkpoints.close()
    assert swapper.free_bytes < free_bytes
    _, extent = space.allocate(_BYTES)
    swapper.write(extent, _tensor(5)).wait()  # it is not behind what hangs
    backend.answer_all()
    swapper.free(extent)
    assert swapper.free_bytes == free_bytes
    assert not isinstance(swapper._scheduler.pending.pop(), TransferError)
