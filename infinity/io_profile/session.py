"""The order in which everything is measured, and nothing else.

    fill the files -> check that every backend reads back what was written -> each of fio's engines, to find its best
    -> the sweep, round after round, ours and fio in turns -> the best of ours against the best of fio, in pairs -> copies

Samples of one setting are spread over the rounds, and not taken one after the other: the speed of a drive drifts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from infinity.io_profile.display import Display
from infinity.io_profile.fio import START_SECONDS, Fio, FioFailed, FioJob, FioSample, job_at
from infinity.io_profile.grid import READ_SHARE, WORKLOADS, Effort, Point, point_of, setting_at, size_words
from infinity.io_profile.machine import COPY_BYTES, measure_copies, why_no_copies
from infinity.io_profile.results import AloneRate, Comparison, Results
from swapper.config import BackendName
from swapper.errors import ArgumentError, SwapperError, TransferError, WrongDataError
from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import DriveTest

_GUESSED_RATE = 1.0e9
"""Bytes per second, before anything was measured; for the time left only."""
_OPEN_SECONDS = 0.03
_COPY_SECONDS = 0.3
_PROBE_SECONDS = 0.05
_ALONE_BYTES = 256 << 20


class Step(NamedTuple):
    """One measurement: what is said of it, how long it should take, and what does it; False: there was nothing to do."""

    phase: str
    detail: str
    seconds: float
    run: Callable[[], bool]


class Session:
    """Knows the order of measuring and fills `results`; must not know how they are shown.

    Args:
        effort: how much, and at which points.
        backends: which of ours.
        engines: names of fio's engines; none without fio.
        num_directories: that are measured together.
        results: where everything goes, sample by sample, so that an end at any moment loses nothing.
    """

    def __init__(
        self,
        effort: Effort,
        backends: Sequence[BackendName],
        engines: Sequence[str],
        num_directories: int,
        results: Results,
    ) -> None:
        self._effort = effort
        self._backends = backends
        self._engines = engines
        self._num_directories = num_directories
        self._results = results
        self._num_cores = len(os.sched_getaffinity(0))
        self._is_cut = False  # rounds of the sweep are left out
        # fio's best job for a workload as a phase began: what the phase itself measures does not change it.
        self._best_jobs: dict[tuple[str, Workload], FioJob | None] = {}

    @property
    def seconds(self) -> float:
        """How long all of it should take on a drive of ordinary speed."""
        alone = self._num_directories * self._alone_seconds if self._num_directories > 1 else 0.0
        return alone + sum(step.seconds for step in self._steps())

    def run(self, test: DriveTest, fio: Fio | None, display: Display) -> None:
        """Do everything on the files of `test`.

        Raises:
            WrongDataError: something else was read than was written.
            SwapperError: a drive failed.
        """
        self._test, self._fio, self._display = test, fio, display
        for step in self._steps():
            display.show(step.phase, step.detail)
            (display.advance if step.run() else display.skip)(step.seconds)

    def measure_alone(self, directories: Sequence[Path], display: Display) -> None:
        """What each of several drives does by itself, to see what striping makes of them.

        Raises:
            SwapperError: a drive failed.
        """
        setting = setting_at("threads", max(self._effort.over_depths))
        seconds = self._effort.pair_seconds
        for directory in directories if len(directories) > 1 else ():
            display.show("each drive by itself", str(directory))
            with DriveTest([directory], self._alone_bytes) as test:
                test.prepare()
                read = test.measure(setting, Workload.READ, seconds)
                write = test.measure(setting, Workload.WRITE, seconds)
            self._results.alone.append(AloneRate(str(directory), read.bytes_per_second, write.bytes_per_second))
            self._results.written_bytes += self._alone_bytes + write.write_bytes
            display.advance(self._alone_seconds)

    @property
    def _alone_bytes(self) -> int:
        return min(self._effort.file_bytes, max(_ALONE_BYTES, self._effort.least_file_bytes))

    @property
    def _alone_seconds(self) -> float:
        return 2 * self._effort.pair_seconds + self._alone_bytes / _GUESSED_RATE

    def _steps(self) -> Iterator[Step]:
        effort = self._effort
        pass_seconds = self._num_directories * effort.file_bytes / _GUESSED_RATE
        probe_seconds = len(WORKLOADS) * (_PROBE_SECONDS + _OPEN_SECONDS)
        fio_seconds = effort.sample_seconds + START_SECONDS
        yield Step("writing the test file", "", pass_seconds, self._fill)
        for backend in self._backends:
            check = partial(self._check, backend)
            yield Step("checking what is read back", backend, pass_seconds + probe_seconds, check)
        yield from self._engine_steps("fio: its engines", max(effort.over_depths))
        for number in range(effort.num_repetitions):
            phase = f"sweep, round {number + 1} of {effort.num_repetitions}"
            yield Step(phase, "", 0.0, partial(self._begin_round, number))
            # There and back, so that no setting always follows the same other one.
            turn = -1 if number % 2 else 1
            for point in effort.points[::turn]:
                settings = [each for each in effort.settings(self._backends) if point_of(each) == point]
                for workload in WORKLOADS:
                    for setting in settings[::turn]:
                        words = f"{setting.describe()}, {workload.value}"
                        measure = partial(self._measure, setting, workload)
                        yield Step(phase, words, effort.sample_seconds + _OPEN_SECONDS, measure)
                    if self._engines:
                        yield Step(phase, "fio", fio_seconds, partial(self._measure_fio, point, workload))
        if effort.rechecks_engines:
            # One that was not the best at one setting may be at fio's best one: it gets its chance.
            yield from self._engine_steps("fio: its engines at its best setting", None)
        for number in range(effort.num_pairs if self._engines else 0):
            phase = f"our best against fio's best, pair {number + 1} of {effort.num_pairs}"
            for workload in WORKLOADS:
                pair = partial(self._run_pair, workload, ours_first=number % 2 == 0)
                yield Step(phase, workload.value, 2 * effort.pair_seconds + _OPEN_SECONDS + START_SECONDS, pair)
        if why_no_copies() is None:
            yield Step("copies between host and GPU", "", len(COPY_BYTES) * _COPY_SECONDS, self._copy)

    def _engine_steps(self, phase: str, point: Point | None) -> Iterator[Step]:
        """Each engine at a point, or at that of fio's best job for the workload."""
        for workload in WORKLOADS:
            for engine in [*self._engines] * self._effort.num_engine_trials:
                run = partial(self._try_engine, engine, workload, point)
                yield Step(phase, f"{engine}, {workload.value}", self._effort.sample_seconds + START_SECONDS, run)

    def _fill(self) -> bool:
        wanted_bytes = self._test.num_bytes

        def tell(done_bytes: int, total_bytes: int) -> None:
            self._display.show("writing the test file", f"{100 * done_bytes // total_bytes} %")

        self._test.prepare(tell, max_seconds=self._effort.longest_fill_seconds)
        self._results.written_bytes += self._test.num_bytes
        if self._test.num_bytes < wanted_bytes:
            used, wanted = size_words(self._test.num_bytes), size_words(wanted_bytes)
            self._results.notes.append(f"a slow drive: {used} of the {wanted} of test files are used")
            if self._fio is not None:
                self._fio.use_part(self._test.num_bytes / wanted_bytes)
        return True

    def _check(self, backend: BackendName) -> bool:
        """Write through a backend and read all of it back; also its warm-up."""
        setting = setting_at(backend, self._effort.points_for(backend, self._backends)[0])
        reasons = self._results.backends
        try:
            for workload in WORKLOADS:
                sample = self._test.measure(setting, workload, _PROBE_SECONDS, read_share=READ_SHARE, verify=True)
                self._results.written_bytes += sample.write_bytes
            self._test.verify(setting)
            reasons[backend] = None
        except (WrongDataError, TransferError):
            raise  # the drive's fault, not the backend's absence
        except (SwapperError, ImportError, OSError) as error:
            reasons[backend] = str(error)
        if len(reasons) == len(self._backends) and None not in reasons.values():
            every = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ArgumentError(f"no backend can be used here: {every}")
        return True

    def _best_job(self, phase: str, workload: Workload) -> FioJob | None:
        if (phase, workload) not in self._best_jobs:
            self._best_jobs[phase, workload] = self._results.best_fio(workload)
        return self._best_jobs[phase, workload]

    def _try_engine(self, engine: str, workload: Workload, point: Point | None) -> bool:
        job = self._best_job("its best setting", workload) if point is None else None
        point = job.point if job is not None else point
        if point is None or self._results.engines.get(engine) is not None:
            return False
        return self._run_fio(engine, point, workload)

    def _run_fio(self, engine: str, point: Point, workload: Workload) -> bool:
        job = job_at(engine, point, num_files=self._num_directories, num_cores=self._num_cores)
        sample = self._sample_fio(job, workload, self._effort.sample_seconds)
        if sample is not None:
            self._results.add_fio(sample)
        return True

    def _sample_fio(self, job: FioJob, workload: Workload, seconds: float) -> FioSample | None:
        if self._fio is None:
            return None
        try:
            sample = self._fio.measure(job, workload, seconds)
        except FioFailed as error:
            self._results.engines[job.engine] = str(error)
            return None
        self._results.engines.setdefault(job.engine, None)
        return sample

    def _begin_round(self, number: int) -> bool:
        """Decide whether this round and the others are left out, so that a slow drive does not make it long."""
        effort, display = self._effort, self._display
        limit = math.inf if effort.limit_seconds is None else effort.limit_seconds
        if number and not self._is_cut and display.seconds_passed + display.seconds_left > limit:
            self._is_cut = True
            words = f"{number} of {effort.num_repetitions} rounds of the sweep, to keep it short"
            self._results.notes.append(words)
        return not self._is_cut

    def _measure(self, setting: IOSetting, workload: Workload) -> bool:
        if self._is_cut or self._results.backends[setting.backend] is not None:
            return False
        self._results.add(self._test.measure(setting, workload, self._effort.sample_seconds, read_share=READ_SHARE))
        return True

    def _measure_fio(self, point: Point, workload: Workload) -> bool:
        job = self._best_job("sweep", workload)
        return not self._is_cut and job is not None and self._run_fio(job.engine, point, workload)

    def _run_pair(self, workload: Workload, *, ours_first: bool) -> bool:
        job = self._best_job("pairs", workload)
        # With the same size and depth as fio's, where that costs us nothing.
        setting = self._results.best(workload, near=None if job is None else job.point)
        if setting is None or job is None:
            return False
        comparison = self._results.comparisons.setdefault(workload, Comparison(setting, job))
        seconds = self._effort.pair_seconds
        theirs = None if ours_first else self._sample_fio(job, workload, seconds)
        ours = self._test.measure(setting, workload, seconds, read_share=READ_SHARE)
        self._results.written_bytes += ours.write_bytes
        if ours_first:
            theirs = self._sample_fio(job, workload, seconds)
        if theirs is not None:
            self._results.written_bytes += theirs.written_bytes
            comparison.pairs.append((ours, theirs))
        return True

    def _copy(self) -> bool:
        self._results.copies.extend(measure_copies())
        return True
