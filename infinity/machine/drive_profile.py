"""Measures how fast drives are under the engine's requests, and which settings suit them, for `infinity profile`; and over
minutes, where the write cache of a drive ends, how hot it gets, and the rate that it holds.

[Note: choosing a setting]
Every candidate moves the bytes of an optimizer step, reads and writes at once, for a tenth of a second or so; the best few
compete again, in turns. Among those within 3 % of the fastest, the one that costs the least processor time wins (compute
needs it), and among those that cost about the same, the one with the fewest bytes in flight (they are host memory). Reads
and writes alone are measured with that one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infinity.config import load_config
from infinity.config.batch import ANY_BATCH
from infinity.machine.bandwidth_cache import BandwidthCache, now
from infinity.machine.hardware import HOT_CELSIUS, health
from infinity.plan.machine import Bandwidth
from swapper.config import BackendName
from swapper.errors import ArgumentError, BackendUnavailableError
from swapper.measure.measurement import DriveTest, IOSetting, Sample, Workload
from swapper.measure.speeds import with_speeds
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import describe_drive

Block = dict[str, dict[str, Any]]
"""Keys and values of a config by the block that holds them."""
Progress = Callable[[str, float], None]
"""``progress(what, share)``: what has begun, and how much is done, 0 to 1."""
# Requests in flight occupy staging buffers, which the host memory budget pays for.
_MOST_INFLIGHT_BYTES = 64 << 20
"""On each drive."""
# Candidates are all combinations of these, as far as they fit into `_MOST_INFLIGHT_BYTES`. Example for one drive:
#   threads, 1 MiB, 4 threads: 4 MiB in flight.    threads, 8 MiB, 16 threads: 128 MiB in flight, left out.
#   uring, 2 MiB, depth 8: 8 * 4 = 32 requests, 64 MiB in flight.
_REQUEST_BYTES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
_NUM_THREADS = (4, 8, 16)
_DEPTHS = (2, 4, 8)
"""Requests in flight per thread of the config with io_uring, whose requests keep no thread waiting."""
# Settings that take part in the rounds after the first one.
_NUM_FINALISTS = 4
# See [Note: choosing a setting]: rates within 3 % and processor times within 10 % count as equal.
_SPEED_TIE = 0.03
_CPU_TIE = 0.1
_FREE_SHARE = 0.5
"""Share of the free space that test files may take."""
_LEAST_FILE_BYTES = 64 << 20
"""With less, nothing is measured."""
# Long against the bursts of a drive, short against the minutes of a run. `_LEAST_SAMPLES` keeps the medians below
# meaningful in a short run.
_LONG_SAMPLE_SECONDS = 5.0
_LEAST_SAMPLES = 12
_FALL = 0.1
"""A rate that ends so much below the first ones has fallen; less is noise."""
_IN_MEDIAN = 3
"""Number of samples in a row whose median is compared: a single one may be slow for any reason."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        file_bytes: size of the test file in each directory, at most.
        fill_seconds: a slow drive's test files are cut short after writing for so long.
        sample_seconds: length of one sample.
        num_rounds: all settings take part in the first one, the best few in the others.
    """

    file_bytes: int = 1 << 30
    fill_seconds: float = 60.0
    sample_seconds: float = 0.4
    num_rounds: int = 5


# Half the file and less than half the time of a sample: noisier, and under half a minute.
QUICK = Effort(512 << 20, fill_seconds=15.0, sample_seconds=0.15, num_rounds=3)


@dataclass
class DriveProfile:
    """The samples that were measured so far. An interrupted measurement keeps them."""

    directories: list[Directory]
    samples: dict[IOSetting, list[Sample]] = field(default_factory=dict)
    """Samples of the mix of an optimizer step, in the order of measuring."""
    alone: dict[Workload, Sample] = field(default_factory=dict)
    """Samples of reads alone and of writes alone, with the best setting."""
    unusable: dict[str, str] = field(default_factory=dict)
    """Backends that cannot be used here, and why."""
    written_bytes: int = 0
    is_direct: bool = False
    """Whether transfers bypass the page cache."""
    stopped_by: str | None = None
    """Why it is not complete, in words: there is no advice then."""
    long_run: LongRun | None = None
    """The best setting over minutes, if that was asked for."""

    def stop(self, reason: str) -> None:
        """Record why the measurement is not complete."""
        self.stopped_by = reason

    def rates(self, setting: IOSetting) -> list[float]:
        """Bytes per second of each sample."""
        return [sample.bytes_per_second for sample in self.samples.get(setting, ())]

    def cores_per_gigabyte(self, setting: IOSetting) -> float:
        """Processor seconds for 10^9 bytes."""
        return _cpu_per_byte(_typical(self.samples[setting])) * 1e9

    def advice(self) -> BandwidthCache | None:
        """Return the best setting and its rates; None if the measurement is not complete."""
        if self.stopped_by is not None or not self.samples:
            return None
        # Only settings that took part in every round: the finalists have more samples, and are compared with each
        # other.
        most = max(map(len, self.samples.values()))
        best = choose([_typical(each) for each in self.samples.values() if len(each) == most])
        mixed = best.bytes_per_second
        read, write = (
            self.alone[each].bytes_per_second if each in self.alone else mixed
            # `sweep` asks for advice before it measures these: the mixed rate stands for both until then.
            for each in (Workload.READ, Workload.WRITE)
        )
        if self.long_run is not None and self.long_run.fell_at is not None:
            held = self.long_run.rate / self.long_run.first_rate  # a training takes longer than its cache lasts
            write, mixed = write * held, mixed * held
        return BandwidthCache(best.setting, Bandwidth(read, write, mixed, now()), best.cpu_cores)

    def block(self, setting: IOSetting) -> Block:
        """Return the part of a config that makes the engine use ``setting``."""
        return {
            "aio": {
                "block_size": setting.request_bytes,
                # The inverse of `_resolve_io`, which multiplies the depth by the threads.
                "queue_depth": setting.max_inflight // setting.num_threads,
                "intra_op_parallelism": setting.num_threads,
            },
            "infinity": {"io_backend": setting.backend, "direct_io": self.is_direct},
        }


def default_setting() -> IOSetting:
    """Return the setting of an engine whose config has none, if io_uring is not faster."""
    io = load_config(ANY_BATCH, check_storage=False).io
    # `candidates` may not contain the defaults; `settings_for` adds them, so that the report can compare.
    return IOSetting("threads", io.request_bytes, io.num_threads, io.max_inflight)


def candidates(backends: Sequence[BackendName], num_drives: int = 1) -> list[IOSetting]:
    """Return the settings to try, those with few bytes in flight first.

    Args:
        backends: those that may work.
        num_drives: how many directories share the work.
    """
    # Setting -> bytes in flight on all drives.
    found: dict[IOSetting, int] = {}
    for backend, request_bytes in itertools.product(backends, _REQUEST_BYTES):
        if backend == "uring":
            for depth in _DEPTHS:
                setting = IOSetting(backend, request_bytes, _NUM_THREADS[0], depth * num_drives * _NUM_THREADS[0])
                found[setting] = setting.bytes_inflight
        else:
            # Each drive has threads of its own; a few requests in hand bridge the time until its turn comes again.
            depth = 1 if num_drives == 1 else 2 * num_drives
            for num_threads in _NUM_THREADS:
                setting = IOSetting(backend, request_bytes, num_threads, depth * num_threads)
                found[setting] = setting.bytes_inflight * num_drives
    # A dict drops settings that two combinations give. Those with few bytes come first, as in the tie-break.
    ordered = sorted(found, key=lambda setting: (found[setting], setting.backend, setting.request_bytes))
    return [each for each in ordered if found[each] <= _MOST_INFLIGHT_BYTES * num_drives]


def choose(samples: Sequence[Sample]) -> Sample:
    """Return the best of some samples of one workload, see [Note: choosing a setting]."""
    fastest = max(sample.bytes_per_second for sample in samples)
    tied = [sample for sample in samples if sample.bytes_per_second >= (1 - _SPEED_TIE) * fastest]
    cheapest = min(map(_cpu_per_byte, tied))
    tied = [sample for sample in tied if _cpu_per_byte(sample) <= (1 + _CPU_TIE) * cheapest]
    return min(tied, key=lambda sample: (sample.setting.bytes_inflight, -sample.bytes_per_second))


def _cpu_per_byte(sample: Sample) -> float:
    return sample.cpu_seconds / sample.num_bytes


def _typical(samples: Sequence[Sample]) -> Sample:
    """Return one sample at the median rate, with the mean processor time per byte."""
    # The median rate ignores an outlier. Processor time per byte is that of all samples together.
    rate = statistics.median(sample.bytes_per_second for sample in samples)
    read, written = sum(each.read_bytes for each in samples), sum(each.write_bytes for each in samples)
    cpu_seconds = sum(sample.cpu_seconds for sample in samples)
    return Sample(samples[0].setting, samples[0].workload, read, written, (read + written) / rate, cpu_seconds)


def settings_for(directories: Sequence[Directory]) -> list[IOSetting]:
    """Return the settings that a profile measures: all candidates, and the default."""
    # aiofiles is the backend for network file systems.
    is_network = any(describe_drive(directory.path).is_network for directory in directories)
    backends: tuple[BackendName, ...] = ("aiofiles", "threads") if is_network else ("threads", "uring")
    return list(dict.fromkeys([*candidates(backends, len(directories)), default_setting()]))


@contextlib.contextmanager
def drive_test(found: DriveProfile, effort: Effort) -> Iterator[DriveTest]:
    """Open test files in the directories. They have no name, so they vanish with the process.

    Raises:
        RuntimeError: there is too little space.
        VolumeError: a directory cannot be used.
    """
    directories, file_bytes = _test_space(found.directories, effort.file_bytes)
    # Measures each drive by itself, so that stripes of the test have the proportions of a training's.
    directories = with_speeds(directories, file_bytes * len(directories), direct=True)
    with DriveTest(directories, file_bytes) as test:
        found.is_direct = test.is_direct
        yield test


def sweep(
    test: DriveTest,
    found: DriveProfile,
    effort: Effort,
    settings: Sequence[IOSetting],
    progress: Progress = lambda what, share: None,
) -> None:
    """Fill the files, and measure every setting, round after round: the speed of a drive drifts.

    Raises:
        SwapperError: a drive failed, or no backend can be used.
    """
    progress("writing the test files", 0.0)
    # The first write to a block is slower, and reads of a hole are no reads of the drive.
    test.prepare(max_seconds=effort.fill_seconds)
    found.written_bytes += test.num_bytes
    tried = list(settings)
    for number in range(effort.num_rounds):
        # There and back, so that no setting always follows the same other one.
        for place, setting in enumerate(tried[:: -1 if number % 2 else 1]):
            progress(f"round {number + 1} of {effort.num_rounds}", (number + place / len(tried)) / effort.num_rounds)
            _add(test, found, setting, effort.sample_seconds)
        tried = sorted(found.samples, key=lambda each: -statistics.median(found.rates(each)))[:_NUM_FINALISTS]
    if not found.samples:
        every = "; ".join(f"{name}: {reason}" for name, reason in found.unusable.items())
        raise ArgumentError(f"no backend can be used here: {every or 'the test files are too small'}")
    if (best := found.advice()) is None:
        return
    # Half as long again as a sample of the mix: there is one of each only.
    for workload in (Workload.READ, Workload.WRITE):
        sample = test.measure(best.setting, workload, 1.5 * effort.sample_seconds)
        found.alone[workload] = sample
        found.written_bytes += sample.write_bytes


def _add(test: DriveTest, found: DriveProfile, setting: IOSetting, seconds: float) -> None:
    # One failure to open a backend is enough: the kernel or the container forbids it.
    if setting.backend in found.unusable:
        return
    try:
        sample = test.measure(setting, Workload.MIXED, seconds)
        found.samples.setdefault(setting, []).append(sample)
        found.written_bytes += sample.write_bytes
    except BackendUnavailableError as error:
        found.unusable[setting.backend] = str(error)
    except ArgumentError:
        pass  # the files are too small for so many bytes in flight


def _test_space(directories: Sequence[Directory], file_bytes: int) -> tuple[list[Directory], int]:
    """Return the directories with the space that a test may use in each, and the size of the files.

    Raises:
        RuntimeError: there is too little.
    """
    drives = [describe_drive(directory.path) for directory in directories]
    numbers = [drive.device_number for drive in drives]
    rooms = []
    for directory, drive in zip(directories, drives, strict=True):
        # A file system that says 0 bytes has no limit.
        free = drive.free_bytes if drive.total_bytes else math.inf
        # Directories on one drive share its free space.
        room = min(file_bytes, free * _FREE_SHARE / numbers.count(drive.device_number))
        room = min(room, directory.capacity_bytes or math.inf)
        if room < _LEAST_FILE_BYTES:
            raise RuntimeError(
                f"a test in {directory.path} may take {int(room)} bytes (a part of {_FREE_SHARE:g} of what is free there), and "
                f"{_LEAST_FILE_BYTES} are needed; free some space"
            )
        rooms.append(int(room))
    limited = [replace(directory, capacity_bytes=room) for directory, room in zip(directories, rooms, strict=True)]
    # A drive that is much faster than the others gets nearly all stripes, so each directory has to have room for all
    # files together.
    return limited, min(rooms) // len(rooms)


# --------------------------------------------------------------------------------------------------------- over minutes


@dataclass(frozen=True)
class Moment:
    """One sample of a long run.

    Attributes:
        seconds: Since its begin, at the sample's end.
        written_bytes: Since its begin.
        bytes_per_second: Of the sample, both directions.
        celsius: Of the hottest drive; None if none tells.
    """

    seconds: float
    written_bytes: int
    bytes_per_second: float
    celsius: float | None


@dataclass
class LongRun:
    """Samples of a drive under the mix of reads and writes of an optimizer step."""

    moments: list[Moment] = field(default_factory=list)

    @property
    def _rates(self) -> list[float]:
        return [each.bytes_per_second for each in self.moments]

    @property
    def first_rate(self) -> float:
        """Bytes per second at the beginning."""
        # The cache of the drive still takes all writes.
        return statistics.median(self._rates[:_IN_MEDIAN])

    @property
    def rate(self) -> float:
        """Bytes per second that it holds: the median of the last quarter."""
        return statistics.median(self._rates[-max(_IN_MEDIAN, len(self.moments) // 4) :])

    @property
    def fell_at(self) -> Moment | None:
        """The last sample before the rate falls; None if it does not fall."""
        if self.rate > (1 - _FALL) * self.first_rate:
            return None
        # The first place whose median of three is below the middle of both rates. Example: rates 3, 3, 3, 3, 1, 1, 1,
        # ... have the middle 2. At n = 3 the samples 3, 1, 1 have the median 1: moment 3 is the last fast one.
        middle, rates = (self.first_rate + self.rate) / 2, self._rates
        slow = (n for n in range(len(rates)) if statistics.median(rates[n : n + _IN_MEDIAN]) < middle)
        return self.moments[next(slow)]

    def words(self) -> str:
        """Describe the result, and what to do."""
        end = self.moments[-1]
        heat = [each.celsius for each in self.moments if each.celsius is not None]
        warmth = f" It went from {heat[0]:.0f} to {max(heat):.0f} °C." if heat else ""
        fall = self.fell_at
        if fall is None:
            spread = 50 * (max(self._rates) - min(self._rates)) / self.rate
            return (
                f"It holds {self.rate / 1e9:.2f} GB/s (±{spread:.0f} %) over {end.seconds / 60:.1f} minutes and "
                f"{end.written_bytes / 1e9:.1f} GB written.{warmth}"
            )
        text = (
            f"It slows down from {self.first_rate / 1e9:.2f} to {self.rate / 1e9:.2f} GB/s after "
            f"{fall.written_bytes / 1e9:.1f} GB written ({fall.seconds / 60:.1f} minutes)"
        )
        # Heat explains a fall as well as the end of a cache does, and can be cured.
        if heat and max(heat) >= HOT_CELSIUS:
            return f"{text}, hot.{warmth} Cool it (heat sink, air flow) and measure again. Plans take the lower rate."
        return (
            f"{text}: its cache ends there.{warmth} Plans take the lower rate. More free space keeps such a cache large; "
            "drives for servers have none; a second drive doubles the rate."
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        fall = self.fell_at
        return {
            "first_bytes_per_second": self.first_rate,
            "bytes_per_second": self.rate,
            "fell_after_bytes": None if fall is None else fall.written_bytes,
            "moments": [vars(each) for each in self.moments],
        }


def hold(test: DriveTest, found: DriveProfile, seconds: float, progress: Progress) -> None:
    """Run the best setting of a `sweep` for ``seconds``, and at least twelve samples: which rate does the drive hold?

    Raises:
        SwapperError: a drive failed.
    """
    best = found.advice()
    if best is None:
        return
    drives = [drive for each in found.directories if (drive := describe_drive(each.path).device) is not None]
    run, length = LongRun(), min(_LONG_SAMPLE_SECONDS, seconds / _LEAST_SAMPLES)
    began, written = time.monotonic(), 0
    while len(run.moments) < _LEAST_SAMPLES or time.monotonic() - began < seconds:
        sample = test.measure(best.setting, Workload.MIXED, length)
        found.written_bytes += sample.write_bytes
        written += sample.write_bytes
        passed = time.monotonic() - began
        run.moments.append(Moment(passed, written, sample.bytes_per_second, _hottest(drives)))
        told = f"{written / 1e9:.0f} GB written, {sample.bytes_per_second / 1e9:.2f} GB/s"
        progress(told, min(1.0, passed / seconds))
    found.long_run = run


def _hottest(drives: Sequence[str]) -> float | None:
    """Temperature of the hottest drive; None if none reports it."""
    return max((celsius for drive in drives if (celsius := health(drive).celsius) is not None), default=None)
