"""The ring in which tensors arrive from a device: in order, at their places, and nobody waits who did not ask."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.device.compute import ComputeDevice, Fence
from infinity.device.download_ring import DownloadRing

_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


class _LateDevice(ComputeDevice):
    """Copies run in their order, when somebody waits for them, or one by one with `pass_time`. Until then the target is 255.

    Attributes:
        num_waits: how often somebody waited for a copy that had not run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._num = 0
        self.num_waits = 0

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Fence) -> Fence:
        target.view(torch.uint8).fill_(255)
        self._num += 1
        self._pending.append((self._num, target, source))
        return self._num

    def pass_time(self) -> None:
        if self._pending:
            _, target, source = self._pending.popleft()
            target.copy_(source)

    def is_done(self, fence: Fence) -> bool:
        return not self._pending or self._pending[0][0] > fence

    def synchronize(self, fence: Fence) -> None:
        if fence is not None and not self.is_done(fence):
            self.num_waits += 1
            while not self.is_done(fence):
                self.pass_time()


def _drawn(seed: int, numel: int) -> torch.Tensor:
    values = torch.randint(255, (4 * numel,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    dtype = _DTYPES[seed % len(_DTYPES)]
    return values.view(dtype)[:numel]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


_ACTIONS = st.one_of(
    st.tuples(st.just("start"), st.lists(st.integers(0, 200), min_size=1, max_size=3)),
    st.tuples(st.sampled_from(("take", "time")), st.just([0])),
)


@given(st.lists(_ACTIONS, max_size=60))
@settings(max_examples=150, deadline=None)
def test_what_is_started_comes_in_its_order_and_stands_until_the_next_start(
    actions: list[tuple[str, list[int]]],
) -> None:
    device = _LateDevice()
    landing: DownloadRing[list[torch.Tensor]] = DownloadRing(device, 2048)
    seed = 0

    def take() -> None:
        landing.await_first()
        download = landing.pop_first()
        for values, source in zip(download.values, download.purpose, strict=True):
            assert torch.equal(_bits(values), _bits(source))

    for action, numels in actions:
        if action == "time":
            device.pass_time()
        elif action == "take" and landing.coming:
            is_there, waits = landing.is_first_done(), device.num_waits
            take()
            assert device.num_waits == waits + (not is_there)
        elif action == "start":
            sources = []
            for numel in numels:
                seed += 1
                sources.append(_drawn(seed, numel))
            waits = device.num_waits
            if landing.fits(sources):
                landing.start(sources, sources)
            else:
                assert landing.coming or sum(source.nbytes for source in sources) > 2048 - 64 * len(sources)
            assert device.num_waits == waits
    while landing.coming:
        take()
    landing.close()


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 1000])
def test_what_is_larger_comes_block_by_block(numel: int) -> None:
    device = _LateDevice()
    landing: DownloadRing[None] = DownloadRing(device, 256)
    source = torch.arange(numel, dtype=torch.float32)
    found = torch.full((numel,), -1.0)
    for start, values in landing.blocks(source, most_numel=1 << 20):
        assert values.nbytes <= 128
        found[start : start + values.numel()] = values
    assert torch.equal(found, source)
    assert all(values.numel() <= 10 for _, values in landing.blocks(source, most_numel=10))
    landing.close()


def test_blocks_do_not_overwrite_what_is_on_its_way() -> None:
    landing: DownloadRing[None] = DownloadRing(_LateDevice(), 256)
    landing.start([torch.ones(4)], None)
    with pytest.raises(RuntimeError, match="1 on their way"):
        list(landing.blocks(torch.ones(100), most_numel=100))
    landing.close()


def test_memory_goes_when_no_copy_writes_to_it_any_more() -> None:
    device = _LateDevice()
    undone = []
    device.pin = lambda address, num_bytes: lambda: undone.append(device.is_done(1))
    landing: DownloadRing[None] = DownloadRing(device, 256)
    landing.start([torch.ones(4)], None)
    landing.pop_first()  # not needed, but still on its way
    landing.close()
    landing.close()
    assert undone == [True]
