"""``infinity bench``: the training step against what bounds it and beside its peers, and updates alone."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from infinity.bench.cgroup import why_unavailable
from infinity.bench.measured.models import MODEL_SIZES, Workload
from infinity.cli.checkpoint import SIZE
from infinity.cli.output import STDOUT, PathType, check_output, check_picture, json_or_file_option, write_json

if TYPE_CHECKING:
    from infinity.bench.participant import ParticipantSpec

_RESULTS = "bench_step.json"
_PICTURES = (".png", ".svg", ".pdf")
_WIDTH = 140
_BUILD_DIR = Path(os.path.expanduser("~/.cache/infinity-offload/peer_extensions"))
_AT_LEAST_ONE = click.IntRange(min=1)


if TYPE_CHECKING:
    _TupleType = click.ParamType[tuple[Any, ...]]
else:
    _TupleType = click.ParamType  # generic since click 8.4


class _Listed(_TupleType):
    """``1,2,3``: each of them is measured."""

    name = "list"

    def __init__(self, each: click.ParamType[Any] | Callable[[str], Any], example: str) -> None:
        self._each, self._example = click.types.convert_type(each), example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._each.convert(text.strip(), None, None) for text in value.split(","))
        except click.BadParameter:
            self.fail(f"{value!r} cannot be measured; give one or several, such as {self._example}", param, ctx)


def _norm(text: str) -> float:
    if not 0 <= (number := float(text)) < float("inf"):
        raise ValueError
    return number


def _speed(text: str) -> int | None:
    if text != "none" and int(text) < 1:
        raise ValueError
    return None if text == "none" else int(text)


def _size(text: str) -> str:
    from infinity.config.schema.quantities import parse_bytes

    parse_bytes(text)
    return text


def _one_of(*names: str) -> _Listed:
    return _Listed(click.Choice(names), ",".join(names))


@click.group()
def bench() -> None:
    """Measure the training step against what bounds it and beside its peers, or updates alone."""


_dtype_option = click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Processors without bfloat16 compute faster in float32.",
)
_peer_python_option = click.option(
    "--peer-python", default=sys.executable, help="Python of the environment that holds the peer."
)
_peer_build_option = click.option(
    "--peer-build-dir", type=PathType(), default=_BUILD_DIR, help="Keeps what the peer compiles."
)
_place_option = click.option(
    "--nvme-path", type=PathType(), default=Path(), help="On the drive; by default the present one."
)


@bench.command(
    epilog="""\b
Examples:
  infinity bench step --nvme-path /mnt/nvme --throttle 300,600,1200,none
  infinity bench step --throttle 600 --peer deepspeed --peer-python DS/bin/python
  infinity bench step --throttle none --memory-limit 1.5GB --checkpointing non-reentrant --micro-batches 1,3
  infinity bench step --model tiny --throttle none --turns 1 --json | jq '.cases[].step_over_bound'"""
)
@click.option(
    "--model", "--params", type=click.Choice(list(MODEL_SIZES)), default="374m", show_default=True, help="Its size."
)
@click.option(
    "--layers",
    type=_Listed(_AT_LEAST_ONE, "12,24"),
    default=(None,),
    help="So many instead of the model's own, e.g. 12,24.",
)
@click.option("--seq-len", type=_AT_LEAST_ONE, default=256, show_default=True, help="Tokens of a sequence.")
@click.option("--batch-size", type=_AT_LEAST_ONE, default=1, show_default=True, help="Sequences of a micro-batch.")
@_dtype_option
@click.option(
    "--micro-batches", type=_Listed(_AT_LEAST_ONE, "1,3"), default=(1,), help="Of a step, e.g. 1,3; 1 by default."
)
@click.option("--clip", type=_Listed(_norm, "0,1"), default=(0.0,), help="Norms, e.g. 0,1; 0, the default, is off.")
@click.option(
    "--checkpointing",
    type=_one_of("none", "reentrant", "non-reentrant"),
    default=("none",),
    help="Of the model's blocks: none (the default), reentrant, non-reentrant.",
)
@click.option(
    "--budget", type=_Listed(_size, "384MB,2GB"), default=("384MB",), help="Of host memory; 384MB by default."
)
@click.option(
    "--update",
    type=_one_of("auto", "in_backward", "deferred", "step"),
    default=("auto",),
    help="infinity.update of ours: auto (the default), in_backward, deferred, step.",
)
@click.option(
    "--schedule",
    type=_one_of("auto", "vertical", "ordinary"),
    default=("auto",),
    help="Order of our micro-batches: auto (the default), vertical, ordinary.",
)
@click.option("--main-weights", type=click.Choice(["remainder", "fp32"]), default="remainder", show_default=True)
@click.option("--state-dtype", type=click.Choice(["fp32", "bf16", "int8"]), default="fp32", show_default=True)
@click.option("--memory-limit", type=SIZE, metavar="SIZE", help="Of ours, by a control group, e.g. 1.5GB.")
@click.option(
    "--throttle",
    type=_Listed(_speed, "300,600,none"),
    default=(600, None),
    help="MB/s each way, e.g. 300,none; 600,none by default.",
)
@click.option("--peer", type=click.Choice(["deepspeed"]), help="Takes turns with us, lean and pipelined.")
@_peer_python_option
@_peer_build_option
@click.option("--without-ours", is_flag=True, help="Measure only the others.")
@click.option("--without-compute-alone", is_flag=True, help="Leave out plain torch in memory: no bound then.")
@click.option("--turns", type=_AT_LEAST_ONE, default=5, show_default=True, help="Of each, that count.")
@click.option("--steps-per-turn", type=_AT_LEAST_ONE, default=2, show_default=True, help="A turn ends with a flush.")
@click.option(
    "--warmup-steps",
    type=_AT_LEAST_ONE,
    default=3,
    show_default=True,
    help="The first write into reserved space is slower.",
)
@_place_option
@click.option(
    "--timeline",
    type=PathType(),
    help="Trace of ours for ui.perfetto.dev; with several cases FILE-2, ...",
)
@json_or_file_option
def step(json_file: Path | None, **options: Any) -> int:
    """Measure the training step: its time against the bound, its bytes against the prediction, host memory, and peers.

    Lists (1,2,3) are combined: every combination is a case. Each program runs in a process of its own, and all that take part in
    a case take turns. With control groups (root, or a delegated group of version 2) each has its own memory limit, drive speed
    and peak; without them only unthrottled times are measured. What is made on the way (processes, groups, files) is gone
    afterwards, also after Ctrl-C. The results are written to bench_step.json, if --json names no other file. Exit status 1 if a
    program failed.
    """
    from infinity.bench import program
    from infinity.console import Console

    asked = program.Asked(**options)
    path = json_file or Path(_RESULTS)
    if (problem := program.problem_of(asked)) is not None:
        raise click.UsageError(f"{problem}.")
    check_output(path)
    is_printed = path == Path(STDOUT)
    width = max(Console().width, _WIDTH)
    return program.run(asked, Console(highlight=False, stderr=is_printed, width=width), path)


@bench.command(
    epilog="""\b
Examples:
  infinity bench update
  infinity bench update --workers 1,2,4 --parameters 200e6 --turns 9
  infinity bench update --json | jq .chunk_seconds"""
)
@click.option(
    "--workers", type=_Listed(_AT_LEAST_ONE, "1,2,4"), default=(1, 2), help="Numbers of them; 1,2 by default."
)
@click.option(
    "--parameters", type=click.FloatRange(min=1), default=67e6, show_default=True, help="About as many are updated."
)
@click.option("--turns", type=_AT_LEAST_ONE, default=7, show_default=True, help="That count.")
@json_or_file_option
def update(workers: tuple[int, ...], parameters: float, turns: int, json_file: Path | None) -> None:
    """Measure updates alone: all states in memory, the model idle, the least of alternating turns.

    What a chunk costs beside its arithmetic; how much faster several workers are than the first number of them; the share of the
    machine's copy bandwidth; and the same update by torch's own fused AdamW. Wall-clock figures need an idle machine.
    """
    from infinity.bench.updates import measure_updates
    from infinity.console import Console

    found = measure_updates(workers, parameters, turns)
    if json_file is not None:
        write_json(asdict(found), json_file)
    if json_file == Path(STDOUT):
        return
    console = Console(highlight=False)
    console.print(found.table())
    console.print(f"a chunk costs {found.chunk_seconds * 1e3:.3f} ms of processor time beside its arithmetic")


@bench.command(
    epilog="""\b
Examples:
  infinity bench scale --limit 4GiB --nvme-path /mnt/nvme
  infinity bench scale --limit 1GiB --model 100m --most-layers 64 --png scale.png
  infinity bench scale --peer deepspeed --peer-python DS/bin/python --json scale.json"""
)
@click.option("--limit", type=SIZE, default="4GiB", show_default=True, metavar="SIZE", help="Of host memory.")
@click.option(
    "--model",
    type=click.Choice(list(MODEL_SIZES)),
    default="374m",
    show_default=True,
    help="Whose layers are repeated.",
)
@click.option("--most-layers", type=_AT_LEAST_ONE, default=256, show_default=True, help="No model is larger.")
@click.option("--seq-len", type=_AT_LEAST_ONE, default=64, show_default=True, help="Tokens of a sequence.")
@_dtype_option
@click.option("--steps", type=_AT_LEAST_ONE, default=1, show_default=True, help="Of each try, behind one to warm up.")
@click.option("--peer", type=click.Choice(["deepspeed"]), help="Tries as well, with settings for low memory.")
@_peer_python_option
@_peer_build_option
@_place_option
@click.option("--png", type=PathType(dir_okay=False), help="Draw it. Needs matplotlib.")
@json_or_file_option
def scale(
    limit: int,
    model: str,
    most_layers: int,
    seq_len: int,
    dtype: str,
    steps: int,
    peer: str | None,
    peer_python: str,
    peer_build_dir: Path,
    nvme_path: Path,
    png: Path | None,
    json_file: Path | None,
) -> None:
    """Find the largest model that trains within a memory limit: by plain torch, by offload to RAM, by offload to the drive.

    Models differ by their number of layers, which is doubled and then halved towards the largest. Each try is a process of its
    own in a memory control group (needs root, or a delegated group of version 2), which the kernel ends if it needs more. No
    group and no file is left.
    """
    from infinity.bench import program
    from infinity.bench import scale as scaling
    from infinity.bench.case import peers
    from infinity.bench.machine import describe_machine
    from infinity.console import Console

    problem = program.place_problem(nvme_path) or program.peer_problem(peer, peer_python)
    if problem is None and (reason := why_unavailable("memory")) is not None:
        problem = f"--limit cannot be used: {reason}"
    if problem is not None:
        raise click.UsageError(f"{problem}.")
    if png is not None:
        check_picture(png, "--png", _PICTURES)
    console = Console(highlight=False, stderr=json_file == Path(STDOUT))
    peer_build_dir.mkdir(parents=True, exist_ok=True)
    specs = peers(peer_build_dir, peer_python, ["small"]) if peer else []
    results = []
    with tempfile.TemporaryDirectory(prefix="bench_scale_", dir=nvme_path) as directory:

        def attempt(spec: ParticipantSpec, layers: int) -> scaling.Try:
            workload = Workload(model, layers, dtype, seq_len=seq_len, checkpointing="non-reentrant")
            return scaling.attempt(spec, workload, Path(directory), steps)

        for spec in specs:
            # Compilers need more memory than a model with one layer: once without the limit, what it compiles is there.
            if (problem := attempt(spec, 1).problem) is not None:
                raise click.UsageError(f"--peer does not train a model with one layer, without a limit: {problem}.")
        for way, spec in scaling.ways(limit, specs).items():

            def tell(made: scaling.Try, way: str = way) -> None:
                peak = f"peak {(made.peak_bytes or 0) / 1e9:.2f} GB"
                what = made.problem or f"{made.seconds_per_step:.2f} s per step, {peak}"
                console.print(f"{way}, {made.num_layers} layers: {what}", markup=False, soft_wrap=True)

            results.append(scaling.largest(way, most_layers, functools.partial(attempt, spec), tell))
    console.print(scaling.scale_table(results, limit))
    if json_file is not None:
        tried = [asdict(each) for each in results]
        write_json({"limit_bytes": limit, "machine": describe_machine(nvme_path), "ways": tried}, json_file)
    if png is not None:
        scaling.draw(results, limit, png)


@bench.command(
    epilog="""\b
Examples:
  infinity bench ranks
  infinity bench ranks --ranks 1,2 --stages 1,3 --nvme-path /mnt/nvme
  infinity bench ranks --drives /mnt/nvme0,/mnt/nvme1 --throttle 300
  infinity bench ranks --json | jq '.stages[].ranks[].deviations'"""
)
@click.option(
    "--ranks", type=_Listed(_AT_LEAST_ONE, "1,2,4,8"), default=(1, 2, 4, 8), help="Numbers of them; 1,2,4,8 by default."
)
@click.option("--stages", type=_one_of("0", "1", "2", "3"), default=(1, 3), help="Of ZeRO, of 0 to 3; 1,3 by default.")
@click.option("--layers", type=_AT_LEAST_ONE, help="Of the model; 8 by default, with --drives 32.")
@click.option("--width", type=click.IntRange(min=64), default=1024, show_default=True, help="Of each layer, both ways.")
@click.option("--steps", type=_AT_LEAST_ONE, help="That count; 3 by default, with --drives 20.")
@click.option("--turns", type=_AT_LEAST_ONE, default=3, show_default=True, help="Of --drives.")
@click.option("--clip", type=click.FloatRange(min=0), default=0.0, help="Largest norm; 0, the default, is off.")
@_dtype_option
@click.option(
    "--drives",
    type=_Listed(Path, "/mnt/nvme0,/mnt/nvme1"),
    help="One rank on the first against one on each, at --throttle.",
)
@click.option(
    "--throttle", type=_AT_LEAST_ONE, default=300, show_default=True, help="MB/s each way of each of --drives."
)
@_place_option
@json_or_file_option
def ranks(
    ranks: tuple[int, ...],
    stages: tuple[str, ...],
    layers: int | None,
    width: int,
    steps: int | None,
    turns: int,
    clip: float,
    dtype: str,
    drives: tuple[Path, ...] | None,
    throttle: int,
    nvme_path: Path,
    json_file: Path | None,
) -> None:
    """Measure what each of N processes keeps, reads, writes and sends beside the ZeRO paper's formulas, or drives together.

    Processes are of this machine and meet over gloo. With --drives, in place of the table: the time of a step of one process on
    the first directory, and of one on each of them, each held to --throttle by a control group (needs root): by
    turns, medians. A step is that of a run, which begins with nothing read and ends with all written.
    """
    from infinity.bench import program
    from infinity.bench import ranks as measuring
    from infinity.bench.machine import describe_machine
    from infinity.console import Console

    problem = next((found for path in drives or (nvme_path,) if (found := program.place_problem(path))), None)
    if problem is None and drives is not None and (reason := why_unavailable("blkio")) is not None:
        problem = f"--drives cannot be used: {reason}"
    if drives is not None and len(drives) < 2:
        problem = f"--drives {drives[0]}: one drive is compared with nothing; name two or more, one for each process"
    if problem is not None:
        raise click.UsageError(f"{problem}.")
    console = Console(highlight=False, stderr=json_file == Path(STDOUT), width=max(Console().width, _WIDTH))
    told: dict[str, Any]
    layers = layers or (8 if drives is None else 32)
    steps = steps or (3 if drives is None else 20)
    jobs = [measuring.Job(int(stage), width, layers, steps, clip, dtype) for stage in stages]
    if drives is not None:
        told = measuring.drives_as_json(jobs[0], drives, throttle * 1_000_000, turns)
        console.print(measuring.drives_in_words(told))
    else:
        told = {"stages": [measuring.as_json(job, ranks, nvme_path, console.print) for job in jobs]}
    if json_file is not None:
        write_json({"machine": describe_machine(nvme_path), **told}, json_file)
