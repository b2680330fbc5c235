"""The integrity wrapper: no damage passes, nothing else is called damage, whatever ranges are written and read."""

from __future__ import annotations

import errno
import logging
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from swapper import ALIGNMENT
from swapper.backend import CorruptedDataError, Direction, IOBackend
from swapper.backends.memory import MemoryBackend
from swapper.backends.threads import ThreadsBackend
from swapper.errors import ArgumentError
from swapper.volumes.volume import Volume
from swapper.wrappers.checksum import crc32c, is_fast
from swapper.wrappers.integrity import IntegrityBackend
from tests.conformance.suite import aligned_bytes, random_bytes, read, start, write
from tests.faults import FaultInjectingBackend, FaultRule
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


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("sizes", [{"page_bytes": 0}, {"page_bytes": 100}, {"boundary_bytes": 5000}])
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(sizes))):
        IntegrityBackend(MemoryBackend(_PAGE), **sizes)
