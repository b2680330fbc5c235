"""Where a drive slows down, from samples of a drive that is played."""

from __future__ import annotations

import itertools
from typing import cast

import pytest

from infinity.machine import drive_profile
from infinity.machine.drive_profile import DriveProfile, LongRun, Moment, hold
from swapper.measure.measurement import DriveTest, IOSetting, Sample, Workload

_SECONDS = 1e-3
_SETTING = IOSetting("threads", 1 << 20, 4, 8)


class _Drive:
    """Writes at one rate until its cache is full, then at another."""

    def __init__(self, cache_bytes: float, fast: float, slow: float) -> None:
        self.cache_bytes, self.fast, self.slow = cache_bytes, fast, slow
        self.written = 0.0

    def measure(self, setting: IOSetting, workload: Workload, seconds: float) -> Sample:
        rate = self.fast if self.written < self.cache_bytes else self.slow
        self.written += rate * seconds / 2
        return Sample(setting, workload, int(rate * seconds / 2), int(rate * seconds / 2), seconds, 0.0)


def _run(drive: _Drive) -> tuple[LongRun, DriveProfile]:
    profile = DriveProfile([], {_SETTING: [Sample(_SETTING, Workload.MIXED, 1, 1, 1.0, 0.0)]})
    hold(cast(DriveTest, drive), profile, _SECONDS, lambda what, share: None)
    assert profile.long_run is not None
    return profile.long_run, profile


def test_a_drive_that_holds_its_rate_is_told_so() -> None:
    drive = _Drive(1e18, 3e9, 1e9)
    found, profile = _run(drive)
    assert found.fell_at is None and found.rate == pytest.approx(3e9, rel=1e-3)
    written = drive.written / 1e9
    assert f"(±0 %) over {_SECONDS / 60:.1f} minutes and {written:.1f} GB written" in found.words()
    assert len(found.moments) >= 12
    assert profile.written_bytes == pytest.approx(drive.written, rel=1e-3)


def test_where_a_cache_ends_is_found_and_what_to_count_with() -> None:
    drive = _Drive(0.0, 3e9, 1.2e9)
    drive.cache_bytes = 3e9 * _SECONDS / 12 / 2 * 5  # five samples
    found, _ = _run(drive)
    assert found.fell_at.written_bytes == pytest.approx(drive.cache_bytes, rel=0.25)
    assert f"from 3.00 to 1.20 GB/s after {found.fell_at.written_bytes / 1e9:.1f} GB written" in found.words()
    assert f"({found.fell_at.seconds / 60:.1f} minutes)" in found.words() and "cache ends" in found.words()
    assert found.as_json()["bytes_per_second"] == pytest.approx(1.2e9, rel=1e-3)


def test_a_rate_falls_behind_the_last_fast_sample() -> None:
    moments = [Moment(n, n, rate, None) for n, rate in enumerate([3e9, 3e9, 3e9, 3e9, 1e9, 1e9, 1e9, 1e9])]
    assert LongRun(moments).fell_at is moments[3]


def test_a_hot_drive_is_to_be_cooled(monkeypatch: pytest.MonkeyPatch) -> None:
    heat = itertools.chain(range(50, 80, 3), itertools.repeat(83))
    monkeypatch.setattr(drive_profile, "_hottest", lambda drives: next(heat))
    drive = _Drive(0.0, 3e9, 1.2e9)
    drive.cache_bytes = 3e9 * _SECONDS / 12 / 2 * 5
    found, _ = _run(drive)
    assert "from 50 to 83 °C" in found.words() and "Cool it" in found.words()
