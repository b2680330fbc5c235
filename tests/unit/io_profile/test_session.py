"""The order of measuring; drives and fio are played here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from infinity.io_profile.display import Display
from infinity.io_profile.fio import FioFailed, FioJob, FioSample
from infinity.io_profile.grid import LEAST_PAIRS, QUICK, WORKLOADS, Effort
from infinity.io_profile.results import Results
from infinity.io_profile.session import Session
from swapper.errors import ArgumentError, WrongDataError
from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import Sample

_MIB = 1 << 20
_SMALL = replace(QUICK, request_sizes=(_MIB, 4 * _MIB), depths=(4, 8))


class PlayedDrive:
    """Answers like a `DriveTest`, at once."""

    def __init__(self, log: list[str], errors: dict[str, Exception] | None = None) -> None:
        self.paths = ["/proc/self/fd/0"]
        self.num_bytes = 1 << 30
        self._log = log
        self._errors = errors or {}
        self.filled_bytes = self.num_bytes

    def prepare(self, progress: Callable[[int, int], None], *, max_seconds: float) -> None:
        progress(self.filled_bytes, self.num_bytes)
        self.num_bytes = self.filled_bytes

    def verify(self, setting: IOSetting) -> None:
        if error := self._errors.get(f"verify {setting.backend}"):
            raise error

    def measure(self, setting: IOSetting, workload: Workload, seconds: float, **_: object) -> Sample:
        if error := self._errors.get(setting.backend):
            raise error
        self._log.append(f"ours {workload.value}")
        return Sample(setting, workload, 10**9, 10**8, seconds, 0.01)


class PlayedFio:
    """Answers like a `Fio`."""

    num_files = 1

    def __init__(self, log: list[str], broken: str = "", interrupt_after: int | None = None) -> None:
        self._log = log
        self._broken = broken
        self._left = interrupt_after
        self.part = 1.0
        self.num_failures = 0

    def use_part(self, part: float) -> None:
        self.part = part

    def measure(self, job: FioJob, workload: Workload, seconds: float) -> FioSample:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        if job.engine == self._broken:
            self.num_failures += 1
            raise FioFailed("Operation not permitted")
        self._log.append(f"fio {workload.value}")
        return FioSample(job, workload, 1e9 if job.engine == "libaio" else 0.5e9, 0.0, 0, 0.1)


def play(
    drive: PlayedDrive,
    fio: PlayedFio | None,
    results: Results,
    backends: tuple[Any, ...] = ("threads", "uring"),
    effort: Effort = _SMALL,
) -> None:
    """A whole session."""
    engines = ("psync", "libaio", "io_uring") if fio is not None else ()
    session = Session(effort, backends, engines, 1, results)
    session.run(drive, fio, Display(Console(quiet=True), session.seconds, results.notes))  # type: ignore[arg-type]


def fresh() -> Results:
    return Results(request_sizes=(_MIB, 4 * _MIB))


def test_everything_is_measured_in_turns() -> None:
    log: list[str] = []
    results = fresh()
    play(PlayedDrive(log), PlayedFio(log), results)
    assert results.backends == {"threads": None, "uring": None}
    assert results.verified == ["threads", "uring"]
    settings = _SMALL.settings(("threads", "uring"))
    for setting, workload in itertools.product(settings, WORKLOADS):
        assert len(results.ours[setting, workload]) == QUICK.num_repetitions
        assert results.share_of_fio(setting, workload) is not None
    for comparison in results.comparisons.values():
        assert comparison.job.engine == "libaio"
        assert len(comparison.pairs) == LEAST_PAIRS
    # The pairs come last: three workloads each, and who begins changes from pair to pair.
    pairs = [each.split()[0] for each in log[-LEAST_PAIRS * 6 :]]
    assert pairs[:6] == ["ours", "fio"] * 3
    assert pairs[6:12] == ["fio", "ours"] * 3


def test_without_fio_the_sweep_is_the_same() -> None:
    results = fresh()
    play(PlayedDrive([]), None, results)
    assert results.fio == {} == results.comparisons
    assert len(results.ours) == len(WORKLOADS) * len(_SMALL.settings(("threads", "uring")))


def test_an_interruption_loses_nothing() -> None:
    results, log = fresh(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        play(PlayedDrive(log), PlayedFio(log, interrupt_after=15), results)
    assert results.ours
    assert results.fio


def test_an_engine_that_is_missing_is_listed_and_tried_no_more() -> None:
    results, log = fresh(), list[str]()
    fio = PlayedFio(log, broken="io_uring")
    play(PlayedDrive(log), fio, results)
    assert fio.num_failures == 1
    assert results.engines == {"psync": None, "libaio": None, "io_uring": "Operation not permitted"}
    assert all(len(comparison.pairs) == LEAST_PAIRS for comparison in results.comparisons.values())


def test_a_fio_that_can_do_nothing_does_not_end_the_sweep() -> None:
    results, log = fresh(), list[str]()
    fio = PlayedFio(log)
    fio.measure = lambda *_: (_ for _ in ()).throw(FioFailed("broken"))  # type: ignore[method-assign]
    play(PlayedDrive(log), fio, results)
    assert results.comparisons == {}
    assert len(results.ours) == len(WORKLOADS) * len(_SMALL.settings(("threads", "uring")))


def test_a_backend_that_is_missing_is_listed() -> None:
    results = fresh()
    play(PlayedDrive([], {"uring": ArgumentError("the kernel forbids io_uring")}), None, results)
    assert results.backends == {"threads": None, "uring": "the kernel forbids io_uring"}
    assert {setting.backend for setting in results.settings} == {"threads"}


def test_no_backend_at_all_is_an_error_with_the_reasons() -> None:
    errors: dict[str, Exception] = {name: ArgumentError(f"no {name}") for name in ("threads", "uring")}
    with pytest.raises(ArgumentError, match=r"threads: no threads; uring: no uring"):
        play(PlayedDrive([], errors), None, fresh())


def test_wrong_data_end_it() -> None:
    error = WrongDataError.__new__(WrongDataError)
    Exception.__init__(error, "byte 4096 of the scratch file")
    with pytest.raises(WrongDataError, match="4096"):
        play(PlayedDrive([], {"verify uring": error}), None, fresh())


def test_a_slow_drive_is_measured_on_what_could_be_written() -> None:
    results, log = fresh(), list[str]()
    drive, fio = PlayedDrive(log), PlayedFio(log)
    drive.filled_bytes = drive.num_bytes // 4
    play(drive, fio, results)
    assert fio.part == 0.25
    assert any("256 MiB of the 1 GiB" in note for note in results.notes)


def test_rounds_are_left_out_where_they_would_take_too_long() -> None:
    results = fresh()
    play(PlayedDrive([]), None, results, ("threads",), replace(_SMALL, num_repetitions=5, limit_seconds=0.0))
    assert {len(samples) for samples in results.ours.values()} == {1}
    assert any("1 of 5 rounds" in note for note in results.notes)
