"""Charts of a run as SVG, drawn by matplotlib.

[Note: colours] A page is light or dark as its reader's system is, and a chart is drawn once. So each colour is drawn as a
number that stands for a name (`INKS`), and becomes a CSS variable of that name in the SVG. Texts stay texts.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.errors import LibraryError
from infinity.metrics import Mark
from infinity.metrics.report import StepReport
from infinity.plan.plan import Plan

INKS = ("ink", "faint", "paper", "a", "b", "c", "d", "e", "f", "g", "bad")
"""Names of the charts' colours, which are CSS variables of the page: see [Note: colours]."""
# #010203, #010204, ...: nearly black, and used by nothing else in the SVG, so a text replacement finds each of them.
_COLOURS = {name: f"#0102{place + 3:02x}" for place, name in enumerate(INKS)}
_SIZE = (8.6, 3.0)
"""Inches."""
# A chart is 8.6 inches wide, which are 619 points of SVG: more would not be seen.
_MOST_POINTS = 600
_MOST_BARS = 100
# Kind of mark -> colour of its line. "save" has none: there are too many.
_MARKED = {"spike": "bad", "skipped": "bad", "rollback": "e", "load": "e", "restart": "d", "lr": "c", "note": "ink"}


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: of it.
        text: what it shows, for those who cannot see it.
        svg: an SVG element.
    """

    title: str
    text: str
    svg: str


def losses(steps: Sequence[StepReport], marks: Sequence[Mark]) -> Chart:
    """Draw loss and learning rate, with the marks of the log."""
    # A loss that is not finite would stretch the axis. A dashed line marks it: it is a spike in the log.
    known = [(step.step, step.loss) for step in steps if step.loss is not None and np.isfinite(step.loss)]
    # The first group stands for all.
    rates = [(step.step, step.lr[0]) for step in steps if step.lr]

    def draw(figure: Any) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        above.plot(*_points(known), color=_COLOURS["a"], linewidth=1.4)
        above.set_ylabel("loss")
        below.plot(*_points(rates), color=_COLOURS["c"], linewidth=1.4)
        below.set_ylabel("lr")
        below.set_xlabel("step")
        for mark in marks:
            if mark.kind in _MARKED:
                above.axvline(mark.step, color=_COLOURS[_MARKED[mark.kind]], linewidth=0.9, linestyle=(0, (3, 2)))

    text = "No loss is known: the engine sees it in engine.backward and engine.train_batch."
    if known:
        (first, begin), (last, end) = known[0], known[-1]
        text = f"The loss goes from {begin:.4g} at step {first} to {end:.4g} at step {last}."
    if any(mark.kind in _MARKED for mark in marks):
        text += " Dashed lines are marks of the logbook."
    return _chart("Loss and learning rate", text, draw)


def breakdown(steps: Sequence[StepReport]) -> Chart:
    """Draw where the time of each step went."""
    kinds: dict[str, tuple[str, Callable[[StepReport], float]]] = {
        "forward": ("a", lambda step: step.forward_seconds),
        "backward": ("b", lambda step: step.backward_seconds),
        "step": ("g", lambda step: step.update_seconds),
        "waits: reads": ("bad", lambda step: step.read_wait_seconds),
        "waits: optimizer": ("d", lambda step: step.update_wait_seconds),
        "waits: writes, commits": ("c", lambda step: step.write_wait_seconds + step.commit_seconds),
        "other": ("faint", lambda step: step.other_seconds),
    }
    means = {name: np.mean([of(step) for step in steps]) for name, (_, of) in kinds.items()}

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        parts = [list(part) for part in np.array_split(np.array(steps, dtype=object), min(len(steps), _MOST_BARS))]
        places = [np.mean([step.step for step in part]) for part in parts]
        # Example: 250 steps in 100 groups of 2 or 3: each bar is 2.5 * 0.9 steps wide.
        width = max(len(steps) / len(parts), 1) * 0.9
        bottom = np.zeros(len(parts))
        for name, (ink, of) in kinds.items():
            heights = np.array([np.mean([of(step) for step in part]) for part in parts])
            # Kinds that took no time need no entry in the legend.
            if heights.max(initial=0) > 0:
                axes.bar(places, heights, width, bottom, color=_COLOURS[ink], label=name, linewidth=0)
            bottom += heights
        axes.set_ylabel("seconds")
        axes.set_xlabel("step")
        _legend(figure, axes)

    text = ", ".join(f"{name} {value:.3g} s" for name, value in means.items() if value > 0)
    return _chart("Where a step's time went", f"On average: {text or 'nothing was measured'}.", draw)


def throughput(steps: Sequence[StepReport], plan: Plan | None) -> Chart:
    """Draw gigabytes per second of the drives, and their measured ceiling."""
    speed = plan.bandwidth if plan is not None else None
    rows = [(step.step, step.drive_bytes_per_second) for step in steps]
    busy = [(number, value / 1e9) for number, value in rows if value is not None]
    # Below the first curve wherever drives were idle for a part of the step.
    over = [(step.step, (step.read_bytes + step.write_bytes) / step.seconds / 1e9) for step in steps if step.seconds]

    curves = {"while a drive was busy": ("b", busy), "over the whole step": ("a", over)}
    levels = {} if speed is None else {"ceiling, measured": ("bad", speed.mixed_bytes_per_second / 1e9)}
    mean = np.mean([value for _, value in over]) if over else 0.0
    text = f"Reads and writes together: {mean:.3g} GB/s over the steps."
    if speed is not None:
        text += f" The ceiling is {speed.mixed_bytes_per_second / 1e9:.3g} GB/s, measured on {speed.date}."
    else:
        text += " No ceiling is known: the drives were never measured here (`infinity profile DIR`)."
    return _chart("NVMe throughput", text, _curves(curves, levels, "GB/s, both ways"))


def memory(steps: Sequence[StepReport], plan: Plan | None) -> Chart:
    """Draw the engine's buffers and their budget, the memory of the process, and the peak of the GPU."""
    host = [(step.step, step.host_bytes / 1e9) for step in steps if step.host_bytes]
    buffers = [(step.step, step.buffers_peak_bytes / 1e9) for step in steps if step.buffers_peak_bytes]
    device = [(step.step, step.device_peak_bytes / 1e9) for step in steps if step.device_peak_bytes is not None]

    curves = {"engine's buffers, peak": ("d", buffers), "process": ("a", host)}
    curves |= {"GPU, peak": ("b", device)} if device else {}
    levels = {} if plan is None else {"host memory budget": ("c", plan.host_budget_bytes / 1e9)}
    peak = max((step.host_peak_bytes for step in steps), default=0)
    engine = max((step.buffers_peak_bytes for step in steps), default=0)
    text = f"The engine's buffers, which the budget limits, took at most {engine / 1e9:.3g} GB of host memory."
    text += f" The whole process, with Python, libraries and activations, took at most {peak / 1e9:.3g} GB."
    if device:
        text += f" torch held at most {max(value for _, value in device):.3g} GB of the GPU's."
    return _chart("Memory", text, _curves(curves, levels, "GB"))


# ------------------------------------------------------------------------------------------------------------- drawing


def _curves(
    curves: Mapping[str, tuple[str, Sequence[tuple[int, float]]]], levels: Mapping[str, tuple[str, float]], unit: str
) -> Callable[[Any], None]:
    """Return a function that draws curves (label -> ink and points) and levels (label -> ink and value)."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for label, (ink, points) in curves.items():
            axes.plot(*_points(points), color=_COLOURS[ink], linewidth=1.4, label=label)
        for label, (ink, level) in levels.items():
            axes.axhline(level, color=_COLOURS[ink], linewidth=1.2, linestyle=(0, (5, 2)), label=label)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(unit)
        axes.set_xlabel("step")
        _legend(figure, axes)

    return draw


def _chart(title: str, text: str, draw: Callable[[Any], None]) -> Chart:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    # An optional dependency: `pip install infinity-offload[plot]`.
    except ImportError:
        raise LibraryError.of_version("matplotlib", found=None, least="3.8", extra="plot") from None
    ink, faint = _COLOURS["ink"], _COLOURS["faint"]
    style: Any = {
        # Texts stay texts, and are drawn in the font of the page.
        "svg.fonttype": "none",
        # Ids in the SVG are hashes. With a salt of its own, each chart has others on one page, and the same in each
        # run.
        "svg.hashsalt": title,
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": faint,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": faint,
        "grid.linewidth": 0.4,
        "xtick.color": ink,
        "ytick.color": ink,
        "legend.frameon": False,
        "path.simplify": True,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=_SIZE, layout="constrained")
        # The page's background shows through.
        figure.patch.set_alpha(0)
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Chart(title, text, _inlined(file.getvalue()))


def _inlined(svg: str) -> str:
    """Return the SVG element alone, in the colours of the page, without a size of its own."""
    # Without the XML declaration and the doctype, which may not be inside HTML.
    svg = svg[svg.index("<svg") :]
    for name, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-z0-9.]+_[0-9]+"', "", svg)  # nothing refers to them, and other charts have the same
    # Width and height go, so that CSS scales the chart by its viewBox. Screen readers get `Chart.text` instead.
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 aria-hidden="true" focusable="false"', svg, count=1)


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=4, handlelength=1.2, columnspacing=1.2)


def _points(pairs: Sequence[tuple[float, float]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The columns of some pairs, `_MOST_POINTS` at most. The lowest and highest point of each interval stay: no spike is lost."""
    x, y = np.array(pairs, dtype=float).reshape(-1, 2).T
    if len(x) <= _MOST_POINTS:
        return x, y
    places: list[int] = []
    # Two points for each of 300 intervals. `sorted` keeps them in the order of steps, and the set drops a double.
    for part in np.array_split(np.arange(len(x)), _MOST_POINTS // 2):
        places += sorted({int(part[y[part].argmin()]), int(part[y[part].argmax()])})
    return x[places], y[places]
