#!/usr/bin/env python3
"""Measures the training step: its time against the bound, its bytes against the prediction, host memory, and peers.

    python tools/bench_step.py --nvme-path /mnt/nvme --throttle 300,600,1200,none
    python tools/bench_step.py --throttle 600 --peer deepspeed --peer-python DS/bin/python
    python tools/bench_step.py --throttle 600 --against durable=true --against verify_checksums=true
    python tools/bench_step.py --throttle none --memory-limit 1.5GB --checkpointing non-reentrant --micro-batches 1,3

Lists (1,2,3) are combined: every combination is a case. Each program runs in a process of its own, and all programs of a case
take turns. With control groups (root, or a delegated group of version 2) each has its own memory limit, drive speed and peak;
without them only times at full speed are measured. Nothing is left behind, also after Ctrl-C, but the results: in
bench_step.json, if --json names no other file. Exit status 1 if a program failed.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.case import Case, CaseResult, Outcome, Schedule, available_controllers, has_fio, peers, run_case
from bench.measured.models import MODEL_SIZES, Workload
from bench.options import add_common, at_least_one, describe_machine, refuse, several, size, version_in
from bench.participant import ParticipantSpec
from rich.table import Table

from infinity.cli.output import STDOUT, write_json
from infinity.config.schema.quantities import parse_bytes
from infinity.console import Console

_INTERRUPTED = 130
# Characters: rich would fold the table to the 80 of a terminal that is none.
_WIDTH = 140
_CHECKPOINTING = ("none", "reentrant", "non-reentrant")
IN_MEMORY = "in_memory"
RECOMPUTING = "in_memory_recomputing"
"""Names of the participants that are compute alone. The second computes what a vertical step does."""

_GIGA = 1e9
# Bytes are per parameter and step. `peak` is the group's from start to end, `steady` that of the counted turns.
_COLUMNS = ("step (min-max)", "bound", "step/bound", "read", "written", "predicted", "peak", "steady", "VmHWM")


def _norm(text: str) -> float:
    if not 0 <= (number := float(text)) < float("inf"):
        raise ValueError
    return number


def _speed(text: str) -> int | None:
    return None if text == "none" else at_least_one(text)


def _budget(text: str) -> str:
    parse_bytes(text)
    return text


def _setting(text: str) -> tuple[str, str]:
    key, has_value, value = text.partition("=")
    if not key or not has_value:
        raise argparse.ArgumentTypeError(f"{text!r} is no setting; give a key and a value, such as update=deferred")
    return key, value


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; what cannot be measured here is refused before anything runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    counts = several(at_least_one, "1,3")
    add("--model", choices=MODEL_SIZES, default="374m", help="its size (default: 374m)")
    add("--layers", type=counts, default=(None,), help="so many instead of the model's own, e.g. 12,24")
    add("--seq-len", type=int, default=256, help="tokens of a sequence (default: 256)")
    add("--batch-size", type=int, default=1, help="sequences of a micro-batch (default: 1)")
    add("--micro-batches", type=counts, default=(1,), help="of a step, e.g. 1,3 (default: 1)")
    add("--clip", type=several(_norm, "0,1"), default=(0.0,), help="norms, e.g. 0,1; 0, the default, is off")
    add(
        "--checkpointing",
        type=several(lambda text: _CHECKPOINTING[_CHECKPOINTING.index(text)], ",".join(_CHECKPOINTING)),
        default=("none",),
        help=f"of the model's blocks: {', '.join(_CHECKPOINTING)} (default: none)",
    )
    add("--budget", type=several(_budget, "384MB,2GB"), default=("384MB",), help="of host memory (default: 384MB)")
    setting: dict[str, Any] = {"type": _setting, "action": "append", "default": [], "metavar": "KEY=VALUE"}
    add("--set", **setting, help="of our block `infinity`")
    add("--against", **setting, help="ours again, in turns, with it")
    add("--memory-limit", type=size, metavar="SIZE", help="of ours, by a control group, e.g. 1.5GB")
    speeds = several(_speed, "300,600,none")
    add("--throttle", type=speeds, default=(600, None), help="MB/s each way, e.g. 300,none (default: 600,none)")
    add("--without-compute-alone", action="store_true", help="leave out plain torch in memory: no bound then")
    add("--turns", type=int, default=5, help="of each, that count (default: 5)")
    add("--steps-per-turn", type=int, default=2, help="a turn ends with a flush (default: 2)")
    add("--warmup-steps", type=int, default=3, help="first writes into reserved space are slower (default: 3)")
    add("--timeline", type=Path, help="trace of ours for ui.perfetto.dev, of the last case")
    add_common(parser)
    given = parser.parse_args(arguments)
    # Results are always written, also without the option.
    given.json_file = given.json_file or Path("bench_step.json")
    # Limits of the drive need the controller blkio, limits of memory need memory: refused here, before anything runs.
    refuse(
        parser,
        given,
        blkio=(any(given.throttle), "--throttle", "pass --throttle none"),
        memory=(given.memory_limit is not None, "--memory-limit", "leave it out"),
    )
    return given


def make_cases(asked: argparse.Namespace) -> Iterator[Case]:
    """Every workload at every speed of the drive, with compute alone in turns beside it; with peers once, before."""
    settings = itertools.product(asked.layers, asked.checkpointing, asked.clip, asked.micro_batches)
    for layers, checkpointing, clip, micro_batches in settings:
        workload = Workload(
            asked.model, layers, asked.dtype, asked.batch_size, asked.seq_len, micro_batches, clip, checkpointing
        )
        # The bound of a step is the slower of drive and compute, so compute is measured as well.
        alone = [] if asked.without_compute_alone else _compute_alone(workload)
        if alone and asked.peer:  # with peers, all at once would take too much memory
            yield Case(workload, None, tuple(alone))
            alone = []
        # All participants of a case take turns under one limit of the drive.
        for limit, budget in itertools.product(asked.throttle, asked.budget):
            ours: dict[str, Any] = {"budget": budget, "infinity": dict(asked.set)}
            if asked.timeline is not None:
                ours["timeline"] = str(asked.timeline.absolute())
            specs = [ParticipantSpec("ours", "ours", ours, memory_limit_bytes=asked.memory_limit)]
            for key, value in asked.against:
                other = {"budget": budget, "infinity": dict(asked.set) | {key: value}}
                name = f"{key}={value}".replace("/", "_")  # of a directory and a control group as well
                specs.append(ParticipantSpec(name, "ours", other, memory_limit_bytes=asked.memory_limit))
            if asked.peer:
                specs += peers(asked.peer_build_dir, asked.peer_python)
            yield Case(workload, limit, (*specs, *alone))


def _compute_alone(workload: Workload) -> list[ParticipantSpec]:
    """Plain torch in memory; with several micro-batches also as a vertical step computes: each block once more."""
    alone = [ParticipantSpec(IN_MEMORY, "in_memory")]
    if workload.num_micro_batches > 1 and workload.checkpointing == "none":
        alone.append(ParticipantSpec(RECOMPUTING, "in_memory", {"checkpointing": "non-reentrant"}))
    return alone


def _build_peer(asked: argparse.Namespace, directory: Path, console: Console) -> None:
    """Lets the peer compile its extensions in a run that is not measured: the compiler's memory is not the peer's."""
    console.print("the peer compiles its extensions: some minutes, this first time only")
    # One turn of a tiny model is enough: DeepSpeed compiles when its engine is built.
    tiny = Case(Workload(model="tiny"), None, tuple(peers(asked.peer_build_dir, asked.peer_python)[:1]))
    try:
        run_case(CaseResult(tiny), directory, Schedule(1, 1, 1), lambda _: None, measure_drive=False)
    except BaseException:
        # Half a build holds locks for which the next one would wait for ever.
        for path in asked.peer_build_dir.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        raise


# ------------------------------------------------------------------------------------------------------------ tables


def machine_table(facts: Mapping[str, Any]) -> Table:
    """Machine and versions, one per line."""
    table = Table(title="Machine", show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), f"{value / _GIGA:.1f} GB" if name == "memory_bytes" else str(value))
    return table


def case_table(result: CaseResult, alone: Outcome | None) -> Table:
    """Step times, bytes and memory of every participant of one case."""
    table = Table(title=result.case.label, title_justify="left")
    table.add_column("")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    # Compute alone may have been measured in a case before this one.
    before = [alone] if alone is not None and alone not in result.outcomes else []
    for outcome in [*before, *result.outcomes]:
        if not outcome.seconds_per_step:
            table.add_row(outcome.name, "failed", *[""] * 8)
            continue
        # They move no bytes, so they have no bound.
        if outcome.name in (IN_MEMORY, RECOMPUTING):
            table.add_row(outcome.name, _times(outcome), "", "", "", "", "", *_memory(outcome))
            continue
        bound = bound_seconds(result, outcome, alone)
        parameters = outcome.description["num_parameters"]
        table.add_row(
            outcome.name,
            _times(outcome),
            "" if bound is None else f"{bound:.2f} s",
            "" if bound is None else f"{outcome.median_seconds / bound:.2f}",
            f"{outcome.read_bytes_per_step / parameters:.2f} B",
            f"{outcome.write_bytes_per_step / parameters:.2f} B",
            _predicted(outcome, parameters),
            *_memory(outcome),
        )
    return table


def remarks(result: CaseResult, alone: Outcome | None) -> list[str]:
    """Sentences under the table: what bounds the step, deviation from the prediction, ratios to the peers, failures."""
    lines = []
    ours = result.outcome("ours")
    if ours is not None:
        lines += _ours_remarks(result, ours, alone)
    if result.drive_samples:
        speeds = [sample.total_bytes_per_second / _GIGA for sample in result.drive_samples]
        lines.append(
            f"fio in the same proportion, between the turns: {statistics.median(speeds):.2f} GB/s read and written "
            f"together ({min(speeds):.2f}-{max(speeds):.2f})"
        )
    lines += [f"{outcome.name} failed: {outcome.error}" for outcome in result.outcomes if outcome.error]
    return lines


def bound_seconds(result: CaseResult, outcome: Outcome, alone: Outcome | None) -> float | None:
    """The slower of the outcome's bytes at the drive's speed and compute alone; None where one of them is unknown."""
    at_drive_speed = result.bytes_bound_seconds(outcome)
    if at_drive_speed is None or alone is None:
        return None
    # Drive and compute work side by side in the best case, so the slower one is the bound.
    return max(at_drive_speed, alone.median_seconds)


def find_alone(results: Sequence[CaseResult], result: CaseResult) -> Outcome | None:
    """The compute-alone run that `result` is held against, from the same case or from one before it.

    The one that recomputes, if our steps went vertically and so had to.
    """
    ours = result.outcome("ours")
    is_vertical = ours is not None and ours.schedule == "vertical"
    # A vertical step computes each block once more in backward.
    wanted = (RECOMPUTING, IN_MEMORY) if is_vertical else (IN_MEMORY,)
    # Compute does not depend on the drive: the same workload at another speed will do.
    same = [each for each in results if each.case.workload == result.case.workload and each is not result]
    for name in wanted:
        for each in [result, *same]:
            if (outcome := each.outcome(name)) is not None:
                return outcome
    return None


def _ours_remarks(result: CaseResult, ours: Outcome, alone: Outcome | None) -> list[str]:
    lines = []
    at_drive_speed = result.bytes_bound_seconds(ours)
    if at_drive_speed is not None and alone is not None:
        lines.append(
            f"bound of ours: bytes at the drive's speed {at_drive_speed:.2f} s, "
            f"compute alone ({alone.name}) {alone.median_seconds:.2f} s"
        )
    for word, measured in (("read", ours.read_bytes_per_step), ("write", ours.write_bytes_per_step)):
        predicted = ours.description.get(f"predicted_{word}_bytes")
        if predicted:
            lines.append(f"{word}: measured is {100 * (measured / predicted - 1):+.2f} % off the engine's prediction")
    off = [
        report["seconds"] / report["predicted_seconds"] - 1
        for turn in ours.turns
        for report in turn.get("reports", [])
        if report.get("predicted_seconds")
    ]
    if off:
        lines.append(
            f"step time: measured is {100 * statistics.median(off):+.1f} % off what the plan had said before each step "
            f"({100 * min(off):+.1f} to {100 * max(off):+.1f} %)"
        )
    if ours.busy_shares:
        shares = {name.removesuffix("_share"): f"{100 * share:.0f} %" for name, share in ours.busy_shares.items()}
        lines.append(
            f"busy, as a share of a step (median of the engine's reports): compute {shares['compute']}, "
            f"drive {shares['drive_busy']} (reads {shares['read_busy']}, writes {shares['write_busy']}), "
            f"optimizer {shares['optimizer']}; bound by: {ours.bound_by}"
        )
    for outcome in result.outcomes:
        if outcome.name in ("ours", IN_MEMORY, RECOMPUTING) or not outcome.seconds_per_step:
            continue
        ratio = f"{outcome.name} / ours: step {outcome.median_seconds / ours.median_seconds:.2f}"
        if outcome.peak_bytes and ours.peak_bytes:
            ratio += f", peak host memory {outcome.peak_bytes / ours.peak_bytes:.2f}"
        lines.append(ratio)
    return lines


def _times(outcome: Outcome) -> str:
    times = outcome.seconds_per_step
    return f"{outcome.median_seconds:.2f} s ({min(times):.2f}-{max(times):.2f})"


def _predicted(outcome: Outcome, parameters: int) -> str:
    read, written = (outcome.description.get(f"predicted_{word}_bytes") for word in ("read", "write"))
    return "" if read is None or written is None else f"{read / parameters:.2f} / {written / parameters:.2f}"


def _memory(outcome: Outcome) -> list[str]:
    sizes = (outcome.peak_bytes, outcome.steady_peak_bytes, outcome.high_water_bytes)
    return ["" if size is None else f"{size / _GIGA:.2f} GB" for size in sizes]


# --------------------------------------------------------------------------------------------------------------- runs


def _report(result: CaseResult, results: list[CaseResult], console: Console) -> None:
    alone = find_alone(results, result)
    console.print(case_table(result, alone))
    for line in remarks(result, alone):
        console.print("  " + line, markup=False, soft_wrap=True)


def _as_json(facts: dict[str, Any], results: list[CaseResult]) -> dict[str, Any]:
    """Machine, command and every turn of every case; also what a table does not show."""
    cases = []
    for result in results:
        alone, ours = find_alone(results, result), result.outcome("ours")
        # None without a throttle and without fio: then the speed of the drive is not known.
        bound = bound_seconds(result, ours, alone) if ours is not None else None
        ratio = None if ours is None or bound is None else ours.median_seconds / bound
        cases.append(result.as_json() | {"bound_seconds": bound, "step_over_bound": ratio})
    return {"machine": facts, "command": sys.argv, "cases": cases}


def _run_cases(asked: argparse.Namespace, directory: Path, results: list[CaseResult], console: Console) -> int:
    schedule = Schedule(asked.warmup_steps, asked.turns, asked.steps_per_turn)
    code = 0
    try:
        if asked.peer and not any(asked.peer_build_dir.iterdir()):
            _build_peer(asked, directory, console)
        for case in make_cases(asked):
            result = CaseResult(case)
            results.append(result)
            # A case of compute alone is not printed: later cases are held against it.
            is_offloading = any(spec.kind != "in_memory" for spec in case.specs)
            run_case(result, directory, schedule, console.print, measure_drive=is_offloading and has_fio)
            if is_offloading:
                _report(result, results, console)
            code = max(code, int(any(outcome.error for outcome in result.outcomes)))
    except KeyboardInterrupt:
        console.print("interrupted; what was measured so far:" if results else "interrupted before the first case")
        if results:
            # The case that was interrupted. Those before it are printed already.
            _report(results[-1], results, console)
        return _INTERRUPTED
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if a program failed, 130 after Ctrl-C or SIGTERM; results are written in any case."""
    asked = parse(sys.argv[1:] if arguments is None else arguments)
    is_printed = asked.json_file == Path(STDOUT)
    console = Console(highlight=False, stderr=is_printed, width=max(Console().width, _WIDTH))
    facts = describe_machine(asked.nvme_path)
    if asked.peer:
        facts[asked.peer] = version_in(asked.peer_python, asked.peer)
        asked.peer_build_dir.mkdir(parents=True, exist_ok=True)
    facts["control groups"] = ", ".join(available_controllers()) or "none: no limits, no peaks"
    console.print(machine_table(facts))
    # Half of the cores busy before the measurement begins.
    if facts["load_average"] > facts["num_cores"] / 2:
        console.print("[yellow]The machine is busy with other work: times will be long and vary.[/yellow]")
    results: list[CaseResult] = []
    # Ctrl-C and SIGTERM are one thing. A process that was started in the background ignores the first by default.
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with tempfile.TemporaryDirectory(prefix="bench_step_", dir=asked.nvme_path) as directory:
            code = _run_cases(asked, Path(directory), results, console)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        write_json(_as_json(facts, results), asked.json_file)
    if not is_printed:
        console.print(f"results: {asked.json_file}", markup=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
