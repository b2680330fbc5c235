"""The order in which everything is measured, and nothing else.

    fill the files -> check that every backend reads back what was written -> each of fio's engines, to find its best
    -> the sweep, round after round, ours and fio in turns -> the best of ours against the best of fio, in pairs -> copies

Samples of one setting are spread over the rounds, and not taken one after the other: the speed of a drive drifts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swapper.config import BackendName
from swapper.errors import ArgumentError, SwapperError, TransferError, WrongDataError
from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import DriveTest

from .copies import SIZES, measure_copies
from .copies import why_not as why_no_copies
from .display import Display
from .effort import Effort
from .fio import START_SECONDS, Fio, FioFailed, FioJob, FioSample, job_at
from .grid import WORKLOADS, Grid, Point, point_of, setting_at, size_words
from .results import AloneRate, Comparison, Results

_GUESSED_RATE = 1.0e9
"""Bytes per second, before anything was measured; for the time left only."""
_OPEN_SECONDS = 0.03
_COPY_SECONDS = 0.3
_PROBE_SECONDS = 0.05
_ALONE_BYTES = 256 << 20


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        effort: how much.
        grid: at which points.
        backends: which of ours.
        engines: names of fio's engines; none without fio.
        read_share: of the mixed workload.
    """

    effort: Effort
    grid: Grid
    backends: tuple[BackendName, ...]
    engines: tuple[str, ...]
    read_share: float

    @property
    def fill_seconds(self) -> float:
        return self.effort.file_bytes / _GUESSED_RATE

    @property
    def check_seconds(self) -> float:
        return self.fill_seconds + len(WORKLOADS) * (_PROBE_SECONDS + _OPEN_SECONDS)

    @property
    def sample_seconds(self) -> float:
        return self.effort.sample_seconds + _OPEN_SECONDS

    @property
    def fio_seconds(self) -> float:
        return self.effort.sample_seconds + START_SECONDS

    @property
    def pair_seconds(self) -> float:
        return 2 * self.effort.pair_seconds + _OPEN_SECONDS + START_SECONDS

    @property
    def round_seconds(self) -> float:
        """Of the sweep."""
        one = len(self.grid.settings(self.backends)) * self.sample_seconds
        if self.engines:
            one += len(self.grid.points) * self.fio_seconds
        return len(WORKLOADS) * one

    @property
    def alone_bytes(self) -> int:
        """Of the file on which a drive is measured by itself."""
        return min(self.effort.file_bytes, max(_ALONE_BYTES, self.grid.least_file_bytes))

    @property
    def alone_seconds(self) -> float:
        return 2 * self.effort.pair_seconds + self.alone_bytes / _GUESSED_RATE

    def total_seconds(self, num_directories: int) -> float:
        """How long all of it should take on a drive of ordinary speed."""
        effort, num_workloads = self.effort, len(WORKLOADS)
        total = num_directories * (self.fill_seconds + len(self.backends) * self.check_seconds)
        if num_directories > 1:
            total += num_directories * self.alone_seconds
        total += effort.num_repetitions * self.round_seconds
        if self.engines:
            trials = effort.num_engine_trials * (1 + effort.rechecks_engines) * len(self.engines)
            total += num_workloads * (trials * self.fio_seconds + effort.num_pairs * self.pair_seconds)
        if why_no_copies() is None:
            total += len(SIZES) * _COPY_SECONDS
        return total


class Session:
    """Knows the order of measuring and fills `results`; must not know how they are shown.

    Args:
        plan: what to do.
        results: where everything goes, sample by sample, so that an end at any moment loses nothing.
        display: is told what is being done.
    """

    def __init__(self, plan: Plan, results: Results, display: Display) -> None:
        self._plan = plan
        self._results = results
        self._display = display
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def run(self, test: DriveTest, fio: Fio | None) -> None:
        """Do everything on the files of `test`.

        Raises:
            WrongDataError: something else was read than was written.
            SwapperError: a drive failed.
        """
        part = self._fill(test)
        if fio is not None and part < 1:
            fio.use_part(part)
        backends = self._check(test)
        engines = {} if fio is None else self._try_engines(fio)
        self._sweep(test, fio, backends, engines)
        if fio is not None:
            self._recheck_engines(fio)
            self._compare(test, fio)
        self._copy()

    def measure_alone(self, directories: Sequence[Path]) -> None:
        """What each of several drives does by itself, to see what striping makes of them.

        Raises:
            SwapperError: a drive failed.
        """
        if len(directories) == 1:
            return
        self._display.phase("each drive by itself")
        num_bytes = self._plan.alone_bytes
        setting = setting_at("threads", max(self._plan.grid.over_depths))
        for directory in directories:
            with DriveTest([directory], num_bytes) as test:
                test.prepare()
                seconds = self._plan.effort.pair_seconds
                read = test.measure(setting, Workload.READ, seconds)
                write = test.measure(setting, Workload.WRITE, seconds)
            self._results.alone.append(AloneRate(str(directory), read.bytes_per_second, write.bytes_per_second))
            self._results.written_bytes += num_bytes + write.write_bytes
            self._display.advance(self._plan.alone_seconds, str(directory))

    def _fill(self, test: DriveTest) -> float:
        """Write the files. Returns the part of them that could be written in the time there is."""
        self._display.phase("writing the test file")
        share = self._plan.fill_seconds * len(test.paths)
        wanted_bytes, told = test.num_bytes, 0.0

        def tell(done_bytes: int, total_bytes: int) -> None:
            nonlocal told
            if done_bytes / total_bytes - told >= 0.05:
                self._display.advance(share * (done_bytes / total_bytes - told))
                told = done_bytes / total_bytes

        test.prepare(tell, max_seconds=self._plan.effort.longest_fill_seconds)
        self._display.advance(share * (1 - told))
        self._results.written_bytes += test.num_bytes
        if test.num_bytes < wanted_bytes:
            self._results.notes.append(
                f"a slow drive: {size_words(test.num_bytes)} of the {size_words(wanted_bytes)} of test files are used"
            )
        return test.num_bytes / wanted_bytes

    def _check(self, test: DriveTest) -> list[BackendName]:
        """Write through every backend and read all of it back; also its warm-up. Returns those that work here."""
        usable: list[BackendName] = []
        self._display.phase("checking what is read back")
        for backend in self._plan.backends:
            expected = self._plan.check_seconds * len(test.paths)
            setting = setting_at(backend, self._plan.grid.points_for(backend, self._plan.backends)[0])
            try:
                for workload in WORKLOADS:
                    sample = test.measure(
                        setting, workload, _PROBE_SECONDS, read_share=self._plan.read_share, verify=True
                    )
                    self._results.written_bytes += sample.write_bytes
                test.verify(setting)
            except (WrongDataError, TransferError):
                raise  # the drive's fault, not the backend's absence
            except (SwapperError, ImportError, OSError) as error:
                self._results.backends[backend] = str(error)
            else:
                self._results.backends[backend] = None
                self._results.verified.append(backend)
                usable.append(backend)
            self._display.advance(expected, backend)
        for backend in set(self._plan.backends) - set(usable):
            missing = len(self._plan.grid.points_for(backend, self._plan.backends)) * self._plan.sample_seconds
            self._display.skip(missing * len(WORKLOADS) * self._plan.effort.num_repetitions)
        if not usable:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._results.backends.items())
            raise ArgumentError(f"no backend can be used here: {reasons}")
        return usable

    def _try_engines(self, fio: Fio) -> dict[Workload, str]:
        """The fastest of fio's engines for each workload; those that do not work here are noted."""
        point = max(self._plan.grid.over_depths)
        best: dict[Workload, str] = {}
        for workload in WORKLOADS:
            self._display.phase("fio: its engines")
            self._run_engines(fio, workload, point, self._plan.effort.num_engine_trials)
            job = self._results.best_fio(workload)
            if job is not None:
                best[workload] = job.engine
        return best

    def _run_engines(self, fio: Fio, workload: Workload, point: Point, num_trials: int) -> None:
        for _ in range(num_trials):
            for engine in self._plan.engines:
                if self._results.engines.get(engine) is None:
                    self._run_fio(fio, self._job_at(fio, engine, point), workload)
                self._display.advance(self._plan.fio_seconds, f"{engine}, {workload.value}")

    def _job_at(self, fio: Fio, engine: str, point: Point) -> FioJob:
        return job_at(engine, point, num_files=fio.num_files, num_cores=self._num_cores)

    def _run_fio(self, fio: Fio, job: FioJob, workload: Workload) -> None:
        try:
            self._results.add_fio(fio.measure(job, workload, self._plan.effort.sample_seconds))
        except FioFailed as error:
            self._results.engines[job.engine] = str(error)
        else:
            self._results.engines.setdefault(job.engine, None)

    def _sweep(
        self, test: DriveTest, fio: Fio | None, backends: Sequence[BackendName], jobs: dict[Workload, str]
    ) -> None:
        effort = self._plan.effort
        for repetition in range(effort.num_repetitions):
            if self._is_late(repetition):
                return
            self._display.phase(f"sweep, round {repetition + 1} of {effort.num_repetitions}")
            # There and back, so that no setting always follows the same other one.
            turn = -1 if repetition % 2 else 1
            for point in self._plan.grid.points[::turn]:
                settings = [each for each in self._plan.grid.settings(backends) if point_of(each) == point]
                for workload in WORKLOADS:
                    for setting in settings[::turn]:
                        self._measure(test, setting, workload)
                    if fio is not None:
                        if workload in jobs:
                            self._run_fio(fio, self._job_at(fio, jobs[workload], point), workload)
                        self._display.advance(self._plan.fio_seconds, "fio")

    def _is_late(self, num_done: int) -> bool:
        """Whether the other rounds are left out, so that a slow drive does not make it long."""
        effort, display = self._plan.effort, self._display
        if not num_done or effort.limit_seconds is None:
            return False
        if display.seconds_passed + display.seconds_left <= effort.limit_seconds:
            return False
        display.skip((effort.num_repetitions - num_done) * self._plan.round_seconds)
        self._results.notes.append(f"{num_done} of {effort.num_repetitions} rounds of the sweep, to keep it short")
        return True

    def _measure(self, test: DriveTest, setting: IOSetting, workload: Workload) -> None:
        sample = test.measure(setting, workload, self._plan.effort.sample_seconds, read_share=self._plan.read_share)
        self._results.add(sample)
        self._display.advance(self._plan.sample_seconds, f"{setting.describe()}, {workload.value}")

    def _recheck_engines(self, fio: Fio) -> None:
        """An engine that was not the best at one setting may be at fio's best one: it gets its chance."""
        effort = self._plan.effort
        if not effort.rechecks_engines:
            return
        for workload in WORKLOADS:
            self._display.phase("fio: its engines at its best setting")
            job = self._results.best_fio(workload)
            if job is not None:
                self._run_engines(fio, workload, job.point, effort.num_engine_trials)

    def _compare(self, test: DriveTest, fio: Fio) -> None:
        effort = self._plan.effort
        for workload in WORKLOADS:
            job = self._results.best_fio(workload)
            # With the same size and depth as fio's, where that costs us nothing.
            setting = self._results.best(workload, near=None if job is None else job.point)
            if setting is None or job is None:
                self._display.skip(effort.num_pairs * self._plan.pair_seconds)
                continue
            self._results.comparisons[workload] = Comparison(workload, setting, job)
        for number in range(effort.num_pairs):
            self._display.phase(f"our best against fio's best, pair {number + 1} of {effort.num_pairs}")
            for comparison in self._results.comparisons.values():
                self._run_pair(test, fio, comparison, ours_first=number % 2 == 0)
                self._display.advance(self._plan.pair_seconds, comparison.workload.value)

    def _run_pair(self, test: DriveTest, fio: Fio, comparison: Comparison, *, ours_first: bool) -> None:
        seconds, workload = self._plan.effort.pair_seconds, comparison.workload
        theirs = None if ours_first else self._fio_of_pair(fio, comparison)
        ours = test.measure(comparison.setting, workload, seconds, read_share=self._plan.read_share)
        self._results.written_bytes += ours.write_bytes
        if ours_first:
            theirs = self._fio_of_pair(fio, comparison)
        if theirs is not None:
            self._results.written_bytes += theirs.written_bytes
            comparison.pairs.append((ours, theirs))

    def _fio_of_pair(self, fio: Fio, comparison: Comparison) -> FioSample | None:
        try:
            return fio.measure(comparison.job, comparison.workload, self._plan.effort.pair_seconds)
        except FioFailed as error:
            self._results.engines[comparison.job.engine] = str(error)
            return None

    def _copy(self) -> None:
        if why_no_copies() is None:
            self._display.phase("copies between host and GPU")
            for sample in measure_copies():
                self._results.copies.append(sample)
                self._display.advance(_COPY_SECONDS)
