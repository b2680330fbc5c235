"""Buffers: leased, returned, counted, and never handed to two owners."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import pytest
import torch

from swapper import (
    ALIGNMENT,
    AlignedRegion,
    ArgumentError,
    StagingBuffer,
    StagingExhaustedError,
    StagingPool,
    SwapperClosedError,
)


def test_pages_are_aligned_disjoint_pieces_of_one_region() -> None:
    with StagingPool(2 * ALIGNMENT, 3) as staging_pool:
        buffers = [staging_pool.lease() for _ in range(3)]
        assert staging_pool.num_bytes == 6 * ALIGNMENT
        assert sorted(buffer.index for buffer in buffers) == [0, 1, 2]
        for buffer in buffers:
            assert buffer.tensor.dtype == torch.uint8 and buffer.tensor.shape == (2 * ALIGNMENT,)
            assert buffer.num_bytes == 2 * ALIGNMENT
            assert buffer.tensor.data_ptr() % ALIGNMENT == 0
            buffer.tensor.fill_(buffer.index)
        assert all((buffer.tensor == buffer.index).all() for buffer in buffers)
        assert staging_pool.try_lease() is None
        for buffer in buffers:
            buffer.release()


def test_a_released_page_is_of_no_use() -> None:
    with StagingPool(ALIGNMENT, 1) as staging_pool:
        buffer = staging_pool.lease(owner="me")
        with buffer:
            assert not buffer.is_released and "leased" in repr(buffer)
        assert buffer.is_released and "released" in repr(buffer)
        with pytest.raises(SwapperClosedError, match="buffer 0 of me was released"):
            _ = buffer.tensor
        other = staging_pool.lease(owner="you")
        with pytest.raises(SwapperClosedError, match="buffer 0 of me was released twice"):
            buffer.release()
        assert other.tensor.numel() == ALIGNMENT, "a double release must not take the buffer from its new owner"
        other.release()


def test_exhausted_names_the_owners() -> None:
    with StagingPool(ALIGNMENT, 3) as staging_pool:
        buffers = [staging_pool.lease(owner=owner) for owner in ("layer 1", "layer 1", "")]
        started = time.monotonic()
        with pytest.raises(
            StagingExhaustedError, match=r"none of the 3 buffers .*0\.05 seconds; held by layer 1: 2, unnamed: 1"
        ):
            staging_pool.lease(0.05)
        assert 0.04 < time.monotonic() - started < 10
        for buffer in buffers:
            buffer.release()


def test_no_page_has_two_owners_at_once() -> None:
    errors: list[str] = []
    with StagingPool(ALIGNMENT, 3) as staging_pool:

        def work(number: int) -> None:
            for _ in range(200):
                with staging_pool.lease(30, owner=str(number)) as buffer:
                    buffer.tensor.fill_(number)
                    time.sleep(0)
                    if not (buffer.tensor == number).all():
                        errors.append(f"{number} lost buffer {buffer.index}")

        def look() -> None:  # for buffers that came free without a notification
            while any(thread.is_alive() for thread in threads):
                if not 0 <= staging_pool.num_leased <= 3:
                    errors.append("a buffer is free twice")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        look()
        for thread in threads:
            thread.join()
        assert staging_pool.num_leased == 0 and sorted(staging_pool.free) == [0, 1, 2]
    assert not errors


@pytest.mark.parametrize("function", [StagingBuffer.__init__, StagingBuffer.release])
def test_an_interrupt_at_any_line_loses_no_buffer_and_gives_none_twice(function: FunctionType) -> None:
    for nth in itertools.count():
        num_lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
            nonlocal num_lines
            if frame.f_code is not function.__code__:
                return None
            num_lines += event == "line"
            if event == "line" and num_lines == nth + 1:  # noqa: B023 (called within the turn)
                raise KeyboardInterrupt
            return trace

        with StagingPool(ALIGNMENT, 2) as staging_pool:
            buffer = None
            before = sys.gettrace()
            sys.settrace(trace)
            with contextlib.suppress(KeyboardInterrupt):
                buffer = staging_pool.lease()
                buffer.release()
            sys.settrace(before)
            del buffer
            assert staging_pool.num_leased == 0 and sorted(staging_pool.free) == [0, 1], nth
            with staging_pool.lease() as one, staging_pool.lease() as other:
                assert one.index != other.index and staging_pool.try_lease() is None
        if num_lines <= nth:
            assert nth > 5
            return


def test_pinned_once_as_a_whole_and_unpinned_before_the_memory_goes() -> None:
    calls: list[object] = []

    def pin(address: int, num_bytes: int) -> object:
        calls.append((address, num_bytes))
        return lambda: calls.append("unpinned")

    staging_pool = StagingPool(ALIGNMENT, 4, pin)  # type: ignore[arg-type]
    assert staging_pool.is_pinned
    with staging_pool.lease() as buffer:
        assert calls == [(buffer.tensor.data_ptr() - buffer.index * ALIGNMENT, 4 * ALIGNMENT)]
    staging_pool.close()
    staging_pool.close()
    assert calls[1:] == ["unpinned"]
    assert not staging_pool.is_pinned


def test_close_wakes_those_who_wait_and_names_those_who_hold(caplog: pytest.LogCaptureFixture) -> None:
    staging_pool = StagingPool(ALIGNMENT, 1)
    buffer = staging_pool.lease(owner="forgotten")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            staging_pool.lease(30)
        except SwapperClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    with caplog.at_level(logging.WARNING):
        staging_pool.close()
    thread.join(10)
    assert len(errors) == 1 and "forgotten" in caplog.text
    buffer.tensor.fill_(1)  # still mapped for who holds it
    buffer.release()
    for lease in (staging_pool.lease, staging_pool.try_lease):
        with pytest.raises(SwapperClosedError, match="has been closed"):
            lease()


@pytest.mark.parametrize(("buffer_bytes", "num_buffers"), [(0, 1), (100, 1), (ALIGNMENT, 0)])
def test_sizes(buffer_bytes: int, num_buffers: int) -> None:
    with pytest.raises(ArgumentError, match="buffer"):
        StagingPool(buffer_bytes, num_buffers)


def test_memory_is_given_back_and_taken_back() -> None:
    pinned: list[int] = []
    known: list[int] = []

    def pin(address: int, num_bytes: int) -> Callable[[], None]:
        pinned.append(address)
        return lambda: pinned.remove(address)

    def register(region: AlignedRegion) -> Callable[[], None]:
        address = region.address
        known.append(address)
        return lambda: known.remove(address)

    before = AlignedRegion.mapped_bytes()
    with StagingPool(ALIGNMENT, 2, pin, deadline_seconds=0.05) as staging_pool:
        staging_pool.register_with(register)
        buffer = staging_pool.lease(owner="me")
        with pytest.raises(StagingExhaustedError, match="held by me: 1"):
            staging_pool.release_memory()
        buffer.tensor.fill_(1)
        buffer.release()
        for _ in range(2):
            staging_pool.release_memory()
        assert AlignedRegion.mapped_bytes() == before
        assert not pinned and not known
        assert staging_pool.try_lease() is None
        for _ in range(2):
            staging_pool.allocate_memory()
        assert pinned == known and len(pinned) == 1 and staging_pool.is_pinned
        buffers = [staging_pool.lease() for _ in range(2)]
        assert {buffer.tensor.data_ptr() - pinned[0] for buffer in buffers} == {0, ALIGNMENT}
        for buffer in buffers:
            buffer.release()
        staging_pool.release_memory()
    assert AlignedRegion.mapped_bytes() == before
