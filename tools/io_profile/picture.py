"""The picture: throughput over request size and over requests in flight, ours and fio's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swapper.measure.measurement import Sample
from swapper.volumes.publish import replacing

from .fio import FioSample
from .grid import WORKLOADS, Grid, Point, point_of, size_words
from .results import Results, median_rate

MISSING = "no picture: matplotlib is not installed (pip install 'infinity-offload[plot]', or pip install matplotlib)"
_COLORS = {"threads": "#1f6fb2", "uring": "#2a9d6a", "aiofiles": "#d08c2e", "gds": "#8a5fbf", "fio": "#333333"}
_MARKERS = {"threads": "o", "uring": "s", "aiofiles": "^", "gds": "D", "fio": "x"}


def is_available() -> bool:
    """Whether pictures can be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(path: Path, results: Results, grid: Grid, subtitle: str) -> None:
    """Write the picture as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(2, len(WORKLOADS), figsize=(13, 7.6), sharey="col", layout="constrained")
    for column, workload in enumerate(WORKLOADS):
        _line(rows[0][column], results, workload, grid.over_sizes, by_size=True)
        _line(rows[1][column], results, workload, grid.over_depths, by_size=False)
        rows[0][column].set_title(_title(results, workload), fontsize=11)
    sizes, depths = grid.over_sizes, grid.over_depths
    rows[0][0].set_ylabel(f"GB/s, {sizes[0].depth} requests in flight")
    rows[1][0].set_ylabel(f"GB/s, requests of {size_words(depths[0].request_bytes)}")
    handles, labels = _legend(rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False)
    partial = " (not finished)" if results.stopped_by else ""
    figure.suptitle(f"{subtitle}{partial}", fontsize=12, fontweight="bold")
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=130)
    pyplot.close(figure)


def _title(results: Results, workload: Any) -> str:
    names = {"read": "sequential read", "write": "sequential write", "mixed": "mix of an optimizer step"}
    title = names[workload.value]
    comparison = results.comparisons.get(workload)
    if comparison is not None and comparison.pairs:
        interval = comparison.interval
        title += (
            f"\nbest of ours: {100 * comparison.share:.0f} % of fio's best "
            f"({100 * interval.low:.0f}-{100 * interval.high:.0f} %)"
        )
    return title


def _line(axes: Any, results: Results, workload: Any, points: Sequence[Point], *, by_size: bool) -> None:
    """One panel: a line for each backend and one for fio; the band is smallest to largest."""
    lines: dict[str, dict[Point, Sequence[Sample | FioSample]]] = {}
    for point in points:
        for (setting, of), samples in results.ours.items():
            if of is workload and point_of(setting) == point:
                lines.setdefault(setting.backend, {})[point] = samples
        theirs = results.fio_at(point, workload)
        if theirs is not None:
            lines.setdefault("fio", {})[point] = theirs[1]
    places = {point: number for number, point in enumerate(points)}
    for name, found in lines.items():
        xs = [places[point] for point in found]
        rates = [[sample.bytes_per_second / 1e9 for sample in samples] for samples in found.values()]
        color = _COLORS.get(name, "#777777")
        axes.fill_between(
            xs, [min(each) for each in rates], [max(each) for each in rates], color=color, alpha=0.12, lw=0
        )
        axes.plot(
            xs,
            [median_rate(samples) / 1e9 for samples in found.values()],
            color=color,
            marker=_MARKERS.get(name, "o"),
            markersize=5.5,
            linewidth=1.8,
            linestyle="--" if name == "fio" else "-",
            label="fio, best engine" if name == "fio" else name,
            zorder=3 if name == "fio" else 2,
        )
    words = [size_words(point.request_bytes) if by_size else str(point.depth) for point in points]
    axes.set_xticks(range(len(points)), words)
    axes.set_xlim(-0.3, len(points) - 0.7)
    axes.set_xlabel("request size" if by_size else "requests in flight")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(rows: Any) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axes in rows.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
