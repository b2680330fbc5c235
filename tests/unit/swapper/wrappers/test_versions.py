"""Versions: what is not written again of a block stays as it was, whatever becomes of reading it."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from swapper import ALIGNMENT, Swapper, SwapperConfig
from swapper.backend import Direction
from swapper.backends.memory import MemoryBackend
from swapper.errors import ArgumentError
from swapper.wrappers import versions
from swapper.wrappers.versions import VersionedBackend
from tests.faults import FaultInjectingBackend, FaultRule


@pytest.mark.parametrize(
    "fault", [{"short_bytes": 0}, {"short_bytes": 50}, {"errno": errno.EAGAIN}], ids=["nothing", "a part", "an error"]
)
def test_a_short_read_of_what_stays_is_made_again(fault: dict[str, int]) -> None:
    rule = FaultRule(direction=Direction.READ, nth=1, **fault)  # type: ignore[arg-type]
    faulty = FaultInjectingBackend(MemoryBackend(1 << 20), [rule])
    with Swapper(VersionedBackend(faulty, 1 << 18), SwapperConfig()) as swapper:
        extent = swapper.allocate(ALIGNMENT, "x")
        swapper.write(extent, np.full(ALIGNMENT, 1, dtype=np.uint8)).wait()
        swapper.write(extent, np.full(100, 2, dtype=np.uint8)).wait()
        found = np.zeros(ALIGNMENT, dtype=np.uint8)
        swapper.read(extent, found).wait()
        assert faulty.num_faults == 1 and swapper.statistics().num_retries == 1
        assert found.tolist() == [2] * 100 + [1] * (ALIGNMENT - 100)


def test_a_volume_with_more_slots_than_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions._MOST_BYTES == 16 << 40  # 32 bits for a number, 4 KiB a slot
    monkeypatch.setattr(versions, "_MOST_BYTES", 1 << 20)
    with pytest.raises(ArgumentError, match=r"durable volume has less than .* Keep fewer commits"):
        VersionedBackend(MemoryBackend(1 << 20), 1 << 18)
