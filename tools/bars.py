"""Draws tools/deepspeed.svg: bytes, step time and memory beside DeepSpeed's, from the table in docs/benchmarks.md.

`bench_scale.py` draws its bars by the same function.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PICTURE = HERE / "deepspeed.svg"
PAGE = HERE.parent / "docs" / "benchmarks.md"
_TITLE = """\
One optimizer step of a 374M-parameter Llama (bf16, AdamW), offloaded to a disk held to 600 MB/s each way
2 cores of an Intel Xeon, no GPU, DeepSpeed 0.19.8. Behind Infinity stands its host_memory_budget. More: docs/benchmarks.md"""
_PANELS = ("step, seconds", "read + written per parameter, bytes", "peak host memory, GB")


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
    # An SVG is the same each time, and its text is text.
    with rc_context({"svg.hashsalt": "bars", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def rows(page: str) -> list[list[str]]:
    """The cells of the table of the section "Against DeepSpeed", without units."""
    section = page.split("### Against DeepSpeed")[1].split("\n### ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    return [
        [cells[0], cells[1], *(cell.rpartition(" ")[0] for cell in cells[2:5])]
        for cells in lines
        # Rows of measurements end in the commit that was measured; headings do not.
        if len(cells) == 6 and re.fullmatch(r"[0-9a-f]{7}", cells[5])
    ]


def main() -> None:
    """Draw the table of the page."""
    found = rows(PAGE.read_text())
    names = [f"{who}; micro-batches: {case.removesuffix(' *')}" for case, who, *_ in found]
    colours = ["#1f6feb" if who.startswith("Infinity") else "#9aa4b2" for _, who, *_ in found]
    columns = zip(*(cells for _, _, *cells in found), strict=True)
    panels = {
        # "12.1 / 8.0" (read / written) becomes a bar of 20.1 with the label "12.1 + 8.0".
        panel: [(sum(map(float, cell.split(" / "))), cell.replace(" / ", " + ")) for cell in column]
        for panel, column in zip(_PANELS, columns, strict=True)
    }
    draw(PICTURE, _TITLE, names, panels, colours)


if __name__ == "__main__":
    main()
