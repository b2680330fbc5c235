"""How fast drives are under the engine's requests, and which settings suit them: for a profile and `autotune_io`.

[Note: choosing a setting]
Every candidate moves the bytes of an optimizer step, reads and writes at once, for a tenth of a second or so; the best few
compete again, in turns. Among those within 3 % of the fastest, the one that costs the least processor time wins (compute
needs it), and among those that cost about the same, the one with the fewest bytes in flight (they are host memory).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infinity.config import load_config
from infinity.config.resolved import IOSection
from infinity.errors import ConfigError
from infinity.machine.bandwidth_cache import BandwidthCache, now
from infinity.machine.hardware import health
from infinity.machine.long_run import LongRun, hold
from infinity.plan.machine import Bandwidth
from swapper.config import BackendName
from swapper.errors import (
    ArgumentError,
    BackendUnavailableError,
    SwapperError,
    TransferError,
    VolumeError,
    WrongDataError,
)
from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import DriveTest, Sample
from swapper.measure.speeds import with_speeds
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import describe_drive

Block = dict[str, dict[str, Any]]
"""Keys and values of a config by the block that holds them."""
Progress = Callable[[str, float], None]
"""``progress(what, share)``: what has begun, and how much is done, 0 to 1."""
WORKLOADS = (Workload.READ, Workload.WRITE, Workload.MIXED)
MOST_INFLIGHT_BYTES = 64 << 20
"""On each drive, unless the config leaves no choice."""
_REQUEST_BYTES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
_NUM_THREADS = (4, 8, 16)
_MAX_INFLIGHT = (8, 16, 32)
_SPEED_TIE = 0.03
_CPU_TIE = 0.1
_PROBE_SECONDS = 0.05
_LEAST_FILE_BYTES = 64 << 20
"""With less, nothing is measured."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        file_bytes: size of the test file in each directory, at most.
        free_share: part of the free space that test files may take.
        fill_seconds: a slow drive's test files are cut short after writing for so long.
        sample_seconds: length of one sample.
        num_rounds: so many samples of each setting and workload.
        seconds: how long all of it takes, about; on a slow drive with fewer settings tried.
        workloads: what every setting is measured with; the best one with all.
        num_finalists: so many settings, the fastest, take part in the rounds after the first one; None: all.
        verifies: whether all that is written is read back and compared.
        backends: what moves the bytes; empty: what suits the file system.
    """

    file_bytes: int = 1 << 30
    free_share: float = 0.5
    fill_seconds: float = 60.0
    sample_seconds: float = 0.15
    num_rounds: int = 3
    seconds: float = math.inf
    workloads: tuple[Workload, ...] = WORKLOADS
    num_finalists: int | None = None
    verifies: bool = True
    backends: tuple[BackendName, ...] = ()


QUICK = Effort(512 << 20, fill_seconds=15.0, sample_seconds=0.08, num_rounds=1)
AT_START = Effort(
    free_share=0.1,
    fill_seconds=1.5,
    sample_seconds=0.1,
    seconds=6.0,
    workloads=(Workload.MIXED,),
    num_finalists=4,
    verifies=False,
)
"""Of a training."""


@dataclass
class DriveProfile:
    """What was measured, sample by sample, so that an end at any moment loses nothing."""

    directories: list[Directory]
    samples: dict[tuple[IOSetting, Workload], list[Sample]] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    """Backends that cannot be used here, and why."""
    verified: list[str] = field(default_factory=list)
    """Backends through which everything that was written was read back and found right."""
    written_bytes: int = 0
    is_direct: bool = False
    """Whether transfers bypass the page cache."""
    stopped_by: str | None = None
    """Why it is not complete, in words."""
    long_run: LongRun | None = None
    """The best setting over minutes, if that was asked for."""

    def add(self, sample: Sample) -> None:
        """Keep a sample."""
        self.samples.setdefault((sample.setting, sample.workload), []).append(sample)
        self.written_bytes += sample.write_bytes

    def stop(self, why: str) -> None:
        """It is not complete, for this reason: there is no advice then."""
        self.stopped_by = why

    @property
    def settings(self) -> list[IOSetting]:
        """Every setting that was measured, in the order of measuring."""
        return list(dict.fromkeys(setting for setting, _ in self.samples))

    def rates(self, setting: IOSetting, workload: Workload) -> list[float]:
        """Bytes per second of each sample."""
        return [sample.bytes_per_second for sample in self.samples.get((setting, workload), ())]

    def rate(self, setting: IOSetting, workload: Workload) -> float | None:
        """Their median; None if there is none."""
        rates = self.rates(setting, workload)
        return statistics.median(rates) if rates else None

    def fastest(self, workload: Workload) -> IOSetting | None:
        """The setting with the highest rate."""
        rates = {setting: self.rate(setting, workload) or 0.0 for setting, of in self.samples if of is workload}
        return max(rates, key=lambda setting: rates[setting], default=None)

    def by_speed(self) -> list[IOSetting]:
        """The settings, by their rate in the mix of an optimizer step, the fastest first."""
        return sorted(self.settings, key=lambda setting: -(self.rate(setting, Workload.MIXED) or 0.0))

    def cores_per_gigabyte(self, setting: IOSetting) -> float:
        """Processor seconds for 10^9 bytes, over all workloads."""
        samples = [sample for workload in WORKLOADS for sample in self.samples.get((setting, workload), ())]
        return sum(each.cpu_seconds for each in samples) / sum(_moved(each) for each in samples) * 1e9

    def advice(self) -> BandwidthCache | None:
        """The setting that `infinity.autotune_io` would choose from these samples, and what it reaches; None without any.

        Only settings that a config can express take part.
        """
        mixed = {setting: samples for (setting, of), samples in self.samples.items() if of is Workload.MIXED}
        most = max(map(len, mixed.values()), default=0)
        finalists = [each for each, samples in mixed.items() if len(samples) == most]
        usable = [setting for setting in finalists if reproduces(self.block(setting), setting)]
        if self.stopped_by is not None or not usable:
            return None
        best = choose([_typical(mixed[setting]) for setting in usable])
        read, write, mixed_rate = (self.rate(best.setting, each) or best.bytes_per_second for each in WORKLOADS)
        if (
            self.long_run is not None and self.long_run.fell_at is not None
        ):  # a training takes longer than its cache lasts
            held = self.long_run.rate / self.long_run.first_rate
            write, mixed_rate = write * held, mixed_rate * held
        return BandwidthCache(best.setting, Bandwidth(read, write, mixed_rate, now()), best.cpu_cores)

    def block(self, setting: IOSetting) -> Block:
        """The config that makes the engine work like ``setting``. A queue's depth counts for each thread."""
        return {
            "aio": {
                "block_size": setting.request_bytes,
                "queue_depth": setting.max_inflight // setting.num_threads,
                "intra_op_parallelism": setting.num_threads,
            },
            "infinity": {"io_backend": setting.backend, "direct_io": self.is_direct},
        }


def io_of(block: Block) -> IOSection:
    """What the engine makes of a block. Every config has to name a batch size."""
    return load_config({"train_micro_batch_size_per_gpu": 1, **block}, check_storage=False).io


def reproduces(block: Block, setting: IOSetting) -> bool:
    """Whether the engine, given this block, works exactly like the setting that was measured."""
    try:
        io = io_of(block)
    except ConfigError:
        return False
    return IOSetting(io.backend, io.request_bytes, io.num_threads, io.max_inflight) == setting


def default_setting() -> IOSetting:
    """What the engine does when its config says nothing and io_uring is not faster."""
    io = io_of({})
    return IOSetting("threads", io.request_bytes, io.num_threads, io.max_inflight)


def suitable_backends(directories: Sequence[Directory]) -> tuple[BackendName, ...]:
    """What may be able to move bytes there."""
    is_network = any(describe_drive(directory.path).is_network for directory in directories)
    return ("aiofiles", "threads") if is_network else ("threads", "uring")


def candidates(
    io: IOSection, backends: Sequence[BackendName], most_bytes_inflight: int, num_drives: int = 1
) -> list[IOSetting]:
    """Settings to try, those with few bytes in flight first. What the config gives is the same in all of them.

    Args:
        io: the section of the config.
        backends: what may be able to move the bytes here.
        most_bytes_inflight: no more host memory than this is used, unless the config leaves no choice.
        num_drives: so many directories share the work.
    """
    given = io.given
    found: dict[IOSetting, int] = {}
    for backend in (io.backend,) if "backend" in given else backends:
        for request_bytes in (io.request_bytes,) if "request_bytes" in given else _REQUEST_BYTES:
            if IOSetting(backend, request_bytes, 1, 1).has_threads:
                # Each drive has threads of its own; a few requests in hand bridge the time until its turn comes again.
                depth = 1 if num_drives == 1 else 2 * num_drives
                depth = max(1, io.max_inflight // io.num_threads) if "max_inflight" in given else depth
                for num_threads in (io.num_threads,) if "num_threads" in given else _NUM_THREADS:
                    setting = IOSetting(backend, request_bytes, num_threads, depth * num_threads)
                    found[setting] = setting.bytes_inflight * num_drives
            else:
                depths = [io.max_inflight] if "max_inflight" in given else [each * num_drives for each in _MAX_INFLIGHT]
                for max_inflight in depths:
                    setting = IOSetting(backend, request_bytes, io.num_threads, max_inflight)
                    found[setting] = setting.bytes_inflight
    ordered = sorted(found, key=lambda setting: (found[setting], setting.backend, setting.request_bytes))
    return [each for each in ordered if found[each] <= most_bytes_inflight] or ordered[:1]


def choose(samples: Sequence[Sample]) -> Sample:
    """The best of some samples of one workload; see [Note: choosing a setting]."""
    fastest = max(sample.bytes_per_second for sample in samples)
    tied = [sample for sample in samples if sample.bytes_per_second >= (1 - _SPEED_TIE) * fastest]
    cheapest = min(_cpu_per_byte(sample) for sample in tied)
    tied = [sample for sample in tied if _cpu_per_byte(sample) <= (1 + _CPU_TIE) * cheapest]
    return min(tied, key=lambda sample: (sample.setting.bytes_inflight, -sample.bytes_per_second))


def _cpu_per_byte(sample: Sample) -> float:
    return sample.cpu_seconds / (sample.read_bytes + sample.write_bytes)


def settings_for(found: DriveProfile, effort: Effort) -> list[IOSetting]:
    """What a profile measures: all candidates, and what the engine does when its config says nothing."""
    backends, num_drives = effort.backends or suitable_backends(found.directories), len(found.directories)
    settings = candidates(io_of({}), backends, MOST_INFLIGHT_BYTES * num_drives, num_drives)
    default = default_setting()
    return settings if default in settings or "threads" not in backends else [*settings, default]


@contextlib.contextmanager
def drive_test(found: DriveProfile, effort: Effort, io: IOSection) -> Iterator[DriveTest]:
    """Nameless test files in the directories, whose place is free again afterwards, whatever ends the program.

    Raises:
        RuntimeError: there is too little space.
        VolumeError: a directory cannot be used.
    """
    directories, file_bytes = _test_space(found.directories, effort)
    directories = with_speeds(directories, file_bytes * len(directories), direct=io.direct)
    with DriveTest(directories, file_bytes, direct=io.direct, deadline_seconds=io.deadline_seconds) as test:
        found.is_direct = test.is_direct
        yield test


def sweep(
    test: DriveTest,
    found: DriveProfile,
    effort: Effort,
    settings: Sequence[IOSetting],
    progress: Progress = lambda what, share: None,
) -> None:
    """Fill the files, check that every backend reads back what was written, and measure every setting, round after round.

    Samples of a setting are spread over the rounds, since the speed of a drive drifts.

    Raises:
        WrongDataError: something else was read than was written.
        SwapperError: a drive failed, or no backend can be used.
    """
    started = time.monotonic()
    progress("writing the test files", 0.0)
    test.prepare(max_seconds=effort.fill_seconds)
    found.written_bytes += test.num_bytes
    for backend in dict.fromkeys(setting.backend for setting in settings) if effort.verifies else ():
        progress(f"checking what {backend} reads back", 0.0)
        _verify(test, found, next(setting for setting in settings if setting.backend == backend))
    tried = list(settings)
    for number in range(effort.num_rounds):
        # There and back, so that no setting always follows the same other one.
        for place, setting in enumerate(tried[:: -1 if number % 2 else 1]):
            progress(f"round {number + 1} of {effort.num_rounds}", (number + place / len(tried)) / effort.num_rounds)
            if (
                found.samples
                and time.monotonic() + _expected_seconds(found, setting, effort) > started + effort.seconds
            ):
                break
            _sample(test, found, setting, effort.workloads, effort.sample_seconds)
        if number == 0 and effort.num_finalists is not None:
            tried = found.by_speed()[: effort.num_finalists]
    if not found.samples:
        every = "; ".join(f"{name}: {reason}" for name, reason in found.unusable.items())
        raise ArgumentError(f"no backend can be used here: {every or 'the test files are too small'}")
    best = found.advice()
    missing = tuple(each for each in WORKLOADS if each not in effort.workloads)
    if best is not None and missing:
        _sample(test, found, best.setting, missing, 1.5 * effort.sample_seconds)


def hold_for(test: DriveTest, found: DriveProfile, seconds: float, progress: Progress) -> None:
    """After a `sweep`: keep the best setting going for so long, which shows where a drive's cache ends.

    Raises:
        SwapperError: a drive failed.
    """
    best = found.advice()
    if best is None:
        return
    drives = [drive for each in found.directories if (drive := describe_drive(each.path).device) is not None]

    def hottest() -> float | None:
        return max((told for drive in drives if (told := health(drive).celsius) is not None), default=None)

    def count(sample: Sample) -> None:
        found.written_bytes += sample.write_bytes

    found.long_run = hold(test, best.setting, seconds, hottest, progress, count)


def _expected_seconds(found: DriveProfile, setting: IOSetting, effort: Effort) -> float:
    """Of a sample, and of those that come after it: what is in flight when the time is up has to be waited for."""
    fastest = max(rate for each, of in found.samples for rate in found.rates(each, of))
    still = 2 * (effort.num_finalists or 0) + len(WORKLOADS)
    return effort.sample_seconds * (len(effort.workloads) + still) + setting.bytes_inflight / fastest


def _verify(test: DriveTest, found: DriveProfile, setting: IOSetting) -> None:
    """Write through a backend and read all of it back; also its warm-up."""
    try:
        sample = test.measure(setting, Workload.MIXED, _PROBE_SECONDS, verify=True)
        found.written_bytes += sample.write_bytes
        test.verify(setting)
        found.verified.append(setting.backend)
    except (WrongDataError, TransferError):
        raise  # the drive's fault, and not the backend's absence
    except (SwapperError, ImportError, OSError) as error:
        found.unusable[setting.backend] = str(error)


def _sample(
    test: DriveTest, found: DriveProfile, setting: IOSetting, workloads: Sequence[Workload], seconds: float
) -> None:
    if setting.backend in found.unusable:
        return
    try:
        for workload in workloads:
            found.add(test.measure(setting, workload, seconds))
    except BackendUnavailableError as error:
        found.unusable[setting.backend] = str(error)
    except ArgumentError:
        pass  # the files are too small for so many bytes in flight


def _test_space(directories: Sequence[Directory], effort: Effort) -> tuple[list[Directory], int]:
    """The directories with what a test may take of each, and the size of the files.

    Raises:
        RuntimeError: there is too little.
    """
    drives = [describe_drive(directory.path) for directory in directories]
    numbers = [drive.device_number for drive in drives]
    rooms = []
    for directory, drive in zip(directories, drives, strict=True):
        # A file system that says 0 bytes has no limit.
        free = drive.free_bytes if drive.total_bytes else math.inf
        room = min(effort.file_bytes, free * effort.free_share / numbers.count(drive.device_number))
        room = min(room, directory.capacity_bytes or math.inf)
        if room < _LEAST_FILE_BYTES:
            raise RuntimeError(
                f"a test in {directory.path} may take {int(room)} bytes (a part of {effort.free_share:g} of what is free "
                f"there), and {_LEAST_FILE_BYTES} are needed; free some space"
            )
        rooms.append(int(room))
    limited = [replace(directory, capacity_bytes=room) for directory, room in zip(directories, rooms, strict=True)]
    # A drive that is much faster than the others gets nearly all of the files: that, too, must find room.
    return limited, min(rooms) // len(rooms)


def directories_of(paths: Sequence[Path]) -> list[Directory]:
    """The directories, each once.

    Raises:
        VolumeError: one is given twice.
    """
    seen: dict[Path, Path] = {}
    for path in paths:
        if (other := seen.get(path.resolve())) is not None:
            same = f"{path} is given twice" if str(path) == str(other) else f"{other} and {path} are the same directory"
            raise VolumeError(path, f"{same}: name each drive once")
        seen[path.resolve()] = path
    return [Directory(path) for path in paths]


def _moved(sample: Sample) -> int:
    return sample.read_bytes + sample.write_bytes


def _typical(samples: Sequence[Sample]) -> Sample:
    """One sample at the median rate, with the processor time that all of them took per byte."""
    rate = statistics.median(sample.bytes_per_second for sample in samples)
    moved, cpu_seconds = sum(map(_moved, samples)), sum(sample.cpu_seconds for sample in samples)
    seconds = moved / rate
    read_bytes = sum(sample.read_bytes for sample in samples)
    return replace(
        samples[0], read_bytes=read_bytes, write_bytes=moved - read_bytes, seconds=seconds, cpu_seconds=cpu_seconds
    )
