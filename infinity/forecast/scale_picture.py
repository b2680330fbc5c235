"""The picture of a forecast for many GPUs: tokens per second and efficiency over their number, a line for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infinity.errors import LibraryVersionError
from infinity.forecast.scale import Scaled
from swapper.volumes.publish import replacing

_STYLES = {0: ("#333333", "x"), 1: ("#1f6fb2", "o"), 2: ("#d08c2e", "^"), 3: ("#2a9d6a", "s")}
"""Of each stage."""


def draw(path: Path, name: str, found: Sequence[Scaled]) -> None:
    """Write the picture, as SVG or PNG by the file's name.

    Raises:
        LibraryVersionError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise LibraryVersionError("matplotlib", found=None, least="3.8", extra="plot") from None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        rates, shares = figure.subplots(1, 2)
        for stage in sorted({each.stage for each in found}):
            known = [(each, each.time) for each in found if each.stage == stage and each.time is not None]
            if not known:
                continue
            color, marker = _STYLES[stage]
            counts = [each.num_ranks for each, _ in known]
            slow = [each.tokens / time.seconds for each, time in known]
            fast = [each.tokens / time.overlapped_seconds for each, time in known]
            low = [100 * time.efficiency for _, time in known]
            high = [100 * time.overlapped_efficiency for _, time in known]
            style = {"color": color, "marker": marker, "markersize": 4.5, "linewidth": 1.6, "label": f"stage {stage}"}
            for axes, line, least, most in ((rates, fast, slow, fast), (shares, low, low, high)):
                axes.plot(counts, line, **style)
                axes.fill_between(counts, least, most, color=color, alpha=0.12, linewidth=0)
        for axes in (rates, shares):
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted({each.num_ranks for each in found}), sorted({each.num_ranks for each in found}))
            axes.set_xlabel("GPUs")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        rates.set_yscale("log")
        rates.set_ylabel("tokens per second, at most")
        shares.set_ylim(0, 105)
        shares.set_ylabel("efficiency in %, at least")
        handles, labels = rates.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(f"{name}: forecast. Bands: from nothing overlaps to everything does", fontsize=11)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        with replacing(path) as file:
            figure.savefig(file, format=path.suffix.lower()[1:], dpi=130, metadata=metadata)
