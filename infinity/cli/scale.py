"""``infinity plan --scale``: the same model on 1 to 512 GPUs, as a table, JSON and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from infinity.cli.output import display, print_facts, print_json, table
from infinity.forecast import scale_picture
from infinity.forecast.scale import NUM_RANKS, STAGES, Cluster, Scale, Scaled, as_plain, beyond
from infinity.machine.finding import size


def show_scale(
    name: str, scale: Scale, cluster: Cluster, stages: Sequence[int], plot: Path | None, *, as_json: bool
) -> int:
    """Print and draw it; returns the exit status: 1 if it fits on none of these."""
    node = cluster.node
    if node.flops_per_second is None:
        raise click.UsageError(
            "--scale needs the GPU's speed: add --tflops (of a described machine nothing is measured)."
        )
    found = [scale.taken(stage, num_ranks) for stage in sorted(set(stages or STAGES)) for num_ranks in NUM_RANKS]
    fits = any(each.outcome.fits for each in found)
    notes = beyond([each.stage for each in found])
    if as_json:
        plain = {"model": name, "fits": fits, "cluster": dataclasses.asdict(cluster), "rows": [*map(as_plain, found)]}
        print_json({**plain, "notes": notes})
    else:
        _print_cluster(name, cluster, found[0].outcome.tokens)
        _print_table(_merged(found), has_gpu=not node.shares_host_memory)
        _print_notes(found, notes)
    if plot is not None:
        scale_picture.draw(plot, name.removesuffix(" parameters"), found)
    return 0 if fits else 1


def _merged(found: Sequence[Scaled]) -> dict[str, list[Scaled]]:
    """By stages; those that come to the same stand together."""
    by_stage: dict[int, list[Scaled]] = {}
    for each in found:
        by_stage.setdefault(each.stage, []).append(each)
    merged: dict[str, list[Scaled]] = {}
    for stage, rows in by_stage.items():
        alike = [key for key, other in merged.items() if _plain(other) == _plain(rows)]
        merged[f"{alike[0]}, {stage}" if alike else str(stage)] = merged.pop(alike[0]) if alike else rows
    return merged


def _plain(rows: Sequence[Scaled]) -> list[dict[str, object]]:
    return [{**as_plain(each), "stage": None} for each in rows]


def _print_cluster(name: str, cluster: Cluster, tokens: int) -> None:
    node = cluster.node
    drives = "no limit" if node.drive_free_bytes is None else size(node.drive_free_bytes)
    speed = "speed unknown" if node.bandwidth is None else f"{size(node.bandwidth.mixed_bytes_per_second)}/s both ways"
    each = "the CPU" if node.shares_host_memory else f"{size(node.device_free_bytes or 0)}"
    limits = (cluster.pcie_bytes_per_second, cluster.link_bytes_per_second, cluster.network_bytes_per_second)
    pcie, link, network = ("no limit" if limit is None else f"{size(limit)}/s" for limit in limits)
    print_facts(
        [
            ("model", name),
            ("a node", f"{cluster.gpus_per_node} ranks, memory {size(node.host_free_bytes)}, drives {drives}, {speed}"),
            ("a rank", f"{each}, {(node.flops_per_second or 0) / 1e12:,.3g} TFLOP/s, {tokens:,} tokens a step"),
            ("between", f"PCIe {pcie} each GPU, links {link} each GPU, network {network} each node"),
        ]
    )


def _print_table(merged: dict[str, list[Scaled]], *, has_gpu: bool) -> None:
    tiers = ["device", "host", "nvme"] if has_gpu else ["host", "nvme"]
    names = {"device": "GPU", "host": "memory", "nvme": "drives"}
    for stage, rows in merged.items():
        shown = table("GPUs", "offload", *(names[tier] for tier in tiers), "step, s", "tokens/s", "eff. %", "limit")
        for each in rows:
            outcome, time = each.outcome, each.time
            resting = outcome.plan.states_bytes if outcome.plan is not None and outcome.fits else {}
            cells = [f"{each.num_ranks}", f"{outcome.param_tier}/{outcome.optimizer_tier}"]
            cells += [_size(resting.get(tier, 0)) for tier in tiers]
            if time is None:
                shown.add_row(*cells, "unknown" if outcome.fits else "no room", "-", "-", "-")
                continue
            shown.add_row(
                *cells,
                _range(time.overlapped_seconds, time.seconds),
                _rounded(each.tokens_per_second or 0.0),
                _range(100 * time.efficiency, 100 * time.overlapped_efficiency),
                time.bound_by,
            )
        display(f"\nstage {stage}" if "," not in stage else f"\nstages {stage}")
        display(shown)


def _size(num_bytes: int) -> str:
    """With three digits at most."""
    if not num_bytes:
        return "-"
    value, unit = size(num_bytes).split()
    return f"{float(value):.3g} {unit}"


def _rounded(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _range(low: float, high: float) -> str:
    return "-".join(dict.fromkeys(map(_rounded, (low, high))))


def _print_notes(found: Sequence[Scaled], notes: Sequence[str]) -> None:
    display(
        "\noffload: of weights/states. GPU, memory, drives: what rests there, of one rank. step, eff. (efficiency): from all "
        "overlaps to nothing does, which is the ZeRO-Infinity paper's formula; tokens/s: all overlaps. Activations are not "
        "counted."
    )
    unknown = [each for each in found if each.outcome.fits and each.time is None]
    if unknown:
        display("Some steps are unknown: nobody knows how fast the drives are. Give --drive-speed.")
    refused = next((each for each in found if not each.outcome.fits), None)
    if refused is not None:
        where = f"stage {refused.stage}, {refused.num_ranks} GPU{'s' if refused.num_ranks > 1 else ''}"
        display(f"Does not fit ({where}): {refused.outcome.problem}.")
    for note in notes:
        display(note)
