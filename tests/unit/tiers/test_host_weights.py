"""Weights at rest in host memory, for a device whose copies are late."""

from __future__ import annotations

import torch

from infinity.device.compute import Fence
from infinity.tiers.host_weights import HostWeights
from tests.lazy_device import LazyDevice


def test_they_are_overwritten_when_no_copy_reads_them_any_more() -> None:
    device = LazyDevice()
    weights = HostWeights(64, device)
    weights.present.fill_(1)
    flat = device.allocate_flat(64)
    arrival = weights.fetch(flat)
    weights.write(0, torch.full((64,), 2, dtype=torch.uint8))
    arrival.wait()
    assert bool((flat.tensor() == 1).all())
    assert bool((weights.present == 2).all())
    weights.release()


def test_their_memory_goes_when_no_copy_reads_it_any_more() -> None:
    device = LazyDevice()
    fences: list[Fence] = []
    were_done: list[bool] = []
    device.pin = lambda address, num_bytes: lambda: were_done.append(device.is_done(fences[0]))
    weights = HostWeights(64, device)
    weights.present.fill_(1)
    flat = device.allocate_flat(64)
    weights.fetch(flat)
    fences.append(weights._fence)
    assert not device.is_done(fences[0])
    weights.release()
    assert were_done == [True]
    assert bool((flat.tensor() == 1).all())
