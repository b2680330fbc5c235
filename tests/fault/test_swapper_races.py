"""Requests on the same bytes keep their order, however unevenly fast the backend is in the two directions."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from swapper import ALIGNMENT, Priority, StagingArena, Swapper, SwapperConfig
from swapper.backends import MemoryBackend
from tests.exactness.faulty_drives import JitteringBackend
from tests.latency import delayed

_BLOCK = ALIGNMENT
_NUM_BLOCKS = 16


@pytest.fixture(params=["slow writes", "slow reads", "uneven"])
def swapper(request: pytest.FixtureRequest) -> Iterator[Swapper]:
    inner = MemoryBackend(64 * _BLOCK, num_threads=2)
    backend = {
        "slow writes": lambda: delayed(inner, write_seconds=0.002),
        "slow reads": lambda: delayed(inner, read_seconds=0.002),
        "uneven": lambda: JitteringBackend(inner, seed=0, longest_seconds=0.002),
    }[request.param]()
    with Swapper(backend, SwapperConfig(request_bytes=2 * _BLOCK)) as made:
        yield made


def _bytes(value: int, num_blocks: int = _NUM_BLOCKS) -> np.ndarray:
    return np.full(num_blocks * _BLOCK, value, dtype=np.uint8)


def test_the_update_cycle_of_an_optimizer(swapper: Swapper) -> None:
    """Read, change, write back, with fewer pages than chunks: each step must see the result of the step before."""
    num_steps, num_chunks = 12, 10
    with StagingArena(_BLOCK, 4) as arena:
        extents = [swapper.allocate(_BLOCK, f"chunk {index}") for index in range(num_chunks)]
        for extent in extents:
            swapper.write(extent, _bytes(0, 1))
        for _ in range(num_steps):
            waiting = []
            for extent in [*extents, None, None]:
                if extent is not None:
                    page = arena.lease(30, owner=extent.name)
                    handle = swapper.read(extent, page.tensor, priority=Priority.PREFETCH)
                    waiting.append((extent, page, handle))
                if waiting and (extent is None or len(waiting) > 2):
                    done_extent, done_page, done_handle = waiting.pop(0)
                    done_handle.wait()
                    done_page.tensor.add_(1)
                    written = swapper.write(done_extent, done_page.tensor)
                    written.add_done_callback(lambda _, page=done_page: page.release())
        for extent in extents:
            copy = _bytes(255, 1)
            swapper.read(extent, copy).wait()
            assert (copy == num_steps).all(), extent
        swapper.flush()


def test_many_threads_on_their_own_extents_and_one_shared_swapper(swapper: Swapper) -> None:
    errors: list[str] = []

    def work(number: int) -> None:
        try:
            for round_number in range(15):
                extent = swapper.allocate(3 * _BLOCK, f"thread {number}")
                value = (number * 31 + round_number) % 256
                swapper.write(extent, _bytes(value, 3))
                copy = _bytes(0, 3)
                swapper.read(extent, copy).wait()
                if not (copy == value).all():
                    errors.append(f"thread {number} read something else")
                swapper.free(extent)
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert swapper.free_bytes == swapper.capacity_bytes
