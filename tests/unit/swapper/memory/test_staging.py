"""Pages: lent, taken back, counted, and never handed to two owners."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

from swapper import ALIGNMENT, ArenaExhaustedError, ArgumentError, StagingArena, SwapperClosedError


def test_pages_are_aligned_disjoint_pieces_of_one_region() -> None:
    with StagingArena(2 * ALIGNMENT, 3) as arena:
        pages = [arena.lease() for _ in range(3)]
        assert arena.num_bytes == 6 * ALIGNMENT
        assert sorted(page.index for page in pages) == [0, 1, 2]
        for page in pages:
            assert page.tensor.dtype == torch.uint8 and page.tensor.shape == (2 * ALIGNMENT,)
            assert page.num_bytes == 2 * ALIGNMENT
            assert page.tensor.data_ptr() % ALIGNMENT == 0
            page.tensor.fill_(page.index)
        assert all((page.tensor == page.index).all() for page in pages)
        assert arena.try_lease() is None
        for page in pages:
            page.release()


def test_a_released_page_is_of_no_use() -> None:
    with StagingArena(ALIGNMENT, 1) as arena:
        page = arena.lease(owner="me")
        with page:
            assert not page.is_released and "leased" in repr(page)
        assert page.is_released and "released" in repr(page)
        with pytest.raises(SwapperClosedError, match="page 0 of me was released"):
            _ = page.tensor
        other = arena.lease(owner="you")
        with pytest.raises(SwapperClosedError, match="page 0 of me was released twice"):
            page.release()
        assert other.tensor.numel() == ALIGNMENT, "a double release must not take the page from its new owner"
        other.release()


def test_exhausted_names_the_owners() -> None:
    with StagingArena(ALIGNMENT, 3) as arena:
        pages = [arena.lease(owner=owner) for owner in ("layer 1", "layer 1", "")]
        started = time.monotonic()
        with pytest.raises(
            ArenaExhaustedError, match=r"none of the 3 pages .*0\.05 seconds; held by layer 1: 2, unnamed: 1"
        ):
            arena.lease(0.05)
        assert 0.04 < time.monotonic() - started < 10
        statistics = arena.statistics()
        assert statistics.owners == (("layer 1", 2), ("", 1))
        assert statistics.wait_seconds >= 0.04
        for page in pages:
            page.release()


def test_no_page_has_two_owners_at_once() -> None:
    errors: list[str] = []
    with StagingArena(ALIGNMENT, 3) as arena:

        def work(number: int) -> None:
            for _ in range(200):
                with arena.lease(30, owner=str(number)) as page:
                    page.tensor.fill_(number)
                    time.sleep(0)
                    if not (page.tensor == number).all():
                        errors.append(f"{number} lost page {page.index}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statistics = arena.statistics()
    assert not errors
    assert (statistics.num_leases, statistics.num_leased, statistics.num_pages) == (1600, 0, 3)
    assert 1 <= statistics.most_leased <= 3


def test_pinned_once_as_a_whole_and_unpinned_before_the_memory_goes() -> None:
    calls: list[object] = []

    def pin(address: int, num_bytes: int) -> object:
        calls.append((address, num_bytes))
        return lambda: calls.append("unpinned")

    arena = StagingArena(ALIGNMENT, 4, pin)  # type: ignore[arg-type]
    assert arena.is_pinned
    with arena.lease() as page:
        assert calls == [(page.tensor.data_ptr() - page.index * ALIGNMENT, 4 * ALIGNMENT)]
    arena.close()
    arena.close()
    assert calls[1:] == ["unpinned"]
    assert not arena.is_pinned


def test_close_wakes_those_who_wait_and_names_those_who_hold(caplog: pytest.LogCaptureFixture) -> None:
    arena = StagingArena(ALIGNMENT, 1)
    page = arena.lease(owner="forgotten")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            arena.lease(30)
        except SwapperClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    with caplog.at_level(logging.WARNING):
        arena.close()
    thread.join(10)
    assert len(errors) == 1 and "forgotten" in caplog.text
    page.tensor.fill_(1)  # still mapped for who holds it
    page.release()
    for lease in (arena.lease, arena.try_lease):
        with pytest.raises(SwapperClosedError, match="has been closed"):
            lease()


@pytest.mark.parametrize(("page_bytes", "num_pages"), [(0, 1), (100, 1), (ALIGNMENT, 0)])
def test_sizes(page_bytes: int, num_pages: int) -> None:
    with pytest.raises(ArgumentError, match="page"):
        StagingArena(page_bytes, num_pages)
