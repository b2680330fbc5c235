"""The integrity wrapper: no damage passes, nothing else is called damage, whatever ranges are written and read."""

from __future__ import annotations

import errno
import logging
import random
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from swapper import ALIGNMENT, AlignedRegion
from swapper.backend import CorruptedDataError, Direction, IOBackend
from swapper.backends.memory import MemoryBackend
from swapper.backends.threads import ThreadsBackend
from swapper.errors import ArgumentError
from swapper.testing.conformance import aligned_bytes, random_bytes, read, start, write
from swapper.volumes.volume import Volume
from swapper.wrappers.checksum import PAGE_BYTES, crc32c, is_fast
from swapper.wrappers.faults import FaultInjectingBackend, FaultRule
from swapper.wrappers.integrity import IntegrityBackend
from tests.manual_backend import ManualBackend

_READ, _WRITE = Direction.READ, Direction.WRITE
_PAGE = 2 * ALIGNMENT


def _over_memory(num_pages: int = 4, page_bytes: int = _PAGE) -> tuple[IntegrityBackend, MemoryBackend]:
    inner = MemoryBackend(num_pages * _PAGE)
    return IntegrityBackend(inner, page_bytes), inner


def _flip(inner: MemoryBackend, address: int) -> None:
    inner.region.array()[address] ^= 1 << address % 8


def _outcome(backend: IOBackend, direction: Direction, low: int, high: int) -> OSError | None:
    completion = start(backend, direction, low, random_bytes(high - low, high))
    completion.wait()
    return completion.error


def _is_damaged(backend: IOBackend, low: int, high: int) -> bool:
    error = _outcome(backend, _READ, low, high)
    if error is None:
        return False
    assert isinstance(error, CorruptedDataError), error
    assert error.offset < high and low < error.offset + error.num_bytes
    return True


# ------------------------------------------------------------------------------------------------------- checksums


def test_the_checksum_is_crc32c_of_all_pieces_and_fast() -> None:
    text = np.frombuffer(b"123456789", dtype=np.uint8)
    assert crc32c(text) == crc32c(text[:4], text[4:4], text[4:]) == 0xE3069283
    assert is_fast(), "google-crc32c has no compiled implementation here"


# ----------------------------------------------------------------------------------------------------- any ranges


def _open(kind: str, directory: Path) -> IntegrityBackend:
    if kind == "memory":
        return IntegrityBackend(MemoryBackend(8 * _PAGE), _PAGE)
    if kind == "odd capacity":
        return IntegrityBackend(MemoryBackend(15 * ALIGNMENT, 2), _PAGE)
    direct = kind == "direct"
    return IntegrityBackend(ThreadsBackend(Volume([directory], 8 * _PAGE, direct=direct), num_threads=2), _PAGE)


def _poke(backend: IOBackend, address: int) -> None:
    """Flip a bit behind the wrapper's back."""
    block = aligned_bytes(ALIGNMENT)
    low = address // ALIGNMENT * ALIGNMENT
    read(backend, low, block)
    block[address - low] ^= 16
    write(backend, low, block)


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("kind", ["memory", "odd capacity", "direct", "page cache"])
@pytest.mark.parametrize("seed", range(4))
def test_every_written_byte_is_protected_and_no_other(kind: str, seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    backend = _open(kind, tmp_path)
    size = backend.capacity_bytes
    content, is_written = np.zeros(size, dtype=np.uint8), np.zeros(size, dtype=np.bool_)

    def draw() -> tuple[int, int]:
        unit = dice.choice([1, 1, 512, ALIGNMENT])
        low = dice.randrange(size // unit) * unit
        return low, min(size, low + dice.choice([1, 5, 3000, ALIGNMENT, 3 * ALIGNMENT]) // unit * unit + unit)

    read(backend, 0, content)
    for number in range(150):
        low, high = draw()
        if dice.random() < 0.6:
            data = random_bytes(high - low, number)
            write(backend, low, data)
            content[low:high], is_written[low:high] = data, True
        else:
            data = aligned_bytes(high - low)
            read(backend, low, data)
            assert np.array_equal(data, content[low:high])
    for _ in range(60):
        low, high = draw()
        address = dice.randrange(low, high)
        _poke(backend.inner, address)
        assert _is_damaged(backend, low, high) or not is_written[address], f"damage at {address} passed"
        _poke(backend.inner, address)
        assert not _is_damaged(backend, low, high)
    assert backend.close(5.0)


# --------------------------------------------------------------------------------------------------- what is in flight


def _manual(block_bytes: int = 1) -> tuple[IntegrityBackend, ManualBackend]:
    inner = ManualBackend(4 * _PAGE, block_bytes=block_bytes)
    return IntegrityBackend(inner, _PAGE), inner


def test_ranges_that_fit_need_nothing_else() -> None:
    backend, inner = _manual()
    data = random_bytes(_PAGE, 1)
    for low in (0, 100, 3000, _PAGE, 2 * _PAGE - 1):
        start(backend, _WRITE, low, data[:50] if low < _PAGE else data[:1])
    assert len(inner.open) == 5
    inner.complete_all()
    for low in (0, 100, 3000):
        start(backend, _READ, low, aligned_bytes(50))
    start(backend, _WRITE, 60, data[:40])
    inner.complete_all()
    assert len(inner.log) == 9


def test_a_write_into_a_segment_reads_it_first() -> None:
    backend, inner = _manual()
    start(backend, _WRITE, 0, random_bytes(_PAGE, 1))
    inner.complete_all()
    inner.log.clear()
    for low in (0, 200):
        start(backend, _WRITE, low, random_bytes(100, low))
        inner.complete_all()
    assert inner.log == [("read", 0, _PAGE), ("write", 0, 100), ("read", 100, _PAGE - 100), ("write", 200, 100)]
    inner.log.clear()
    for low, high in ((0, 100), (200, 300), (100, 200), (0, 300)):
        start(backend, _READ, low, aligned_bytes(high - low))
        start(backend, _WRITE, low, random_bytes(high - low, high))
        inner.complete_all()
    assert len(inner.log) == 8, "they all begin and end where segments do"


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("block_bytes", [1, 512])
@pytest.mark.parametrize("seed", range(30))
def test_requests_in_one_page_may_end_in_any_order(seed: int, block_bytes: int) -> None:
    """Rounds of requests that do not overlap, of which now the one and now the other goes a step further."""
    dice = random.Random(seed)
    backend, inner = _manual(block_bytes)
    capacity = inner.capacity_bytes
    model = random_bytes(capacity, seed)
    start(backend, _WRITE, 0, model)
    inner.complete_all()
    for _ in range(20):
        unit = dice.choice([1, 64, 512]) if block_bytes == 1 else dice.choice([512, 1536])
        cuts = sorted({unit * dice.randrange(capacity // unit + 1) for _ in range(16)})
        completions, reads = [], []
        for low, high in pairwise(cuts):
            trim = dice.choice([0, 7]) if high - low > 20 else 0
            low, high = low + trim, high - trim  # inside blocks that are nobody else's
            if dice.random() < 0.5:
                data = random_bytes(high - low, low)
                completions.append(start(backend, _WRITE, low, data))
                model[low:high] = data
            else:
                copy = aligned_bytes(high - low)
                completions.append(start(backend, _READ, low, copy))
                reads.append((low, high, copy))
        while inner.open:
            inner.complete(dice.randrange(len(inner.open)))
        assert not any(completion.error for completion in completions)
        for low, high, copy in reads:
            assert np.array_equal(copy, model[low:high])
    for address in (dice.randrange(capacity) for _ in range(10)):
        _flip(inner, address)
        completion = start(backend, _READ, 0, aligned_bytes(capacity))
        inner.complete_all()
        assert isinstance(completion.error, CorruptedDataError), address
        _flip(inner, address)
    assert not backend._preparing


class _SlowBackend(MemoryBackend):
    """Takes its time on a thread of its own."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, 1)
        copy, self._copy = self._copy, lambda request: (time.sleep(0.01), copy(request))


def test_close_completes_what_is_still_read_back_for() -> None:
    backend = IntegrityBackend(_SlowBackend(4 * _PAGE), _PAGE)
    write(backend, 0, random_bytes(_PAGE, 0))
    completions = [start(backend, _WRITE, 64 * index, random_bytes(50, index)) for index in range(10)]
    assert backend.close(20.0)
    for completion in completions:
        completion.require_whole(50)


def test_close_does_not_wait_for_ever_for_what_hangs() -> None:
    faulty = FaultInjectingBackend(MemoryBackend(4 * _PAGE))
    backend = IntegrityBackend(faulty, _PAGE)
    write(backend, 0, random_bytes(_PAGE, 0))
    faulty.add(FaultRule(direction=_READ, hangs=True))
    start(backend, _WRITE, 10, random_bytes(50, 1))
    start(backend, _WRITE, 90, random_bytes(50, 1))
    assert not backend.close(0.05)


# ------------------------------------------------------------------------------------------------ writes that go wrong


def test_of_a_failed_write_nothing_is_known_and_its_neighbours_stay_protected() -> None:
    faulty = FaultInjectingBackend(inner := MemoryBackend(4 * _PAGE))
    backend = IntegrityBackend(faulty, _PAGE)
    write(backend, 0, random_bytes(4 * _PAGE, 0))
    faulty.add(FaultRule(direction=_WRITE, errno=errno.EIO, times=1))
    assert _outcome(backend, _WRITE, 100, 2 * _PAGE + 100) is not None
    inner.region.array()[100 : 2 * _PAGE + 100] = 3  # torn
    assert not _is_damaged(backend, 0, 4 * _PAGE)
    for address in (99, 2 * _PAGE + 100):
        _flip(inner, address)
        assert _is_damaged(backend, 0, 4 * _PAGE)
        _flip(inner, address)
    write(backend, 100, random_bytes(2 * _PAGE, 1))
    _flip(inner, 150)
    assert _is_damaged(backend, 0, 4 * _PAGE)


def test_blocks_that_a_failed_write_tore_do_not_spoil_what_lies_behind_them() -> None:
    backend, inner = _manual(block_bytes=ALIGNMENT)
    for low, high in ((0, 100), (100, 200), (200, _PAGE)):
        start(backend, _WRITE, low, random_bytes(high - low, low))
        inner.complete_all()
    start(backend, _WRITE, 100, random_bytes(100, 9))
    inner.complete()  # what was read back
    inner.fail(errno.EIO)
    inner.region.array()[:ALIGNMENT] = 7
    behind = start(backend, _READ, ALIGNMENT, aligned_bytes(100))
    inner.complete_all()
    behind.require_whole(100)
    # Healing a part of the torn block is fine, and does not make the rest of it pass.
    healing = start(backend, _WRITE, 100, random_bytes(150, 9))
    inner.complete_all()
    healing.require_whole(150)
    for low, high, is_right in ((100, 250, True), (ALIGNMENT, _PAGE, True), (250, 300, False), (0, 50, False)):
        completion = start(backend, _READ, low, aligned_bytes(high - low))
        inner.complete_all()
        completion.wait()
        assert (completion.error is None) == is_right, (low, high)


def test_damage_beside_a_write_is_kept_in_mind_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    backend, inner = _over_memory()
    write(backend, 0, random_bytes(_PAGE, 0))
    _flip(inner, 700)
    with caplog.at_level(logging.ERROR):
        write(backend, 100, random_bytes(100, 1))
    assert "damaged" in caplog.text
    assert not _is_damaged(backend, 100, 200)
    _flip(inner, 700)  # its checksum has gone with the segment: it stays damaged until it is written again
    assert _is_damaged(backend, 150, 250) and _is_damaged(backend, 0, 1) and _is_damaged(backend, 200, _PAGE)
    write(backend, 150, random_bytes(_PAGE - 150, 2))
    assert not _is_damaged(backend, 100, _PAGE) and _is_damaged(backend, 0, _PAGE)
    write(backend, 0, random_bytes(100, 3))
    assert not _is_damaged(backend, 0, _PAGE)


@pytest.mark.parametrize("short_bytes", [0, 1, 100, ALIGNMENT, ALIGNMENT + 1, _PAGE, _PAGE + ALIGNMENT])
def test_what_a_short_write_has_written_is_protected_in_whole_blocks(short_bytes: int) -> None:
    faulty = FaultInjectingBackend(inner := MemoryBackend(4 * _PAGE))
    backend = IntegrityBackend(faulty, _PAGE)
    write(backend, 0, random_bytes(4 * _PAGE, 0))
    faulty.add(FaultRule(direction=_WRITE, short_bytes=short_bytes, times=1))
    completion = start(backend, _WRITE, ALIGNMENT, random_bytes(2 * _PAGE, 1))
    completion.wait()
    assert completion.error is None and completion.transferred_bytes == short_bytes
    whole = short_bytes // ALIGNMENT * ALIGNMENT
    if whole:
        _flip(inner, ALIGNMENT + whole - 1)
        assert _is_damaged(backend, ALIGNMENT, ALIGNMENT + whole)
        _flip(inner, ALIGNMENT + whole - 1)
    assert not _is_damaged(backend, 0, 4 * _PAGE)
    write(backend, ALIGNMENT + whole, random_bytes(2 * _PAGE - whole, 2))
    _flip(inner, 2 * _PAGE + 5)
    assert _is_damaged(backend, 0, 4 * _PAGE)


def test_what_padding_has_destroyed_is_not_called_damage() -> None:
    backend, inner = _manual(block_bytes=ALIGNMENT)
    for low, high in ((0, ALIGNMENT), (ALIGNMENT, ALIGNMENT + 5), (ALIGNMENT + 5, _PAGE), (_PAGE, 2 * _PAGE)):
        start(backend, _WRITE, low, random_bytes(high - low, low))
        inner.complete_all()
    padded = start(backend, _WRITE, ALIGNMENT + 10, random_bytes(100, 1), may_pad=True)
    inner.complete_all()
    padded.require_whole(100)
    inner.region.array()[ALIGNMENT : ALIGNMENT + 10] = 0
    inner.region.array()[ALIGNMENT + 110 : 2 * ALIGNMENT] = 0
    completion = start(backend, _READ, 0, aligned_bytes(2 * _PAGE))
    inner.complete_all()
    completion.require_whole(2 * _PAGE)
    for address in (ALIGNMENT - 1, ALIGNMENT + 10, 2 * ALIGNMENT):
        _flip(inner, address)
        completion = start(backend, _READ, 0, aligned_bytes(2 * _PAGE))
        inner.complete_all()
        assert isinstance(completion.error, CorruptedDataError)
        _flip(inner, address)


# ------------------------------------------------------------------------------------------------- reads that go wrong


@pytest.mark.parametrize("short_bytes", [0, 1, ALIGNMENT, _PAGE - 1, _PAGE, _PAGE + 10, 2 * _PAGE])
@pytest.mark.parametrize("low", [0, 100])
def test_of_a_short_read_only_what_is_verified_counts(short_bytes: int, low: int) -> None:
    faulty = FaultInjectingBackend(MemoryBackend(4 * _PAGE))
    backend = IntegrityBackend(faulty, _PAGE)
    data = random_bytes(4 * _PAGE, 0)
    write(backend, 0, data)
    faulty.add(FaultRule(direction=_READ, nth=1 if low == 0 else 3, short_bytes=short_bytes))
    copy = aligned_bytes(3 * _PAGE)
    completion = start(backend, _READ, low, copy)
    completion.wait()
    assert completion.error is None
    num_bytes = completion.transferred_bytes
    assert num_bytes == 0 or (num_bytes <= short_bytes and (low + num_bytes) % _PAGE == 0)
    assert np.array_equal(copy[:num_bytes], data[low : low + num_bytes])
    assert num_bytes > 0 or low + short_bytes < _PAGE


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (FaultRule(errno=errno.EIO, times=1, direction=_READ), errno.EIO),
        (FaultRule(errno=errno.EAGAIN, times=1, direction=_READ), errno.EAGAIN),
        (FaultRule(short_bytes=7, times=1, direction=_READ), None),
    ],
)
def test_what_goes_wrong_while_a_page_is_read_back_is_the_requests_outcome(
    direction: Direction, rule: FaultRule, expected: int | None
) -> None:
    faulty = FaultInjectingBackend(MemoryBackend(4 * _PAGE))
    backend = IntegrityBackend(faulty, _PAGE)
    write(backend, 0, random_bytes(_PAGE, 0))
    faulty.add(rule)
    completion = start(backend, direction, 100, random_bytes(100, 1))
    completion.wait()
    assert completion.transferred_bytes == 0
    assert (completion.error.errno if completion.error else None) == expected
    completion = start(backend, direction, 100, random_bytes(100, 1))
    completion.require_whole(100)
    assert not _is_damaged(backend, 0, _PAGE)


def test_no_memory_for_what_is_read_back_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = IntegrityBackend(MemoryBackend(4 * _PAGE, 1), _PAGE)
    write(backend, 0, random_bytes(4 * _PAGE, 0))
    regions = iter([AlignedRegion(_PAGE)])

    def allocate(num_bytes: int) -> AlignedRegion:
        for region in regions:
            return region
        raise MemoryError("none left")

    monkeypatch.setattr("swapper.wrappers.integrity.AlignedRegion", allocate)
    error = _outcome(backend, _READ, 100, 2 * _PAGE + 100)  # two pages are read back, one on a worker's thread
    assert error is not None and "MemoryError: none left" in str(error)
    monkeypatch.undo()
    assert not _is_damaged(backend, 0, 4 * _PAGE)
    assert backend.close(5.0)


def test_bits_flipped_on_the_way_are_found_and_the_next_read_is_right() -> None:
    faulty = FaultInjectingBackend(MemoryBackend(4 * _PAGE))
    backend = IntegrityBackend(faulty, _PAGE)
    write(backend, 0, random_bytes(4 * _PAGE, 0))
    # The range, how many pages are read back for it first, and which of all these reads goes wrong.
    for low, high, num_pages in ((0, 4 * _PAGE, 0), (_PAGE, 2 * _PAGE, 0), (5, 10, 1), (100, 3 * ALIGNMENT, 2)):
        for nth in {1, num_pages + 1}:
            for bit in (0, 8 * (high - low) - 1):
                faulty.clear()
                faulty.add(FaultRule(direction=_READ, nth=nth, flipped_bit=bit if nth > num_pages else 8 * _PAGE - 1))
                assert _is_damaged(backend, low, high), (low, high, nth, bit)
                assert not _is_damaged(backend, low, high)


# ------------------------------------------------------------------------------------------------------- settings


def test_pages_respect_the_boundaries_of_the_inner_backend() -> None:
    inner = ManualBackend(1 << 20, boundary_bytes=3 * ALIGNMENT)
    assert IntegrityBackend(inner).page_bytes == ALIGNMENT
    assert IntegrityBackend(inner, boundary_bytes=1 << 20).boundary_bytes == 3 * ALIGNMENT
    inner = ManualBackend(1 << 20)
    assert IntegrityBackend(inner).boundary_bytes == 0
    assert IntegrityBackend(inner, boundary_bytes=1 << 20).boundary_bytes == 1 << 20
    assert IntegrityBackend(inner).page_bytes == PAGE_BYTES
    assert "crc32c of every 65536 bytes over memory" in IntegrityBackend(inner).describe()


@pytest.mark.parametrize("sizes", [{"page_bytes": 0}, {"page_bytes": 100}, {"boundary_bytes": 5000}])
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(sizes))):
        IntegrityBackend(MemoryBackend(_PAGE), **sizes)


def test_slow_checksums_are_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("swapper.wrappers.integrity.is_fast", lambda: False)
    IntegrityBackend(MemoryBackend(_PAGE))
    assert "google-crc32c" in caplog.text


def test_empty_requests_pass() -> None:
    backend, _ = _over_memory()
    empty = aligned_bytes(1)[:0]
    start(backend, _WRITE, 0, empty).require_whole(0)
    start(backend, _READ, 5, empty).require_whole(0)
