#!/usr/bin/env python3
"""Finds the largest model that trains within a memory limit: by plain torch, by offload to RAM, to the drive, and by a peer.

    python tools/bench_scale.py --limit 4GiB --nvme-path /mnt/nvme --png scale.png
    python tools/bench_scale.py --limit 1GiB --model 100m --most-layers 64
    python tools/bench_scale.py --peer deepspeed --peer-python DS/bin/python --json scale.json

Models differ by their number of layers, which is doubled and then halved towards the largest. Each try is a process of its
own in a memory control group (needs root, or a delegated group of version 2), which the kernel ends if it needs more. No group
and no file is left.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import bars
from bench.case import peers
from bench.measured.models import MODEL_SIZES, Workload
from bench.options import add_common, at_least_one, describe_machine, refuse, size
from bench.participant import Participant, ParticipantFailed, ParticipantSpec
from rich.table import Table

from infinity.cli.output import STDOUT, write_json
from infinity.console import Console

_BESIDE_BYTES, _LEAST_RAM_SHARE = 800 << 20, 0.5
"""Libraries, activations and what torch allocates for a while take so much of the limit where states stay in RAM."""
_DRIVE_SHARE = 0.2
"""Of the limit, what is ours to manage with states on a drive. The page cache needs some, too."""
# Errors of peers are whole tracebacks. The first line is shown.
_LINE_CHARACTERS = 160


@dataclass(frozen=True)
class Try:
    """One model, trained or not."""

    num_layers: int
    num_parameters: int = 0
    seconds_per_step: float = 0.0
    peak_bytes: int = 0
    """Of the control group: with the libraries, and with building the model."""
    problem: str | None = None
    """Why it did not train, in a line."""

    @property
    def figures(self) -> dict[str, float]:
        """What is printed and drawn."""
        return {
            "million parameters": self.num_parameters / 1e6,
            "seconds per step": self.seconds_per_step,
            "peak host memory, GB": self.peak_bytes / 1e9,
        }


@dataclass(frozen=True)
class Largest:
    """What came out for one way."""

    name: str
    best: Try
    """Without layers if none trained."""
    next: Try | None
    """The smallest that did not train; None if all that were asked for did."""


def ways(limit_bytes: int, peers: Sequence[ParticipantSpec]) -> dict[str, ParticipantSpec]:
    """By name: plain torch, ours with states in RAM, ours with everything on the drive, and others."""

    def ours(device: str, budget_bytes: float) -> ParticipantSpec:
        # A model that does not fit into the limit has to be built on the drive, by `infinity.Init`.
        settings = {"budget": int(budget_bytes), "device": device, "builds_on_drive": device == "nvme"}
        return ParticipantSpec(f"offload_{device}", "ours", settings)

    found = {
        "plain torch": ParticipantSpec("in_memory", "in_memory"),
        "offload to RAM": ours("cpu", max(limit_bytes - _BESIDE_BYTES, _LEAST_RAM_SHARE * limit_bytes)),
        "offload to the drive": ours("nvme", _DRIVE_SHARE * limit_bytes),
        **{spec.kind: spec for spec in peers},
    }
    return {name: replace(spec, memory_limit_bytes=limit_bytes) for name, spec in found.items()}


def attempt(spec: ParticipantSpec, workload: Workload, directory: Path, num_steps: int) -> Try:
    """Train the model for a step to warm up and so many more, in a process of its own."""
    layers = workload.size.num_layers
    try:
        # The group of the process has the limit; the kernel kills what exceeds it, and `Participant` says so.
        with Participant(spec, workload, directory, controllers=("memory",)) as participant:
            participant.run_turn(1, counts=False)
            turn = participant.run_turn(num_steps, counts=True)
            num_parameters = turn["description"]["num_parameters"]
            return Try(layers, num_parameters, turn["total_seconds"] / num_steps, participant.peak_bytes or 0)
    except ParticipantFailed as error:
        return Try(layers, problem=textwrap.shorten(str(error).splitlines()[0], _LINE_CHARACTERS))


def largest(name: str, most_layers: int, attempt_with: Callable[[int], Try]) -> Largest:
    """Double the layers until a model does not train, then halve the distance until neighbours are found.

    Args:
        name: of the way.
        most_layers: no model is larger.
        attempt_with: trains a model with so many layers.
    """
    # Example, if 11 layers train and 12 do not: tries 1, 2, 4, 8, 16 (fails), 12 (fails), 10, 11: best 11, failed 12.
    best, failed, layers = Try(0), None, 1
    while True:
        made = attempt_with(layers)
        if made.problem is None:
            best = made
        else:
            failed = made
        # Neighbours: the best and the smallest that failed. Or nothing failed up to `most_layers`.
        if best.num_layers == (most_layers if failed is None else failed.num_layers - 1):
            return Largest(name, best, failed)
        layers = min(2 * layers, most_layers) if failed is None else (best.num_layers + failed.num_layers) // 2


def _told(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def scale_table(results: list[Largest], limit_bytes: int) -> Table:
    """One row per way. Why a model did not train is told when it is tried."""
    made = Table(title=f"the largest model in {limit_bytes / 2**30:.2f} GiB", title_justify="left")
    for heading in ("", "layers", *Try(0).figures, "layers that did not train"):
        made.add_column(heading, justify="left" if heading == "" else "right")
    for each in results:
        figures = map(_told, each.best.figures.values())
        failed = str(each.next.num_layers) if each.next else ""
        made.add_row(each.name, str(each.best.num_layers or "none"), *figures, failed)
    return made


def draw(results: list[Largest], limit_bytes: int, path: Path) -> None:
    """Bars: parameters, seconds of a step and peak of each way. Needs matplotlib."""
    # "(or larger)": no failure bounds it from above.
    title = f"The largest model that trains in {limit_bytes / 2**30:.2f} GiB of host memory"
    names = [each.name if each.next else f"{each.name} (or larger)" for each in results]
    values = {name: [each.best.figures[name] for each in results] for name in Try(0).figures}
    bars.draw(path, title, names, {name: [(each, _told(each)) for each in row] for name, row in values.items()})


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; what cannot be measured here is refused before anything runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--limit", type=size, default=size("4GiB"), metavar="SIZE", help="of host memory (default: 4GiB)")
    add("--model", choices=MODEL_SIZES, default="374m", help="whose layers are repeated (default: 374m)")
    add("--most-layers", type=at_least_one, default=256, help="no model is larger (default: 256)")
    add("--seq-len", type=at_least_one, default=64, help="tokens of a sequence (default: 64)")
    add("--steps", type=at_least_one, default=1, help="of each try, behind one to warm up (default: 1)")
    add("--png", type=Path, help="draw it; needs matplotlib")
    add_common(parser)
    given = parser.parse_args(arguments)
    refuse(parser, given, memory=(True, "--limit", "use a machine that has them"))
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Try every way, and print, write and draw what was found."""
    asked = parse(sys.argv[1:] if arguments is None else arguments)
    console = Console(highlight=False, stderr=asked.json_file == Path(STDOUT))
    # Keeps the compiled extensions of the peer from run to run.
    asked.peer_build_dir.mkdir(parents=True, exist_ok=True)
    specs = peers(asked.peer_build_dir, asked.peer_python, ["small"]) if asked.peer else []
    results = []
    with tempfile.TemporaryDirectory(prefix="bench_scale_", dir=asked.nvme_path) as directory:

        def try_layers(way: str, spec: ParticipantSpec, layers: int) -> Try:
            workload = Workload(asked.model, layers, asked.dtype, seq_len=asked.seq_len, checkpointing="non-reentrant")
            made = attempt(spec, workload, Path(directory), asked.steps)
            told = made.problem or ", ".join(f"{name}: {_told(value)}" for name, value in made.figures.items())
            console.print(f"{way}, {layers} layers: {told}", markup=False, soft_wrap=True)
            return made

        for spec in specs:
            # Compilers need more memory than a model with one layer: once without the limit, what it compiles is there.
            if try_layers("without the limit", spec, 1).problem is not None:
                sys.exit("--peer does not train a model with one layer, without a limit.")
        for way, spec in ways(asked.limit, specs).items():
            results.append(largest(way, asked.most_layers, functools.partial(try_layers, way, spec)))
    console.print(scale_table(results, asked.limit))
    if asked.json_file is not None:
        machine, tried = describe_machine(asked.nvme_path), [asdict(each) for each in results]
        write_json({"limit_bytes": asked.limit, "machine": machine, "ways": tried}, asked.json_file)
    if asked.png is not None:
        draw(results, asked.limit, asked.png)


if __name__ == "__main__":
    main()
