#!/usr/bin/env python3
"""Measures the training step: its time against the bound, its bytes against the prediction, host memory, and peers.

    python tools/bench_step.py --nvme-path /mnt/nvme --throttle 300,600,1200,none
    python tools/bench_step.py --throttle 600 --peer deepspeed --peer-python /path/to/venv/bin/python
    python tools/bench_step.py --throttle none --memory-limit 1.5GB --checkpointing non-reentrant --micro-batches 1,3

Each configuration runs in a process of its own. As root (control groups, version 1) each has its own memory limit,
drive speed and peak; without root only unthrottled times are measured. All that take part in a case take turns. What is
made on the way (processes, groups, files) is gone afterwards, also after Ctrl-C. The results go to a JSON file as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bench.case import Case, CaseResult, Schedule, available_controllers, peers, run_case
from bench.cgroup import block_device, why_unavailable
from bench.drive import Drive
from bench.machine import describe_machine, version_in
from bench.models import MODEL_SIZES, Workload
from bench.participant import ParticipantSpec
from bench.summary import IN_MEMORY, RECOMPUTING, bound_seconds, case_table, find_alone, machine_table, remarks

T = TypeVar("T")
console = Console(highlight=False, width=max(Console().width, 140))
_SCRATCH = "bench_step_"
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def list_of(convert: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Parses `1,2,3`."""

    def parse(text: str) -> list[T]:
        return [convert(item) for item in text.split(",")]

    return parse


def throttle(text: str) -> int | None:
    """MB/s, or `none`."""
    return None if text == "none" else int(text)


def size_bytes(text: str) -> int:
    """`1.5GB`, `512MiB`, or a number of bytes."""
    found = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    if found is None or found.group(2) not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 1.5GB or 512MiB")
    return int(float(found.group(1)) * _UNITS[found.group(2)])


def parse_arguments() -> argparse.Namespace:
    """Options that take lists are combined: every combination is one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", "--params", choices=MODEL_SIZES, default="374m")
    add("--layers", type=list_of(int), default=[None], help="number of layers, instead of the model's own")
    add("--seq-len", type=int, default=256, help="tokens per sequence (default 256)")
    add("--batch-size", type=int, default=1, help="sequences per micro-batch (default 1)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--micro-batches", type=list_of(int), default=[1], help="gradient accumulation steps, e.g. 1,3")
    add("--clip", type=list_of(float), default=[0.0], help="gradient clipping, 0 is off, e.g. 0,1")
    add("--checkpointing", type=list_of(str), default=["none"], help="none, reentrant, non-reentrant")
    add("--budget", type=list_of(str), default=["384MB"], help="host_memory_budget of ours (default 384MB)")
    add("--update", type=list_of(str), default=["auto"], help="infinity.update of ours, e.g. in_backward,deferred,step")
    add(
        "--schedule",
        type=list_of(str),
        default=["auto"],
        help="order of the micro-batches of ours: auto, vertical, ordinary",
    )
    add("--main-weights", choices=["remainder", "fp32"], default="remainder", help="infinity.main_weights of ours")
    add("--state-dtype", choices=["fp32", "bf16", "int8"], default="fp32", help="infinity.state_dtype of ours")
    add("--memory-limit", type=size_bytes, help="memory limit of ours, e.g. 1.5GB")
    add("--throttle", type=list_of(throttle), default=[600, None], help="MB/s each way, e.g. 300,600,1200,none")
    add("--peer", choices=["deepspeed"], help="run DeepSpeed in alternation, lean and pipelined, if it is installed")
    add("--peer-python", default=sys.executable, help="interpreter of the environment that holds the peer")
    add("--peer-build-dir", type=Path, default=Path.home() / ".cache" / "infinity-offload" / "peer_extensions")
    add("--without-ours", action="store_true", help="measure only the others")
    add(
        "--without-compute-alone",
        action="store_true",
        help="skip plain torch in memory: no bound then",
    )
    add("--turns", type=int, default=5, help="counted turns of each participant (default 5)")
    add("--steps-per-turn", type=int, default=2, help="steps of one turn (default 2); a turn ends with a flush")
    add("--warmup-steps", type=int, default=3, help="the first write into reserved space is slower (default 3)")
    add("--nvme-path", type=Path, default=Path(), help="directory on the drive (default: the current one)")
    add(
        "--timeline",
        type=Path,
        help="trace of ours for ui.perfetto.dev; with several cases, FILE-2.json and so on for those after the first",
    )
    add("--json", type=Path, default=Path("bench_step.json"), help="where the results go (default: bench_step.json)")
    arguments = parser.parse_args()
    check(parser, arguments)
    return arguments


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses what could not be measured here, before anything runs."""
    if not arguments.nvme_path.is_dir():
        parser.error(f"--nvme-path {arguments.nvme_path}: no such directory")
    if block_device(arguments.nvme_path) is None:
        parser.error(f"--nvme-path {arguments.nvme_path} lies on no block device: its bytes could not be counted")
    if arguments.timeline is not None and not arguments.timeline.absolute().parent.is_dir():
        parser.error(f"--timeline {arguments.timeline}: no such directory as {arguments.timeline.absolute().parent}")
    unknown = set(arguments.checkpointing) - {"none", "reentrant", "non-reentrant"}
    if unknown:
        parser.error(f"--checkpointing {', '.join(unknown)}: choose from none, reentrant, non-reentrant")
    for controller, wanted in (("blkio", any(arguments.throttle)), ("memory", arguments.memory_limit)):
        reason = why_unavailable(controller)
        if wanted and reason is not None:
            parser.error(f"{'--throttle' if controller == 'blkio' else '--memory-limit'} cannot be used: {reason}")
    if arguments.peer and version_in(arguments.peer_python, arguments.peer) is None:
        parser.error(f"{arguments.peer} is not installed for {arguments.peer_python}; name another with --peer-python")


def make_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Every workload at every speed of the drive, with compute alone in turns beside it; with peers once, before."""
    shape = {"model": arguments.model, "dtype": arguments.dtype, "batch_size": arguments.batch_size}
    numbers = itertools.count(1)
    settings = itertools.product(arguments.layers, arguments.checkpointing, arguments.clip, arguments.micro_batches)
    for layers, checkpointing, clip, micro_batches in settings:
        workload = Workload(
            **shape,
            seq_len=arguments.seq_len,
            num_layers=layers,
            checkpointing=checkpointing,
            clip=clip,
            num_micro_batches=micro_batches,
        )
        alone = [] if arguments.without_compute_alone else compute_alone(workload)
        if alone and (arguments.peer or arguments.without_ours):  # with peers, all at once would take too much memory
            yield Case(workload, None, tuple(alone))
            alone = []
        settings_of_case = (arguments.throttle, arguments.budget, arguments.update, arguments.schedule)
        for limit, budget, update, schedule in itertools.product(*settings_of_case):
            specs = []
            if not arguments.without_ours:
                settings_of_ours: dict[str, Any] = {
                    "budget": budget,
                    "update": update,
                    "schedule": schedule,
                    "main_weights": arguments.main_weights,
                    "state_dtype": arguments.state_dtype,
                }
                if arguments.timeline is not None:
                    number = next(numbers)
                    settings_of_ours["timeline"] = str(numbered(arguments.timeline.absolute(), number))
                specs.append(
                    ParticipantSpec("ours", "ours", settings_of_ours, memory_limit_bytes=arguments.memory_limit)
                )
            if arguments.peer:
                specs += peers(arguments.peer_build_dir, arguments.peer_python)
            specs += alone
            if not specs:
                continue
            rate = None if limit is None else limit * 10**6
            yield Case(workload, limit, tuple(replace(spec, throttle_bytes_per_second=rate) for spec in specs))


def compute_alone(workload: Workload) -> list[ParticipantSpec]:
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
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def build_peer(arguments: argparse.Namespace, directory: Path) -> None:
    """Lets the peer compile its extensions in a run that is not measured: the compiler's memory is not the peer's."""
    console.print("the peer compiles its extensions: some minutes, this first time only")
    tiny = Case(Workload(model="tiny"), None, tuple(peers(arguments.peer_build_dir, arguments.peer_python)[:1]))
    try:
        run_case(CaseResult(tiny), directory, Schedule(1, 1, 1), lambda _: None, measure_drive=False)
    except BaseException:
        # Half a build holds locks for which the next one would wait for ever.
        for path in arguments.peer_build_dir.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        raise


def report(result: CaseResult, results: list[CaseResult]) -> None:
    """Prints one case."""
    alone = find_alone(results, result)
    console.print(case_table(result, alone))
    for line in remarks(result, alone):
        console.print("  " + line, markup=False, soft_wrap=True)


def write_json(path: Path, facts: dict[str, Any], results: list[CaseResult]) -> None:
    """Machine, command and every turn of every case; also what a table does not show."""
    cases = []
    for result in results:
        alone, ours = find_alone(results, result), result.outcome("ours")
        bound = bound_seconds(result, ours, alone) if ours is not None else None
        ratio = None if ours is None or bound is None else ours.median_seconds / bound
        cases.append(result.as_json() | {"bound_seconds": bound, "step_over_bound": ratio})
    path.write_text(json.dumps({"machine": facts, "command": sys.argv, "cases": cases}, indent=1) + "\n")


def main() -> int:
    """Returns 0, 1 if a participant failed, 130 after Ctrl-C."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    facts = describe_machine(arguments.nvme_path)
    if arguments.peer:
        facts[arguments.peer] = version_in(arguments.peer_python, arguments.peer)
        arguments.peer_build_dir.mkdir(parents=True, exist_ok=True)
    facts["control groups"] = ", ".join(available_controllers()) or "none: no limits, no peaks"
    console.print(machine_table(facts))
    if facts["load_average"] > facts["num_cores"] / 2:
        console.print("[yellow]The machine is busy with other work: times will be long and vary.[/yellow]")
    schedule = Schedule(arguments.warmup_steps, arguments.turns, arguments.steps_per_turn)
    results: list[CaseResult] = []
    code = 0
    remove_stale(arguments.nvme_path)
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}_", dir=arguments.nvme_path) as directory:
        try:
            if arguments.peer and not any(arguments.peer_build_dir.iterdir()):
                build_peer(arguments, Path(directory))
            for case in make_cases(arguments):
                result = CaseResult(case)
                results.append(result)
                is_offloading = any(spec.kind != "in_memory" for spec in case.specs)
                measure_drive = is_offloading and Drive.is_available()
                run_case(result, Path(directory), schedule, console.print, measure_drive=measure_drive)
                if is_offloading:
                    report(result, results)
                code = max(code, int(any(outcome.error for outcome in result.outcomes)))
        except KeyboardInterrupt:
            console.print("interrupted; what was measured so far:" if results else "interrupted before the first case")
            if results:
                report(results[-1], results)
            code = 130
        finally:
            write_json(arguments.json, facts, results)
            console.print(f"results: {arguments.json}")
    return code


if __name__ == "__main__":
    sys.exit(main())
