"""What autograd saves, in RAM and on NVMe: exact, stored once, given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.activations.saved_activations import SavedActivations
from infinity.activations.spilled import SpillSpace
from infinity.device.compute import ComputeDevice
from infinity.errors import EngineClosedError
from infinity.metrics.clock import StepClock
from swapper import Swapper, SwapperConfig
from swapper.volumes.directory import Directory

_NUMEL = 64 << 10
"""Of fp32: 256 KiB."""
_BYTES = 4 * _NUMEL


class Store:
    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self.swappers: list[Swapper] = []

        def open_swapper(num_bytes: int) -> Swapper:
            self.swappers.append(Swapper.open((Directory(directory),), num_bytes, SwapperConfig()))
            return self.swappers[-1]

        self.saved = SavedActivations(
            SpillSpace(open_swapper), StepClock(ComputeDevice(torch.device("cpu"))), capacity_bytes
        )

    def needed(self) -> dict[int, Any]:
        """The storages that some graph still needs."""
        self.saved._sweep()
        return self.saved._all

    @contextmanager
    def active(self) -> Iterator[None]:
        def pack(tensor: torch.Tensor) -> Any:
            token = self.saved.pack(tensor)
            return (tensor.detach(), None) if token is None else token

        def unpack(saved: Any) -> torch.Tensor:
            return saved[0] if isinstance(saved, tuple) else saved.load()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


@pytest.fixture(params=[0, 5 * _BYTES, 1 << 30], ids=["none", "some", "all"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """With memory for nothing, some, or all."""
    store = Store(tmp_path, request.param)
    yield store
    gc.collect()
    assert not store.needed()
    store.saved.close()
    for swapper in store.swappers:
        swapper.close()


def _leaf(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(12):
        x = torch.tanh(x) * x
    return x.sum()


@pytest.mark.deep(but=1)
def test_one_storage_is_kept_once(store: Store) -> None:
    def views(y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.square(view) for view in (y, y, y.t(), y.view(-1), y[:200])]

    plain, x = _leaf(), _leaf()
    torch.stack([part.sum() for part in views(plain * 2)]).sum().backward()
    with store.active():
        y = x * 2
        before = store.saved.kept_bytes
        parts = views(y)
        assert store.saved.kept_bytes - before == _BYTES
    torch.stack([part.sum() for part in parts]).sum().backward()
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.deep(but=2)
def test_a_second_version_is_another_tensor(store: Store) -> None:
    x = _leaf()
    with store.active():
        y = (x * 2).detach()
        first = (x * y).sum()
        y.add_(1)
        second = (x * y).sum()
    second.backward()
    assert torch.equal(x.grad, (x * 2 + 1).detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


@pytest.mark.deep(but=1)
def test_the_storage_of_data_counts_by_itself(store: Store) -> None:
    """`y.data` has the storage of `y`, and both their first version, though they differ in time."""
    x = _leaf()
    with store.active():
        y = (x * 2).detach()
        kept = (x * y.data).sum() + _chain(_leaf(1))
        y.data.zero_()
        again = (x * y.data).sum()
    again.backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    del kept


@pytest.mark.deep(but=1)
def test_dropped_graphs_and_errors_give_their_space_back(store: Store) -> None:
    for _ in range(3):
        with store.active():
            _chain(_leaf())

        class Failing(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                raise ValueError("on purpose")

        with store.active():
            loss = _chain(Failing.apply(torch.tanh(_leaf())))
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
        del loss
        with pytest.raises(ValueError, match="in forward"), store.active():
            y = _chain(_leaf())
            raise ValueError("in forward", y.shape)
        del y
        gc.collect()
        assert not store.needed()
    assert sum(swapper.capacity_bytes for swapper in store.swappers) <= 128 << 20


def test_a_backward_after_the_end_is_an_error(tmp_path: Path) -> None:
    store = Store(tmp_path, 0)
    with store.active():
        loss = _chain(_leaf())
    store.saved.close()
    with pytest.raises(EngineClosedError):
        loss.backward()
    for swapper in store.swappers:
        swapper.close()
