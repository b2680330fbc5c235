"""How fast drives are under the engine's requests, and which settings suit them: what `infinity profile` measures."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infinity.config import IOSection, load_config
from infinity.errors import ConfigError
from infinity.machine.autotune import Limits, candidates, choose, keep, suitable_backends, test_space
from infinity.machine.bandwidth_cache import BandwidthCache, now
from infinity.plan.machine import Bandwidth
from swapper.config import BackendName
from swapper.errors import ArgumentError, SwapperError, TransferError, VolumeError, WrongDataError
from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import DriveTest, Sample
from swapper.measure.speeds import with_speeds
from swapper.volumes.directory import Directory

Block = dict[str, dict[str, Any]]
"""Keys and values of a config by the block that holds them."""
Progress = Callable[[str, float], None]
"""``progress(what, share)``: what has begun, and how much is done, 0 to 1."""
WORKLOADS = (Workload.READ, Workload.WRITE, Workload.MIXED)
_MOST_INFLIGHT_BYTES = 64 << 20
_PROBE_SECONDS = 0.05
_FREE_SHARE = 0.5


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        file_bytes: size of the test file in each directory, at most.
        fill_seconds: a slow drive's test files are cut short after writing for so long.
        sample_seconds: length of one sample.
        num_rounds: so many samples of each setting and workload.
        backends: what moves the bytes; empty: what suits the file system.
    """

    file_bytes: int = 1 << 30
    fill_seconds: float = 60.0
    sample_seconds: float = 0.15
    num_rounds: int = 3
    backends: tuple[BackendName, ...] = ()


QUICK = Effort(512 << 20, fill_seconds=15.0, sample_seconds=0.08, num_rounds=1)


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

    def cores_per_gigabyte(self, setting: IOSetting) -> float:
        """Processor seconds for 10^9 bytes, over all workloads."""
        samples = [sample for workload in WORKLOADS for sample in self.samples.get((setting, workload), ())]
        return sum(each.cpu_seconds for each in samples) / sum(_moved(each) for each in samples) * 1e9

    def advice(self) -> BandwidthCache | None:
        """The setting that `infinity.autotune_io` would choose from these samples, and what it reaches; None without any.

        Only settings that a config can express take part.
        """
        usable = [setting for setting in self.settings if reproduces(self.block(setting), setting)]
        if self.stopped_by is not None or not usable:
            return None
        best = choose([_typical(self.samples[setting, Workload.MIXED]) for setting in usable])
        read, write, mixed = (self.rate(best.setting, workload) or 0.0 for workload in WORKLOADS)
        return BandwidthCache(best.setting, Bandwidth(read, write, mixed, now()), best.cpu_cores)

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


@contextlib.contextmanager
def drive_test(profile: DriveProfile, effort: Effort) -> Iterator[DriveTest]:
    """Nameless test files in the directories, whose place is free again afterwards, whatever ends the program.

    Raises:
        RuntimeError: there is too little space.
        VolumeError: a directory cannot be used.
    """
    limits = Limits(file_bytes=effort.file_bytes, free_share=_FREE_SHARE)
    directories, file_bytes = test_space(profile.directories, limits)
    with DriveTest(with_speeds(directories, file_bytes * len(directories)), file_bytes) as test:
        profile.is_direct = test.is_direct
        yield test


def sweep(test: DriveTest, profile: DriveProfile, effort: Effort, progress: Progress) -> None:
    """Fill the files, check that every backend reads back what was written, and measure every setting, round after round.

    Samples of a setting are spread over the rounds, since the speed of a drive drifts.

    Raises:
        WrongDataError: something else was read than was written.
        SwapperError: a drive failed, or no backend can be used.
    """
    progress("writing the test files", 0.0)
    test.prepare(max_seconds=effort.fill_seconds)
    profile.written_bytes += test.num_bytes
    backends = effort.backends or suitable_backends(profile.directories)
    num_drives = len(profile.directories)
    tried = candidates(io_of({}), backends, _MOST_INFLIGHT_BYTES * num_drives, num_drives)
    tried += [default_setting()] if "threads" in backends and default_setting() not in tried else []
    for backend in backends:
        progress(f"checking what {backend} reads back", 0.0)
        _check(test, profile, next(setting for setting in tried if setting.backend == backend))
    if not profile.verified:
        every = "; ".join(f"{name}: {reason}" for name, reason in profile.unusable.items())
        raise ArgumentError(f"no backend can be used here: {every}")
    tried = [setting for setting in tried if setting.backend in profile.verified]
    for number in range(effort.num_rounds):
        # There and back, so that no setting always follows the same other one.
        for place, setting in enumerate(tried[:: -1 if number % 2 else 1]):
            progress(f"round {number + 1} of {effort.num_rounds}", (number + place / len(tried)) / effort.num_rounds)
            _sample(test, profile, setting, effort.sample_seconds)


def _check(test: DriveTest, profile: DriveProfile, setting: IOSetting) -> None:
    """Write through a backend and read all of it back; also its warm-up."""
    try:
        sample = test.measure(setting, Workload.MIXED, _PROBE_SECONDS, verify=True)
        profile.written_bytes += sample.write_bytes
        test.verify(setting)
        profile.verified.append(setting.backend)
    except (WrongDataError, TransferError):
        raise  # the drive's fault, and not the backend's absence
    except (SwapperError, ImportError, OSError) as error:
        profile.unusable[setting.backend] = str(error)


def _sample(test: DriveTest, profile: DriveProfile, setting: IOSetting, seconds: float) -> None:
    with contextlib.suppress(ArgumentError):  # the files are too small for so many bytes in flight
        for workload in reversed(WORKLOADS):  # the mix first: it needs the largest files
            profile.add(test.measure(setting, workload, seconds))


def store(profile: DriveProfile, found: BandwidthCache) -> None:
    """Keep the result: plans then know the drives' speed, and `"autotune_io": "auto"` takes the setting."""
    keep(found, profile.directories, io_of({}))


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
