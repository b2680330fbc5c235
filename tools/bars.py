"""Pictures of horizontal bars, which several tools draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(
    path: Path,
    title: str,
    names: Sequence[str],
    panels: Mapping[str, Sequence[tuple[float, str]]],
    colours: Sequence[str] | None = None,
) -> None:
    """Draw panels beside each other, with a bar and its label for each of the names. Needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Inches: the title and one row for each name.
    figure = Figure(figsize=(13, 1.5 + 0.35 * len(names)), layout="constrained")
    places = range(len(names))
    for axes, (heading, bars) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        drawn = axes.barh(places, [length for length, _ in bars], color=colours)
        axes.bar_label(drawn, [label for _, label in bars], padding=3)
        axes.set(title=heading, yticks=places, yticklabels=names)
        # Room for the labels at the ends of the bars.
        axes.margins(x=0.35)
        axes.spines[["top", "right"]].set_visible(False)
    # matplotlib counts rows upwards. The panels share the axis, so one call turns all of them.
    axes.invert_yaxis()
    figure.suptitle(title)
    with rc_context(
        {"svg.hashsalt": "bars", "svg.fonttype": "none"}
    ):  # an SVG is the same each time, and its text is text
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
