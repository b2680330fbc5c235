"""Flat buffers: handed out up to a capacity, taken back, and unmapped when the last view has died."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.device.compute import ComputeDevice, FlatBuffer, HostFlatBuffer
from infinity.device.flat_pool import FlatPool

_PAGE = 4096


class _Device(ComputeDevice):
    """Counts the bytes of buffers that are allocated and not released."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0

    def allocate_flat(self, num_bytes: int) -> FlatBuffer:
        device = self
        device.live_bytes += num_bytes

        class Counted(HostFlatBuffer):
            def release(self) -> None:
                device.live_bytes -= self.num_bytes
                super().release()

        return Counted(num_bytes)


@given(
    st.integers(1, 12),
    st.lists(st.one_of(st.integers(1, 6).map(lambda n: ("take", n)), st.integers(0, 20).map(lambda n: ("give", n)))),
)
@settings(max_examples=60, deadline=None)
def test_memory_in_use_and_kept_never_exceeds_the_capacity(room: int, actions: list[tuple[str, int]]) -> None:
    device = _Device()
    pool = FlatPool(device, room * _PAGE)
    used: list[FlatBuffer] = []
    for action, number in actions:
        if action == "take":
            flat = pool.allocate(number * _PAGE)
            in_use = sum(buffer.num_bytes for buffer in used)
            assert (flat is None) == (in_use + number * _PAGE > room * _PAGE), "fails only when the room is in use"
            if flat is not None:
                assert flat.num_bytes == number * _PAGE
                assert flat.address not in {buffer.address for buffer in used}
                used.append(flat)
        elif used:
            pool.release(used.pop(number % len(used)))
        assert pool.used_bytes == sum(buffer.num_bytes for buffer in used)
        assert device.live_bytes == pool.used_bytes + pool.free_bytes <= room * _PAGE
    for buffer in used:
        pool.release(buffer)
    pool.close()
    assert device.live_bytes == 0


def test_a_view_that_autograd_saved_counts() -> None:
    flat = HostFlatBuffer(_PAGE)
    flat.tensor().zero_()
    x = torch.ones(2, 4, requires_grad=True)
    out = torch.nn.functional.linear(x, flat.tensor().view(torch.float32)[:12].view(3, 4))
    assert flat.has_views
    out.sum().backward()
    assert not flat.has_views
    flat.release()


def test_the_front_of_a_buffer_makes_room_and_takes_no_memory() -> None:
    huge = 2 << 20
    pool = FlatPool(ComputeDevice(), 4 * huge)
    flat = pool.allocate(4 * huge)
    flat.tensor().fill_(7)
    assert not pool.release_front(flat, huge - 1), "memory goes in whole huge pages"
    assert pool.release_front(flat, 2 * huge + 5)
    assert not pool.release_front(flat, 2 * huge + 5)
    assert pool.used_bytes == 2 * huge
    assert bool((flat.tensor()[2 * huge :] == 7).all())
    other = pool.allocate(2 * huge)
    assert pool.allocate(1) is None
    pool.release(flat)
    assert (pool.used_bytes, pool.free_bytes) == (2 * huge, 0)
    pool.release(other)
    assert pool.used_bytes == 0
    pool.close()
