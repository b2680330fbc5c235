"""Tensors of a device with a backend of its own are exchanged as they are, and nobody reads them before a wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.distributed import collectives
from infinity.distributed.world import world
from tests.ranks import require_ranks
from tests.simulated_gpu import backend

backend.register_or_skip()

_NUM, _NUMEL = 3, 50


class _Late:
    """A collective of the device: until somebody waits for it, there is nothing but NaN where its result will be."""

    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        self._name, self._args, self._options = (
            name,
            [backend.on_host(each) for each in args[:2]] + [*args[2:]],
            options,
        )
        self._args[0].view(torch.uint8).fill_(0xFF)

    def wait(self) -> None:
        _call_torch(self._name, *self._args, **self._options | {"async_op": False})


_call_torch = collectives.call_torch


def test_what_is_on_a_device_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_late = 0

    def call(name: str, *args: Any, **options: Any) -> Any:
        nonlocal num_late
        if args[0].device.type == "cpu":
            return _call_torch(name, *args, **options)
        assert args[1].device == args[0].device
        num_late += 1
        return _Late(name, *args, **options)

    monkeypatch.setattr(collectives, "_BLOCK_NUMEL", 12)
    monkeypatch.setattr(collectives, "_STEP_NUMEL", 2)
    monkeypatch.setattr(collectives, "has_backend_for", lambda group, device: True)
    monkeypatch.setattr(collectives, "call_torch", call)
    values = [torch.randn(_NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(_NUM)]
    scaled = [each * (1.0 / _NUM) for each in values]
    mean = scaled[0] + scaled[1] + scaled[2]
    parts = [(0, 20), (20, 21), (21, _NUMEL)]

    def exchange(rank: int) -> None:
        ranks = world()
        own = backend.on_device(values[rank].clone())
        ranks.reduce("a test", own, parts)
        start, stop = parts[rank]
        assert torch.equal(own.cpu()[start:stop], mean[start:stop])
        for to in range(_NUM):
            found = own.clone()
            ranks.collect("a test", found, parts, to)
            assert torch.equal(found.cpu(), mean) or rank != to
        ranks.all_gather_in_memory("a test", own, parts, kind="weights")
        assert torch.equal(own.cpu(), mean)
        own = backend.on_device(values[rank].clone())
        ranks.average("a test", own)
        assert torch.equal(own.cpu(), mean)
        assert num_late > 20

    require_ranks(_NUM, exchange, tmp_path)
