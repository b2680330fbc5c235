"""What each of N ranks keeps, reads, writes and sends beside the formulas of the ZeRO paper; and two drives against one.

Ranks are processes of this machine, over gloo. Each tells what it has counted, see `measured.rank`.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from infinity.bench.cgroup import Cgroup
from infinity.bench.participant import OURS
from infinity.errors import InfinityError

KINDS = ("parameters", "gradients", "optimizer", "read", "written", "sent")
_GRADIENT = 4
"""Bytes per parameter: fp32 means."""
_WEIGHTS_AND_STATES = {"bfloat16": (2, 10), "float32": (4, 8)}
"""Bytes per parameter, by the weights' dtype: weights, and AdamW's two moments with what makes a weight an fp32 one."""
_LIMIT_SECONDS = 600.0
_ENVIRONMENT = {"PYTHONPATH": str(OURS), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_MEGA = 1e6


@dataclass(frozen=True)
class Job:
    """What is trained: linear layers, all alike."""

    stage: int
    width: int = 1024
    layers: int = 8
    steps: int = 3
    clip: float = 0.0
    """Largest norm of all gradients; 0: whatever it is."""
    dtype: str = "bfloat16"
    """Of weights, as `_WEIGHTS_AND_STATES` has it."""

    @property
    def num_parameters(self) -> int:
        """Of the model."""
        return self.layers * self.width * self.width

    @property
    def budget_bytes(self) -> int:
        """Of host memory, for each rank: everything but the states fits."""
        return 12 * self.num_parameters + (256 << 20)


def formulas(job: Job, num: int) -> dict[str, float]:
    """Bytes of each of N ranks by the paper: kept, and moved in a step. All fits, so stage 3 reads no weights."""
    states, gradients, weights = (1 / num if job.stage >= least else 1.0 for least in (1, 1, 3))
    others, count = (num - 1) / num, job.num_parameters
    weight, state = _WEIGHTS_AND_STATES[job.dtype]
    paged = weights * weight if job.stage == 3 else 0.0  # on the drive
    return {
        "parameters": count * weight * weights,
        "gradients": count * _GRADIENT * gradients,
        "optimizer": count * state * states,
        "read": count * state * states,
        "written": count * (state * states + paged),
        "sent": count * others * (2 * _GRADIENT if job.stage == 0 else _GRADIENT + weight),
    }


def train(job: Job, num: int, directories: Sequence[Path], throttle: int | None = None) -> list[dict[str, float]]:
    """What each of so many ranks has counted, of which each uses the next of the directories.

    Args:
        throttle: bytes per second, each way, of each rank's directory, by a control group of its own.

    Raises:
        InfinityError: one has failed, with its last words.
    """
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_ranks_")))
        running = []
        for rank in range(num):
            directory = directories[rank % len(directories)]
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_ranks_", dir=directory))
            group = stack.enter_context(Cgroup(f"rank{rank}", () if throttle is None else ("blkio",)))
            if throttle is not None:
                group.throttle(directory, throttle)
            asked = asdict(job) | {"rank": rank, "num": num, "budget": job.budget_bytes, "directory": own}
            asked |= {"store": str(place / "store"), "answer": str(place / f"{rank}.json")}
            process = subprocess.Popen(
                group.command(sys.executable, "-m", "infinity.bench.measured.rank", json.dumps(asked)),
                env=os.environ | _ENVIRONMENT | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num)},
                stdout=subprocess.DEVNULL,
                stderr=stack.enter_context((place / f"{rank}.log").open("w")),
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append(process)
        return [_answer(process, place / f"{rank}.json") for rank, process in enumerate(running)]


def _answer(process: subprocess.Popen[bytes], answer: Path) -> dict[str, float]:
    try:
        status = process.wait(timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise InfinityError(f"a rank took more than {_LIMIT_SECONDS:.0f} s; give it less with --layers") from None
    if status:
        words = answer.with_suffix(".log").read_text().split()[-60:]
        raise InfinityError(f"a rank ended with status {status}: {' '.join(words)}")
    found: dict[str, float] = json.loads(answer.read_text())
    return found


def deviation(measured: float, formula: float) -> float:
    """In per cent; 0 where both are nothing."""
    return 100 * (measured / formula - 1) if formula else (100.0 if measured else 0.0)


def worst(job: Job, of_ranks: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """By kind, the figure of the rank that deviates most, and by how many per cent. One rank takes no means."""
    wanted = formulas(job, len(of_ranks))
    kinds = [kind for kind in KINDS if kind != "gradients" or len(of_ranks) > 1]
    found = {kind: [(each[kind], deviation(each[kind], wanted[kind])) for each in of_ranks] for kind in kinds}
    return {kind: max(pairs, key=lambda pair: abs(pair[1])) for kind, pairs in found.items()}


def ranks_table(job: Job, measured: Mapping[int, Sequence[Mapping[str, float]]]) -> Table:
    """A row for each N."""
    title = f"stage {job.stage}, {job.num_parameters:,} parameters, {job.dtype}, AdamW: MB of a rank (off the formula)"
    shown = Table(title=title, title_justify="left")
    for heading in ("ranks", *KINDS, "step"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for num, of_ranks in measured.items():
        found = worst(job, of_ranks)
        cells = [
            f"{found[kind][0] / _MEGA:,.1f} ({found[kind][1]:+.1f} %)" if kind in found else "all" for kind in KINDS
        ]
        shown.add_row(str(num), *cells, f"{max(each['seconds'] for each in of_ranks):.2f} s")
    return shown


def as_json(job: Job, nums: Sequence[int], directory: Path, tell: Callable[[Table], None]) -> dict[str, Any]:
    """Measure each number of ranks; the table goes to ``tell``, and all of it comes back as plain values."""
    measured = {num: train(job, num, [directory]) for num in nums}
    tell(ranks_table(job, measured))
    rows = [
        {
            "num": num,
            "formulas": formulas(job, num),
            "of_ranks": of_ranks,
            "deviations": {kind: percent for kind, (_, percent) in worst(job, of_ranks).items()},
        }
        for num, of_ranks in measured.items()
    ]
    return {"stage": job.stage, "num_parameters": job.num_parameters, "ranks": rows}


def drives_as_json(job: Job, drives: Sequence[Path], bytes_per_second: int, turns: int) -> dict[str, Any]:
    """Seconds of a step of one rank on the first drive, and of one rank on each, all throttled alike, by turns: medians."""
    alone, together, processor = [], [], []
    for _ in range(turns):
        alone.append(train(job, 1, drives, bytes_per_second)[0]["seconds"])
        of_ranks = train(job, len(drives), drives, bytes_per_second)
        together.append(max(each["seconds"] for each in of_ranks))
        processor.append(sum(each["processor"] for each in of_ranks))
    return {
        "drives": [str(path) for path in drives],
        "bytes_per_second": bytes_per_second,
        "alone_seconds": statistics.median(alone),
        "together_seconds": statistics.median(together),
        "ratio": statistics.median(together) / statistics.median(alone),
        "together_processor_seconds": statistics.median(processor),
        "turns": {"alone_seconds": alone, "together_seconds": together},
    }


def drives_in_words(told: Mapping[str, Any]) -> str:
    """What `drives_as_json` has found: medians, and the range of all turns."""

    def seconds(of: str) -> str:
        turns = told["turns"][of]
        return f"{told[of]:.2f} s ({min(turns):.2f} to {max(turns):.2f})"

    num, cores = len(told["drives"]), told["together_processor_seconds"] / told["together_seconds"]
    return (
        f"{num} drives at {told['bytes_per_second'] / _MEGA:.0f} MB/s: {seconds('together_seconds')} a step, one alone "
        f"{seconds('alone_seconds')}: {told['ratio']:.2f}. The {num} processes used {cores:.1f} of {os.cpu_count()} cores."
    )
