"""The order of a run: what is asked, refused before anything runs; its cases, one after the other; and their results."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.case import Case, CaseResult, Schedule, available_controllers, peers, run_case
from infinity.bench.cgroup import block_device, why_unavailable
from infinity.bench.drive import is_available
from infinity.bench.machine import describe_machine, version_in
from infinity.bench.measured.models import Workload
from infinity.bench.participant import ParticipantSpec
from infinity.bench.summary import (
    IN_MEMORY,
    RECOMPUTING,
    bound_seconds,
    case_table,
    find_alone,
    machine_table,
    remarks,
)
from infinity.cli.output import STDOUT, write_json
from swapper.volumes.publish import is_marked, mark

_SCRATCH = "bench_step_"
_INTERRUPTED = 130


@dataclass(frozen=True)
class Asked:
    """What is measured. Every combination of what is in tuples is one case."""

    model: str
    layers: tuple[int | None, ...]
    seq_len: int
    batch_size: int
    dtype: str
    micro_batches: tuple[int, ...]
    clip: tuple[float, ...]
    checkpointing: tuple[str, ...]
    budget: tuple[str, ...]
    update: tuple[str, ...]
    schedule: tuple[str, ...]
    main_weights: str
    state_dtype: str
    memory_limit: int | None
    """Bytes, of ours."""
    throttle: tuple[int | None, ...]
    """MB/s each way; None: as fast as the drive is."""
    peer: str | None
    peer_python: str
    peer_build_dir: Path
    without_ours: bool
    without_compute_alone: bool
    turns: int
    steps_per_turn: int
    warmup_steps: int
    nvme_path: Path
    timeline: Path | None


def place_problem(path: Path) -> str | None:
    """Why nothing could be measured in that directory, with its cure."""
    if not path.is_dir():
        return f"--nvme-path {path}: no such directory; name one on the drive"
    if not os.access(path, os.W_OK):
        return f"--nvme-path {path} cannot be written to; change its permissions, or name another one"
    if block_device(path) is None:
        return (
            f"--nvme-path {path} lies on no block device, so its bytes could not be counted; "
            "name a directory on a drive"
        )
    return None


def peer_problem(peer: str | None, python: str) -> str | None:
    """Why the peer could not be measured, with its cure."""
    if peer and shutil.which(python) is None:
        return f"--peer-python {python}: no such program; name the Python of the peer's environment"
    if peer and version_in(python, peer) is None:
        return f"{peer} is not installed for {python}; name another with --peer-python"
    return None


def problem_of(asked: Asked) -> str | None:
    """What could not be measured here, with its cure; None if all can."""
    if (problem := place_problem(asked.nvme_path)) is not None:
        return problem
    if asked.timeline is not None and not asked.timeline.absolute().parent.is_dir():
        return f"--timeline {asked.timeline}: there is no directory {asked.timeline.absolute().parent}; create it first"
    for controller, wanted, option in (
        ("blkio", any(asked.throttle), "--throttle"),
        ("memory", asked.memory_limit, "--memory-limit"),
    ):
        reason = why_unavailable(controller)
        if wanted and reason is not None:
            cure = "pass --throttle none" if controller == "blkio" else "leave it out"
            return f"{option} cannot be used: {reason}; {cure}"
    return peer_problem(asked.peer, asked.peer_python)


def make_cases(asked: Asked) -> Iterator[Case]:
    """Every workload at every speed of the drive, with compute alone in turns beside it; with peers once, before."""
    numbers = itertools.count(1)
    settings = itertools.product(asked.layers, asked.checkpointing, asked.clip, asked.micro_batches)
    for layers, checkpointing, clip, micro_batches in settings:
        workload = Workload(
            asked.model, layers, asked.dtype, asked.batch_size, asked.seq_len, micro_batches, clip, checkpointing
        )
        alone = [] if asked.without_compute_alone else _compute_alone(workload)
        if alone and (asked.peer or asked.without_ours):  # with peers, all at once would take too much memory
            yield Case(workload, None, tuple(alone))
            alone = []
        settings_of_case = (asked.throttle, asked.budget, asked.update, asked.schedule)
        for limit, budget, update, schedule in itertools.product(*settings_of_case):
            specs = []
            if not asked.without_ours:
                settings_of_ours: dict[str, Any] = {
                    "budget": budget,
                    "update": update,
                    "schedule": schedule,
                    "main_weights": asked.main_weights,
                    "state_dtype": asked.state_dtype,
                }
                if asked.timeline is not None:
                    settings_of_ours["timeline"] = str(numbered(asked.timeline.absolute(), next(numbers)))
                specs.append(ParticipantSpec("ours", "ours", settings_of_ours, memory_limit_bytes=asked.memory_limit))
            if asked.peer:
                specs += peers(asked.peer_build_dir, asked.peer_python)
            specs += alone
            if specs:
                yield Case(workload, limit, tuple(specs))


def _compute_alone(workload: Workload) -> list[ParticipantSpec]:
    """Plain torch in memory; with several micro-batches also as a vertical step computes: each block once more."""
    alone = [ParticipantSpec(IN_MEMORY, "in_memory")]
    if workload.num_micro_batches > 1 and workload.checkpointing == "none":
        alone.append(ParticipantSpec(RECOMPUTING, "in_memory", {"checkpointing": "non-reentrant"}))
    return alone


def numbered(path: Path, number: int) -> Path:
    """`trace.json`, `trace-2.json`, `trace-3.json`, ..."""
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def remove_stale(directory: Path) -> None:
    """Removes what a benchmark that was killed outright could not: a peer's swap files among it."""
    for path in directory.glob(f"{_SCRATCH}*"):
        pid = path.name.removeprefix(_SCRATCH).split("_")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and is_marked(path):
            shutil.rmtree(path, ignore_errors=True)


def build_peer(asked: Asked, directory: Path, console: Console) -> None:
    """Lets the peer compile its extensions in a run that is not measured: the compiler's memory is not the peer's."""
    console.print("the peer compiles its extensions: some minutes, this first time only")
    tiny = Case(Workload(model="tiny"), None, tuple(peers(asked.peer_build_dir, asked.peer_python)[:1]))
    try:
        run_case(CaseResult(tiny), directory, Schedule(1, 1, 1), lambda _: None, measure_drive=False)
    except BaseException:
        # Half a build holds locks for which the next one would wait for ever.
        for path in asked.peer_build_dir.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        raise


def report(result: CaseResult, results: list[CaseResult], console: Console) -> None:
    """Prints one case."""
    alone = find_alone(results, result)
    console.print(case_table(result, alone))
    for line in remarks(result, alone):
        console.print("  " + line, markup=False, soft_wrap=True)


def as_json(facts: dict[str, Any], results: list[CaseResult]) -> dict[str, Any]:
    """Machine, command and every turn of every case; also what a table does not show."""
    cases = []
    for result in results:
        alone, ours = find_alone(results, result), result.outcome("ours")
        bound = bound_seconds(result, ours, alone) if ours is not None else None
        ratio = None if ours is None or bound is None else ours.median_seconds / bound
        cases.append(result.as_json() | {"bound_seconds": bound, "step_over_bound": ratio})
    return {"machine": facts, "command": sys.argv, "cases": cases}


def run(asked: Asked, console: Console, json_file: Path) -> int:
    """Measure what is asked.

    Args:
        asked: what `problem_of` finds nothing in.
        console: takes tables and progress.
        json_file: takes the results, also those of an interrupted run; see `write_json`.

    Returns:
        The exit code: 0, 1 if a participant failed, 130 after Ctrl-C or SIGTERM.
    """
    facts = describe_machine(asked.nvme_path)
    if asked.peer:
        facts[asked.peer] = version_in(asked.peer_python, asked.peer)
        asked.peer_build_dir.mkdir(parents=True, exist_ok=True)
    facts["control groups"] = ", ".join(available_controllers()) or "none: no limits, no peaks"
    console.print(machine_table(facts))
    if facts["load_average"] > facts["num_cores"] / 2:
        console.print("[yellow]The machine is busy with other work: times will be long and vary.[/yellow]")
    results: list[CaseResult] = []
    remove_stale(asked.nvme_path)
    # Ctrl-C and SIGTERM are one thing. A process that was started in the background ignores the first by default.
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}_", dir=asked.nvme_path) as directory:
            os.close(mark(Path(directory)))
            code = _run_cases(asked, Path(directory), results, console)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        write_json(as_json(facts, results), json_file)
    if json_file != Path(STDOUT):
        console.print(f"results: {json_file}", markup=False)
    return code


def _run_cases(asked: Asked, directory: Path, results: list[CaseResult], console: Console) -> int:
    schedule = Schedule(asked.warmup_steps, asked.turns, asked.steps_per_turn)
    code = 0
    try:
        if asked.peer and not any(asked.peer_build_dir.iterdir()):
            build_peer(asked, directory, console)
        for case in make_cases(asked):
            result = CaseResult(case)
            results.append(result)
            is_offloading = any(spec.kind != "in_memory" for spec in case.specs)
            run_case(result, directory, schedule, console.print, measure_drive=is_offloading and is_available())
            if is_offloading:
                report(result, results, console)
            code = max(code, int(any(outcome.error for outcome in result.outcomes)))
    except KeyboardInterrupt:
        console.print("interrupted; what was measured so far:" if results else "interrupted before the first case")
        if results:
            report(results[-1], results, console)
        return _INTERRUPTED
    return code
