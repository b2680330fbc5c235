"""What is printed at the end; readable in 100 columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from swapper.measure.io_setting import IOSetting, Workload
from swapper.measure.measurement import Sample

from .advice import Advice
from .fio import FioSample
from .grid import WORKLOADS, Grid, point_of, size_words
from .results import Results, median_rate
from .spread import spread_percent
from .training import Outlook

_GIGA = 1e9


def sweep_table(results: Results) -> ConsoleRenderable:
    """Every setting of ours: speed, spread, share of fio at the same size and depth, and processor time."""
    table = _table(gap=1)
    table.add_column("backend", no_wrap=True)
    for heading in ("request", "in flight", "threads"):
        table.add_column(heading, no_wrap=True, justify="right")
    for workload in WORKLOADS:
        table.add_column(workload.value, justify="right", no_wrap=True)
        table.add_column("of fio", justify="right", no_wrap=True, style="dim")
    table.add_column("CPU s/GB", justify="right", no_wrap=True)
    best = {workload: results.best(workload) for workload in WORKLOADS}
    names = list(results.backends)
    ordered = sorted(results.settings, key=lambda each: (names.index(each.backend), point_of(each)))
    for number, setting in enumerate(ordered):
        is_first = number == 0 or ordered[number - 1].backend != setting.backend
        if is_first and number:
            table.add_row()
        row: list[str | Text] = [setting.backend if is_first else "", size_words(setting.request_bytes)]
        row += [str(setting.num_inflight), "-" if setting.backend == "uring" else str(setting.num_threads)]
        for workload in WORKLOADS:
            row += _cells(results, setting, workload, is_best=best[workload] == setting)
        cores = results.cores_per_gigabyte(setting)
        table.add_row(*row, "" if cores is None else f"{cores:.3f}")
    return _titled("What the drive does under our requests, GB/s ± half of smallest to largest in percent", table)


def _cells(results: Results, setting: IOSetting, workload: Workload, *, is_best: bool) -> list[str | Text]:
    samples = results.ours.get((setting, workload))
    if not samples:
        return ["", ""]
    share = results.share_of_fio(setting, workload)
    speed = Text(_speed(samples), style="bold green" if is_best else "")
    return [speed, "" if share is None else f"{100 * share:.0f} %"]


def fio_table(results: Results, grid: Grid) -> ConsoleRenderable:
    """fio's best engine at every size and depth."""
    table = _table()
    for heading in ("request", "in flight"):
        table.add_column(heading, no_wrap=True, justify="right")
    for workload in WORKLOADS:
        table.add_column(workload.value, justify="right", no_wrap=True)
        table.add_column("engine", no_wrap=True, style="dim")
    for point in grid.points:
        row = [size_words(point.request_bytes), str(point.depth)]
        for workload in WORKLOADS:
            found = results.fio_at(point, workload)
            row += ["", ""] if found is None else [_speed(found[1]), found[0].engine.replace(" registered", "+reg")]
        table.add_row(*row)
    return _titled("fio on the same file, its best engine, GB/s", table)


def comparison_table(results: Results) -> ConsoleRenderable:
    """Our best against fio's best."""
    num_pairs = max(len(each.pairs) for each in results.comparisons.values())
    table = _table()
    for heading in ("", "ours", "fio", "ours / fio", "interval"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    table.add_column("settings", style="dim")
    for workload, comparison in results.comparisons.items():
        if not comparison.pairs:
            continue
        interval = comparison.interval
        settings = (
            f"{comparison.setting.backend} {size_words(comparison.setting.request_bytes)} x "
            f"{comparison.setting.num_inflight}; {comparison.job.words()}, "
            f"{size_words(comparison.job.request_bytes)} x {comparison.job.depth}"
        )
        table.add_row(
            workload.value,
            f"{median_rate(ours for ours, _ in comparison.pairs) / _GIGA:.2f} GB/s",
            f"{median_rate(theirs for _, theirs in comparison.pairs) / _GIGA:.2f} GB/s",
            f"{100 * comparison.share:.1f} %",
            f"{100 * interval.low:.1f}-{100 * interval.high:.1f} % ({100 * interval.level:.0f} %)",
            settings,
        )
    return _titled(f"Our best against fio's best, in {num_pairs} pairs taken in turns", table)


def remarks(results: Results, *, is_memory: bool, fio_has_huge_pages: bool) -> list[str]:
    """Sentences under the tables."""
    lines = []
    for backend, reason in results.backends.items():
        if reason is None:
            cores = {workload: results.cores_at_reference_rate(backend, workload) for workload in WORKLOADS}
            known = [f"{workload.value} {value:.3f}" for workload, value in cores.items() if value is not None]
            if known:
                memory = " (in RAM this is the copying itself)" if is_memory else ""
                lines.append(f"{backend}: cores at 2 GB/s with requests of 4 MiB: {', '.join(known)}{memory}")
        else:
            lines.append(f"{backend} cannot be used here: {reason}")
    lines += [f"Note: {note}" for note in results.notes]
    if results.verified:
        lines.append(f"Read back and found right through: {', '.join(results.verified)}")
    unusable = [f"{name}: {reason}" for name, reason in results.engines.items() if reason]
    lines += [f"fio's engine {words}" for words in unusable]
    if results.comparisons:
        lines.append("The interval holds the true median of the ratios with the probability in brackets (sign test).")
        if not (fio_has_huge_pages or is_memory) and any(
            each.pairs and each.share > 1.1 for each in results.comparisons.values()
        ):
            lines.append(
                "Above 100 %: our memory lies in huge pages, which spares drive and kernel work; --fio-huge-pages gives fio "
                "the same"
            )
    if results.alone:
        together = {workload: results.final_rate(workload) for workload in (Workload.READ, Workload.WRITE)}
        for each in results.alone:
            lines.append(f"{each.directory} alone: read {each.read / _GIGA:.2f}, write {each.write / _GIGA:.2f} GB/s")
        rates = (sum(each.read for each in results.alone), sum(each.write for each in results.alone))
        read, write = ((together[w] or 0.0) / _GIGA for w in (Workload.READ, Workload.WRITE))
        lines.append(
            f"  together: read {read:.2f} of {rates[0] / _GIGA:.2f}, write {write:.2f} of {rates[1] / _GIGA:.2f} GB/s"
        )
    if results.written_bytes and not is_memory:
        lines.append(f"All of this wrote {results.written_bytes / _GIGA:.1f} GB to the drive.")
    return lines


def copies_table(results: Results) -> ConsoleRenderable:
    """Host to GPU and back."""
    table = _table()
    for heading in ("size", "to the GPU", "to the host"):
        table.add_column(heading, justify="right", no_wrap=True)
    for sample in results.copies:
        table.add_row(
            size_words(sample.num_bytes),
            f"{sample.to_device_bytes_per_second / _GIGA:.1f}",
            f"{sample.to_host_bytes_per_second / _GIGA:.1f}",
        )
    return _titled("Copies between pinned host memory and the GPU, GB/s", table)


def print_advice(console: Console, advice: Advice) -> None:
    """The block to paste, and why each value."""
    console.print("\nSettings for the config", style="bold")
    lines = [f'  "{name}": {json.dumps(values)}' for name, values in advice.block.items()]
    console.print("{\n" + ",\n".join(lines) + "\n}", markup=False, highlight=False, soft_wrap=True)
    console.print(_two_columns(advice.reasons))
    if advice.default_share is not None:
        words = "is this" if advice.default_share == 1.0 else f"reaches {100 * advice.default_share:.0f} % of it"
        console.print(f"A config that says nothing {words}.", markup=False)


def print_outlook(console: Console, outlook: Outlook, *, is_example: bool) -> None:
    """What it means for training."""
    example = " (an example: --model N or the path of a Hugging Face config takes yours)" if is_example else ""
    console.print(f"\nTraining {outlook.facts.name}{example}", style="bold", markup=False)
    states = outlook.facts.states.value
    optimizer = "AdamW" if states == "fp32" else f"AdamW with {states} states"
    console.print(f"bf16, {optimizer}, everything on these drives, one micro-batch per step, no clipping", style="dim")
    console.print(_two_columns(outlook.lines()))


def _two_columns(lines: Iterable[tuple[str, str]]) -> ConsoleRenderable:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, words in lines:
        table.add_row(Text(name), Text(words))
    return table


def _table(gap: int = 2) -> Table:
    return Table(header_style="dim", box=None, padding=(0, gap, 0, 0))


def _titled(title: str, table: Table) -> ConsoleRenderable:
    """Not the table's own title, which is folded to the width of the table."""
    return Group(Text(f"\n{title}", style="bold"), table)


def _speed(samples: Sequence[Sample | FioSample]) -> str:
    rates = [sample.bytes_per_second for sample in samples]
    spread = f" ±{spread_percent(rates):.0f}" if len(rates) > 1 else ""
    return f"{median_rate(samples) / _GIGA:.2f}{spread}"
