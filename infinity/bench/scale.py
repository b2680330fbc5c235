"""The largest model that trains within so much memory: by plain torch, by offload to RAM, by offload to a drive, and by a peer.

Models differ by their number of layers. Each try is a process of its own in a memory control group: it trains, or the kernel
ends it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from infinity.bench.measured.models import Workload
from infinity.bench.participant import Participant, ParticipantFailed, ParticipantSpec

_BESIDE_BYTES, _LEAST_RAM_SHARE = 800 << 20, 0.5
"""Libraries, activations and what torch allocates for a while take so much of the limit where states stay in RAM."""
_DRIVE_SHARE = 0.2
"""Of the limit, what is ours to manage with states on a drive. The page cache needs some, too."""
_LINE_CHARACTERS = 160


@dataclass(frozen=True)
class Try:
    """One model, trained or not."""

    num_layers: int
    num_parameters: int | None = None
    seconds_per_step: float | None = None
    peak_bytes: int | None = None
    """Of the control group: with the libraries, and with building the model."""
    problem: str | None = None
    """Why it did not train, in a line."""


@dataclass(frozen=True)
class Largest:
    """What came out for one way."""

    name: str
    best: Try | None
    next: Try | None
    """The smallest that did not train; None if all that were asked for did."""


def ways(limit_bytes: int, peers: Sequence[ParticipantSpec]) -> dict[str, ParticipantSpec]:
    """By name: plain torch, ours with states in RAM, ours with everything on the drive, and others."""

    def ours(device: str, budget_bytes: float) -> ParticipantSpec:
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
        with Participant(spec, workload, directory, controllers=("memory",)) as participant:
            participant.run_turn(1, counts=False)
            turn = participant.run_turn(num_steps, counts=True)
            num_parameters = turn["description"]["num_parameters"]
            return Try(layers, num_parameters, turn["total_seconds"] / num_steps, participant.peak_bytes)
    except ParticipantFailed as error:
        return Try(layers, problem=textwrap.shorten(str(error).splitlines()[0], _LINE_CHARACTERS))


def largest(name: str, most_layers: int, attempt_with: Callable[[int], Try], tell: Callable[[Try], None]) -> Largest:
    """Double the layers until a model does not train, then halve the distance until neighbours are found.

    Args:
        name: of the way.
        most_layers: no model is larger.
        attempt_with: trains a model with so many layers.
        tell: is told of each try.
    """
    best: Try | None = None
    failed: Try | None = None
    layers = 1
    while True:
        made = attempt_with(layers)
        tell(made)
        if made.problem is None:
            best = made
        else:
            failed = made
        low = 0 if best is None else best.num_layers
        if failed is None:
            if low >= most_layers:
                return Largest(name, best, None)
            layers = min(2 * low, most_layers)
        elif failed.num_layers - low <= 1:
            return Largest(name, best, failed)
        else:
            layers = (low + failed.num_layers) // 2


def scale_table(results: list[Largest], limit_bytes: int) -> Table:
    """One row per way. Why a model did not train is told when it is tried."""
    made = Table(title=f"the largest model in {limit_bytes / 2**30:.2f} GiB", title_justify="left")
    for heading in ("", "layers", "parameters", "step", "peak", "layers that did not train"):
        made.add_column(heading, justify="left" if heading == "" else "right")
    for result in results:
        best, failed = result.best, result.next
        told = "" if failed is None else str(failed.num_layers)
        if best is None:
            made.add_row(result.name, "none", "", "", "", told)
            continue
        made.add_row(
            result.name,
            str(best.num_layers),
            f"{(best.num_parameters or 0) / 1e6:,.0f}M",
            f"{best.seconds_per_step or 0:.2f} s",
            f"{(best.peak_bytes or 0) / 1e9:.2f} GB",
            told,
        )
    return made


def draw(results: list[Largest], limit_bytes: int, path: Path) -> None:
    """Bars: parameters, seconds of a step and peak of each way. Needs matplotlib."""
    from matplotlib.figure import Figure

    panels: list[tuple[str, Callable[[Try], float]]] = [
        ("million parameters", lambda best: (best.num_parameters or 0) / 1e6),
        ("seconds per step", lambda best: best.seconds_per_step or 0.0),
        ("peak host memory, GB", lambda best: (best.peak_bytes or 0) / 1e9),
    ]
    figure = Figure(figsize=(13, 1.2 + 0.6 * len(results)), layout="tight")
    all_axes = figure.subplots(1, 3, sharey=True)
    for axes, (title, value) in zip(all_axes, panels, strict=True):
        values = [0.0 if each.best is None else value(each.best) for each in results]
        told = [f"{found:,.0f}" if found >= 100 else f"{found:.3g}" for found in values]
        if axes is all_axes[0]:  # nothing larger was asked for, or none trained
            told = [f"{text} or more" if each.next is None else text for each, text in zip(results, told, strict=True)]
        axes.bar_label(axes.barh([each.name for each in results], values), told, padding=3)
        axes.set_title(title)
        axes.margins(x=0.35)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].invert_yaxis()
    figure.suptitle(f"The largest model that trains in {limit_bytes / 2**30:.2f} GiB of host memory")
    figure.savefig(path, dpi=130)
