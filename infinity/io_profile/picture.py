"""The picture: throughput over request size and over requests in flight, ours and fio's."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.io_profile.fio import FioSample
from infinity.io_profile.grid import WORKLOADS, Effort, Point, point_of, size_words
from infinity.io_profile.results import Results, median_rate
from swapper.measure.io_setting import Workload
from swapper.measure.measurement import Sample
from swapper.volumes.publish import replacing

MISSING = "no picture: matplotlib is not installed (pip install 'infinity-offload[plot]', or pip install matplotlib)"
_TITLES = ("sequential read", "sequential write", "mix of an optimizer step")  # in the order of WORKLOADS
_STYLES = {
    "threads": ("#1f6fb2", "o"),
    "uring": ("#2a9d6a", "s"),
    "aiofiles": ("#d08c2e", "^"),
    "fio, best engine": ("#333333", "x"),
}


def is_available() -> bool:
    """Whether pictures can be drawn here."""
    try:
        return importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # taken away from this process
        return False


def draw(path: Path, results: Results, effort: Effort, subtitle: str) -> None:
    """Write the picture as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    sizes, depths = effort.over_sizes, effort.over_depths
    figure = Figure(figsize=(13, 7.6), layout="constrained")
    rows = figure.subplots(2, len(WORKLOADS), sharey="col")
    for column, workload in enumerate(WORKLOADS):
        for axes, points in ((rows[0][column], sizes), (rows[1][column], depths)):
            _draw_lines(axes, results, workload, points)
            axes.set_xlim(-0.3, len(points) - 0.7)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        rows[0][column].set_title(_title(results, workload, _TITLES[column]), fontsize=11)
        rows[0][column].set_xticks(range(len(sizes)), [size_words(point.request_bytes) for point in sizes])
        rows[0][column].set_xlabel("request size")
        rows[1][column].set_xticks(range(len(depths)), [str(point.depth) for point in depths])
        rows[1][column].set_xlabel("requests in flight")
    rows[0][0].set_ylabel(f"GB/s, {sizes[0].depth} requests in flight")
    rows[1][0].set_ylabel(f"GB/s, requests of {size_words(depths[0].request_bytes)}")
    found = {
        label: handle for axes in rows.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(found.values(), found, loc="outside lower center", ncols=max(1, len(found)), frameon=False)
    for axes in rows.flat:  # only now: it ends what shared axes do to fit each other's lines
        axes.set_ylim(bottom=0)
    partial = " (not finished)" if results.stopped_by else ""
    figure.suptitle(f"{subtitle}{partial}", fontsize=12, fontweight="bold")
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=130)


def _title(results: Results, workload: Workload, title: str) -> str:
    comparison = results.comparisons.get(workload)
    if comparison is None or not comparison.pairs:
        return title
    interval = f"{100 * comparison.interval.low:.0f}-{100 * comparison.interval.high:.0f} %"
    return f"{title}\nbest of ours: {100 * comparison.share:.0f} % of fio's best ({interval})"


def _draw_lines(axes: Any, results: Results, workload: Workload, points: Sequence[Point]) -> None:
    """A line for each backend and one for fio; the band is smallest to largest."""
    lines: dict[str, dict[int, Sequence[Sample | FioSample]]] = {}
    for place, point in enumerate(points):
        for (setting, of), samples in results.ours.items():
            if of is workload and point_of(setting) == point:
                lines.setdefault(setting.backend, {})[place] = samples
        job = results.best_fio(workload, point)
        if job is not None:
            lines.setdefault("fio, best engine", {})[place] = results.fio[job, workload]
    for name, found in lines.items():
        color, marker = _STYLES[name]
        rates = [[sample.bytes_per_second / 1e9 for sample in samples] for samples in found.values()]
        axes.fill_between(list(found), list(map(min, rates)), list(map(max, rates)), color=color, alpha=0.12, lw=0)
        axes.plot(
            list(found),
            [median_rate(samples) / 1e9 for samples in found.values()],
            color=color,
            marker=marker,
            markersize=5.5,
            linewidth=1.8,
            linestyle="--" if name.startswith("fio") else "-",
            label=name,
            zorder=3 if name.startswith("fio") else 2,
        )
