"""`infinity.autotune_io`: settings for reads and writes, found by measuring the drives instead of guessing.

[Note: choosing a setting]
Every candidate moves the bytes of an optimizer step, reads and writes at once, for a tenth of a second; the best few
compete again, in turns. Among those within 3 % of the fastest, the one that costs the least processor time wins (compute
needs it), and among those that cost about the same, the one with the fewest bytes in flight (they are host memory).
What the config fixes is fixed for every candidate. All of it ends after about six seconds, on a slow drive with fewer
candidates tried.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from infinity.config import Decision, InfinityConfig, IOSection
from infinity.device.host_memory import free_bytes
from infinity.machine.bandwidth_cache import BandwidthCache, cache_key, load, now, store
from infinity.plan.machine import Bandwidth
from infinity.version import __version__
from swapper import ArgumentError, BackendUnavailableError, Swapper
from swapper.config import ALIGNMENT, BackendName
from swapper.measure.measurement import DriveTest, IOSetting, Sample, Workload
from swapper.measure.speeds import with_speeds
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import describe_drive

logger = logging.getLogger(__name__)

_REQUEST_BYTES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
_NUM_THREADS = (4, 8, 16)
_MAX_INFLIGHT = (8, 16, 32)
_MAX_BYTES_INFLIGHT = 64 << 20
_BUDGET_SHARE = 8  # of the host memory budget no more than this part is in flight
_SPEED_TIE = 0.03
_CPU_TIE = 0.1


@dataclass(frozen=True)
class Limits:
    """What a measurement may take.

    Attributes:
        seconds: how long all of it takes, about.
        fill_seconds: how long the test file is filled.
        sample_seconds: how long a candidate is tried.
        file_bytes: size of the test file in each directory, at most.
        free_share: part of the free space that test files may take.
        least_file_bytes: with less, nothing is measured.
        num_finalists: so many candidates compete again.
    """

    seconds: float = 6.0
    fill_seconds: float = 1.5
    sample_seconds: float = 0.1
    file_bytes: int = 1 << 30
    free_share: float = 0.1
    least_file_bytes: int = 64 << 20
    num_finalists: int = 4


def tune_io(config: InfinityConfig, limits: Limits | None = None) -> InfinityConfig:
    """The config with measured I/O settings, if it asks for them; as it is if they cannot be measured.

    Args:
        config: what the user asked for; values given there stay.
        limits: what the measurement may take.
    """
    io = config.io
    # The optimizer's states are by far the most bytes.
    directories = config.offload_optimizer.nvme_directories or config.offload_param.nvme_directories
    if io.autotune == "off":
        return config
    if not directories:
        logger.info("infinity.autotune_io: no states rest on NVMe, so there is nothing to measure")
        return config
    try:
        memory = _most_inflight(config.infinity.host_memory_budget, len(directories))
        key = _key(directories, io, memory)
        measured = load(key) if io.autotune == "once" else None
        if measured is not None and _still_works(measured.setting, directories, io):
            logger.info(
                "infinity.autotune_io: as measured on %s: %s", measured.bandwidth.date, measured.setting.describe()
            )
        else:
            measured = _measure(directories, io, memory, limits or Limits())
            store(key, measured)
    except Exception as error:
        # Settings are a matter of speed: whatever is wrong with the drives, training itself will say.
        logger.warning("infinity.autotune_io: the drives were not measured, so defaults are used: %s", error)
        return config
    return _apply(config, measured)


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


def _asked(io: IOSection) -> str:
    """What the candidates depend on, so that a stored result is not used where others would have been tried."""
    given = ", ".join(f"{name}={getattr(io, name)}" for name in sorted(io.given))
    has_uring = importlib.util.find_spec("liburing") is not None
    return f"given: {given}; direct={io.direct}; uring={has_uring}"


def keep(measured: BandwidthCache, directories: Sequence[Directory], io: IOSection) -> None:
    """Store what a longer measurement has found, for configs with these I/O settings and no memory budget that limits it."""
    store(_key(directories, io, _most_inflight(None, len(directories))), measured)


def _key(directories: Sequence[Directory], io: IOSection, memory: int) -> str:
    return cache_key([directory.path for directory in directories], __version__, f"{_asked(io)}; memory={memory}")


def suitable_backends(directories: Sequence[Directory]) -> tuple[BackendName, ...]:
    """What may be able to move bytes there."""
    is_network = any(describe_drive(directory.path).is_network for directory in directories)
    return ("aiofiles", "threads") if is_network else ("threads", "uring")


def _most_inflight(budget: int | None, num_drives: int) -> int:
    most = _MAX_BYTES_INFLIGHT * num_drives
    return most if budget is None else min(most, budget // _BUDGET_SHARE)


def _still_works(setting: IOSetting, directories: Sequence[Directory], io: IOSection) -> bool:
    """Whether the backend of a stored result can be used in this process: a container may forbid io_uring."""
    if setting.backend == "threads":
        return True
    try:
        Swapper.open(list(directories), ALIGNMENT, setting.swapper_config(direct=io.direct)).close()
    except BackendUnavailableError as error:
        logger.info("what was measured on this machine before does not work now: %s", error)
        return False
    return True


# --------------------------------------------------------------------------------------------------------- measurement


def _measure(
    directories: Sequence[Directory], io: IOSection, most_bytes_inflight: int, limits: Limits
) -> BandwidthCache:
    """Find the best setting.

    Raises:
        RuntimeError: there is too little space, or no candidate works.
        SwapperError: the drives fail.
    """
    started = time.monotonic()
    test_directories, file_bytes = test_space(directories, limits)
    names = ", ".join(str(directory.path) for directory in directories)
    logger.info(
        "infinity.autotune_io: measuring %s for about %.0f seconds, with up to %d MB in each directory",
        names,
        limits.seconds,
        file_bytes // 10**6,  # on average
    )
    test_directories = with_speeds(test_directories, file_bytes * len(directories), direct=io.direct)
    with DriveTest(test_directories, file_bytes, direct=io.direct, deadline_seconds=io.deadline_seconds) as test:
        test.prepare(max_seconds=limits.fill_seconds)
        logger.info("infinity.autotune_io: %d MB written", test.num_bytes // 10**6)
        memory = min(most_bytes_inflight, free_bytes() // _BUDGET_SHARE)
        tried = candidates(io, suitable_backends(directories), memory, len(directories))
        trial = _Trial(test, started, limits)
        samples = trial.try_all(tried)
        logger.info("infinity.autotune_io: %d settings tried in %.1f s", len(samples), time.monotonic() - started)
        best = choose(trial.compete(samples))
        measured = trial.result(best)
    bandwidth = measured.bandwidth
    logger.info(
        "infinity.autotune_io: %s is best: %.2f GB/s in the mix of an optimizer step (read %.2f, write %.2f GB/s alone; "
        "%.2f cores), after %.1f s",
        measured.setting.describe(),
        bandwidth.mixed_bytes_per_second / 1e9,
        bandwidth.read_bytes_per_second / 1e9,
        bandwidth.write_bytes_per_second / 1e9,
        measured.cpu_cores,
        time.monotonic() - started,
    )
    return measured


def test_space(directories: Sequence[Directory], limits: Limits) -> tuple[list[Directory], int]:
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
        room = min(limits.file_bytes, free * limits.free_share / numbers.count(drive.device_number))
        room = min(room, directory.capacity_bytes or math.inf)
        if room < limits.least_file_bytes:
            raise RuntimeError(
                f"a test in {directory.path} may take {int(room)} bytes (a part of {limits.free_share:g} of what is free "
                f"there), and {limits.least_file_bytes} are needed; free some space"
            )
        rooms.append(int(room))
    limited = [replace(directory, capacity_bytes=room) for directory, room in zip(directories, rooms, strict=True)]
    # A drive that is much faster than the others gets nearly all of the files: that, too, must find room.
    return limited, min(rooms) // len(rooms)


class _Trial:
    """Knows how much time is left and what to do with it; must not know how a drive is measured."""

    def __init__(self, test: DriveTest, started: float, limits: Limits) -> None:
        self._test = test
        self._limits = limits
        self._stop_at = started + limits.seconds
        self._broken: set[BackendName] = set()
        self._problem = ""

    def _sample(self, setting: IOSetting, workload: Workload, seconds: float) -> Sample | None:
        if setting.backend in self._broken:
            return None
        try:
            return self._test.measure(setting, workload, seconds)
        except BackendUnavailableError as error:
            self._broken.add(setting.backend)
            self._problem = str(error)
        except ArgumentError as error:  # the file is too small for so many bytes in flight
            self._problem = str(error)
        logger.debug("not tried: %s: %s", setting.describe(), self._problem)
        return None

    def try_all(self, settings: Sequence[IOSetting]) -> list[Sample]:
        """One sample of each, as many as there is time for; the rest of the time is for the finalists.

        Raises:
            RuntimeError: not even one works.
        """
        seconds = self._limits.sample_seconds
        stop_at = self._stop_at - 2 * (self._limits.num_finalists + 1) * 1.5 * seconds
        samples: list[Sample] = []
        for setting in settings:
            if samples:
                fastest = max(sample.bytes_per_second for sample in samples)
                # What is in flight when the time is up has to be waited for.
                if time.monotonic() + seconds + setting.bytes_inflight / fastest > stop_at:
                    break
            sample = self._sample(setting, Workload.MIXED, seconds)
            if sample is not None:
                samples.append(sample)
        if not samples:
            raise RuntimeError(self._problem or "there was no time for it")
        return samples

    def compete(self, samples: Sequence[Sample]) -> list[Sample]:
        """The best few, measured again in turns so that what the drive does in the course of time hits all of them."""
        finalists = sorted(samples, key=lambda sample: -sample.bytes_per_second)[: self._limits.num_finalists]
        if len(finalists) == 1:
            return finalists
        totals: dict[IOSetting, Sample] = {}
        for _ in range(2):
            for finalist in finalists:
                if totals.keys() >= {each.setting for each in finalists} and time.monotonic() > self._stop_at:
                    break
                sample = self._sample(finalist.setting, Workload.MIXED, 1.5 * self._limits.sample_seconds)
                if sample is not None:
                    totals[finalist.setting] = _sum(totals.get(finalist.setting), sample)
        return list(totals.values()) or finalists

    def result(self, best: Sample) -> BandwidthCache:
        """What the best setting does, also in one direction alone."""
        speeds = {Workload.MIXED: best.bytes_per_second}
        for workload in (Workload.READ, Workload.WRITE):
            sample = self._sample(best.setting, workload, 1.5 * self._limits.sample_seconds)
            speeds[workload] = sample.bytes_per_second if sample is not None else best.bytes_per_second
        bandwidth = Bandwidth(speeds[Workload.READ], speeds[Workload.WRITE], speeds[Workload.MIXED], now())
        return BandwidthCache(best.setting, bandwidth, best.cpu_cores)


def _sum(before: Sample | None, sample: Sample) -> Sample:
    if before is None:
        return sample
    return replace(
        before,
        read_bytes=before.read_bytes + sample.read_bytes,
        write_bytes=before.write_bytes + sample.write_bytes,
        seconds=before.seconds + sample.seconds,
        cpu_seconds=before.cpu_seconds + sample.cpu_seconds,
    )


# ------------------------------------------------------------------------------------------------------------ decisions


def _apply(config: InfinityConfig, measured: BandwidthCache) -> InfinityConfig:
    """The config with the measured values in place of those that nobody gave."""
    setting, io = measured.setting, config.io
    keys: dict[str, tuple[str, object]] = {
        "request_bytes": ("aio.block_size", setting.request_bytes),
        "num_threads": ("aio.intra_op_parallelism", setting.num_threads),
        "max_inflight": ("aio.queue_depth", f"{setting.max_inflight} requests in flight"),
        "backend": ("infinity.io_backend", setting.backend),
    }
    decided_by = f"measured on {measured.bandwidth.date}"
    unseen = io.given if setting.has_threads else io.given | {"num_threads"}
    shown = {key: Decision(key, words, decided_by) for name, (key, words) in keys.items() if name not in unseen}
    decisions = tuple(shown.get(decision.key, decision) for decision in config.decisions)
    kept = [key for name, (key, _) in keys.items() if name in io.given]
    if kept:
        logger.info("infinity.autotune_io: %s %s as the config says", ", ".join(kept), "stay" if kept[1:] else "stays")
    return replace(config, io=replace(io, **asdict(setting)), decisions=decisions)
