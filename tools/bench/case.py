"""One benchmark case: who takes part, in which order they take turns, and what came out."""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cgroup import Cgroup, why_unavailable
from bench.measured.models import Workload
from bench.participant import Participant, ParticipantFailed, ParticipantSpec

Progress = Callable[[str], None]
# --direct=1 (O_DIRECT), 1 MiB, 32 in flight: the requests of the engine.
_FIO = ("fio", "--output-format=json", "--eta=never", "--name=mix", "--direct=1")
_REQUESTS = ("--bs=1M", "--ioengine=libaio", "--iodepth=32")
# Ends an fio that hangs.
_FIO_SECONDS = 120.0
has_fio = shutil.which("fio") is not None


@dataclass(frozen=True)
class DriveSample:
    """Bytes per second that one fio run reached."""

    read_bytes_per_second: float
    write_bytes_per_second: float

    @property
    def total_bytes_per_second(self) -> float:
        """Reads and writes together."""
        return self.read_bytes_per_second + self.write_bytes_per_second


@contextlib.contextmanager
def mixed_rate(
    directory: Path, *, bytes_per_second: int | None, num_bytes: int = 2 << 30, run_seconds: int = 5
) -> Iterator[Callable[[float], DriveSample]]:
    """Yield a function that runs fio for a few seconds; its argument is the fraction of bytes that are reads.

    The test file in `directory` is written once at first: the first write to a block is slower. It is removed on exit. With
    `bytes_per_second`, samples are taken in a control group that holds reads and writes, each, to that.
    """
    path = directory / "fio.bin"

    def run(*options: str) -> dict[str, dict[str, float]]:
        command = group.command(*_FIO, *_REQUESTS, f"--filename={path}", f"--size={num_bytes}", *options)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_FIO_SECONDS,
            check=True,
            start_new_session=True,  # Ctrl-C is for us; what fio does then would count as a result
        )
        (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]  # warnings come first
        return dict(job)

    with contextlib.ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        group = stack.enter_context(Cgroup("fio", () if bytes_per_second is None else ("blkio",)))
        # Before the throttle is set, so that preparing takes no longer than it has to.
        run("--rw=write", "--end_fsync=1")
        if bytes_per_second is not None:
            group.throttle(directory, bytes_per_second)

        def sample(read_share: float) -> DriveSample:
            mix = f"--rwmixread={round(100 * read_share)}"
            # --overwrite=1: writes go to blocks that exist, as those of the engine do.
            job = run("--rw=rw", mix, "--time_based", f"--runtime={run_seconds}", "--overwrite=1")
            return DriveSample(float(job["read"]["bw_bytes"]), float(job["write"]["bw_bytes"]))

        yield sample


@dataclass(frozen=True)
class Schedule:
    """How long to measure. A turn is a few steps and the flush that ends them: one sample is one turn's mean step."""

    num_warmup_steps: int = 3
    num_turns: int = 5
    steps_per_turn: int = 2


@dataclass(frozen=True)
class Case:
    """A workload on a drive of a given speed (None: as fast as it is)."""

    workload: Workload
    throttle_megabytes: int | None
    specs: tuple[ParticipantSpec, ...]

    @property
    def throttle_bytes(self) -> int | None:
        """Per second, each way."""
        return None if self.throttle_megabytes is None else self.throttle_megabytes * 10**6

    @property
    def label(self) -> str:
        """Short description for tables."""
        speed = "unthrottled" if self.throttle_megabytes is None else f"{self.throttle_megabytes} MB/s each way"
        return f"{self.workload.label}, {speed}"


@dataclass
class Outcome:
    """What one participant's turns took."""

    name: str
    seconds_per_step: list[float] = field(default_factory=list)
    read_bytes_per_step: float = 0.0
    write_bytes_per_step: float = 0.0
    peak_bytes: int | None = None
    steady_peak_bytes: int | None = None
    high_water_bytes: int = 0
    ready_seconds: float = 0.0
    description: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)
    busy_shares: dict[str, float] = field(default_factory=dict)
    """Medians over the steps of what the engine itself reports: who was busy for which share of a step."""
    bound_by: str = ""
    """What most steps were bound by, in the engine's own judgement."""
    schedule: str = ""
    """How most steps of the engine went over their micro-batches."""
    error: str | None = None

    @property
    def median_seconds(self) -> float:
        """Median over the turns of the mean step time."""
        return statistics.median(self.seconds_per_step)

    @classmethod
    def of(cls, participant: Participant) -> Outcome:
        """Collects the counted turns of a participant."""
        turns = participant.turns
        if not turns:
            return cls(participant.spec.name, error="no turn was finished")
        return cls(
            name=participant.spec.name,
            # With the flush of the turn, so that deferred updates count for the steps that caused them.
            seconds_per_step=[turn["total_seconds"] / turn["num_steps"] for turn in turns],
            read_bytes_per_step=statistics.median(turn["read_bytes"] / turn["num_steps"] for turn in turns),
            write_bytes_per_step=statistics.median(turn["write_bytes"] / turn["num_steps"] for turn in turns),
            peak_bytes=participant.peak_bytes,
            steady_peak_bytes=participant.steady_peak_bytes,
            high_water_bytes=turns[-1]["high_water_bytes"],
            ready_seconds=participant.ready["ready_seconds"],
            description=turns[-1]["description"],
            turns=[{key: value for key, value in turn.items() if key != "description"} for turn in turns],
            **_judge([report for turn in turns for report in turn.get("reports", [])]),
        )


def _judge(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`busy_shares`, `bound_by` and `schedule` of an outcome from the reports of its steps."""
    if not reports:
        return {}
    # Peers report nothing: their outcome has empty shares.
    names = [name for name in reports[0] if name.endswith("_share")]
    return {
        "busy_shares": {name: statistics.median(report[name] for report in reports) for name in names},
        "bound_by": statistics.mode(report["bound_by"] for report in reports),
        "schedule": statistics.mode(report["schedule"] for report in reports),
    }


@dataclass
class CaseResult:
    """All outcomes of a case, in the order in which its participants took turns."""

    case: Case
    outcomes: list[Outcome] = field(default_factory=list)
    drive_samples: list[DriveSample] = field(default_factory=list)

    def outcome(self, name: str) -> Outcome | None:
        """The finished outcome called `name`, if there is one."""
        return next((outcome for outcome in self.outcomes if outcome.name == name and not outcome.error), None)

    def bytes_bound_seconds(self, outcome: Outcome) -> float | None:
        """How long the outcome's bytes take at the speed that fio reached between the turns, both ways together.

        But no direction goes faster than the throttle lets it; without fio, that alone counts. None without both.
        """
        read, written = outcome.read_bytes_per_step, outcome.write_bytes_per_step
        bounds: list[float] = []
        if self.drive_samples:
            speed = statistics.median(sample.total_bytes_per_second for sample in self.drive_samples)
            # Example: 3 GB read and 4.5 GB written. fio reaches 1.2 GB/s both ways together: 6.25 s. A throttle of 600
            # MB/s lets 4.5 GB through in 7.5 s, which is the bound.
            bounds.append((read + written) / speed)
        if self.case.throttle_bytes is not None:
            bounds.append(max(read, written) / self.case.throttle_bytes)
        return max(bounds, default=None)

    def as_json(self) -> dict[str, Any]:
        """Plain values for the JSON file."""

        def plain(outcome: Outcome) -> dict[str, Any]:
            if not outcome.seconds_per_step:
                return asdict(outcome)
            bound = self.bytes_bound_seconds(outcome)
            return asdict(outcome) | {"median_seconds": outcome.median_seconds, "bytes_bound_seconds": bound}

        return {
            "label": self.case.label,
            "workload": asdict(self.case.workload),
            "throttle_megabytes": self.case.throttle_megabytes,
            "drive_samples": [asdict(sample) for sample in self.drive_samples],
            "outcomes": [plain(outcome) for outcome in self.outcomes],
        }


def available_controllers() -> tuple[str, ...]:
    """Control groups that can be used here: without them there are no limits and no peaks, but times are measured."""
    return tuple(name for name in ("memory", "blkio") if why_unavailable(name) is None)


def run_case(result: CaseResult, directory: Path, schedule: Schedule, tell: Progress, *, measure_drive: bool) -> None:
    """Fills `result`. All participants stay alive and take turns, so that changes of the machine's load meet all of them.

    A participant that fails is reported and left out; the others go on.
    """
    case, controllers = result.case, available_controllers()
    with contextlib.ExitStack() as stack:
        alive: list[Participant] = []
        try:
            for spec in case.specs:
                tell(f"{case.label}: starting {spec.name}")
                try:
                    limits: dict[str, Any] = {"controllers": controllers, "bytes_per_second": case.throttle_bytes}
                    alive.append(stack.enter_context(Participant(spec, case.workload, directory, **limits)))
                except ParticipantFailed as error:
                    result.outcomes.append(Outcome(spec.name, error=str(error)))
            # Warm-up writes every block once, and records the order of the units.
            _take_turns(result, alive, schedule.num_warmup_steps, tell, counts=False)
            sample_drive = None
            if measure_drive and alive:
                sample_drive = stack.enter_context(mixed_rate(directory, bytes_per_second=case.throttle_bytes))
            for turn in range(schedule.num_turns):
                tell(f"{case.label}: turn {turn + 1} of {schedule.num_turns}")
                _take_turns(result, alive, schedule.steps_per_turn, tell, counts=True)
                # Between the turns, with the mix of the first participant: the speed of the drive drifts.
                if sample_drive is not None and alive:
                    read, written = (alive[0].turns[-1][f"{way}_bytes"] for way in ("read", "write"))
                    share = read / (read + written) if read + written else 0.5
                    result.drive_samples.append(sample_drive(share))
        finally:
            # Also after Ctrl-C: what was measured by then is reported.
            result.outcomes.extend(Outcome.of(participant) for participant in alive)
            order = [spec.name for spec in case.specs]
            result.outcomes.sort(key=lambda outcome: order.index(outcome.name))


def _take_turns(result: CaseResult, alive: list[Participant], steps: int, tell: Progress, *, counts: bool) -> None:
    for participant in list(alive):
        name = participant.spec.name
        try:
            turn = participant.run_turn(steps, counts=counts)
        except ParticipantFailed as error:
            alive.remove(participant)
            result.outcomes.append(Outcome(name, error=str(error)))
            continue
        kind = "" if counts else " (warm-up)"
        tell(f"  {name}{kind}: {turn['total_seconds'] / steps:.2f} s per step")


def peers(
    extensions_directory: Path, python: str, variants: Sequence[str] = ("lean", "pipelined")
) -> Sequence[ParticipantSpec]:
    """DeepSpeed, each time with other settings: by default with low host memory, and at its fastest."""
    settings = {"extensions_directory": str(extensions_directory)}
    return [
        ParticipantSpec(f"deepspeed_{variant}", "deepspeed", settings | {"variant": variant}, python)
        for variant in variants
    ]
