"""What is printed at the end; readable in 100 columns."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from infinity.io_profile.advice import Advice
from infinity.io_profile.fio import FioSample
from infinity.io_profile.grid import WORKLOADS, Point, point_of, size_words
from infinity.io_profile.results import Results, median_rate
from swapper.measure.io_setting import Workload
from swapper.measure.measurement import Sample

_GIGA = 1e9
_LEFT = {"", "backend", "engine", "settings"}
_DIM = {"of fio", "engine", "settings"}


def sweep_table(results: Results) -> ConsoleRenderable:
    """Every setting of ours: speed, spread, share of fio at the same size and depth, and processor time."""
    speeds = [heading for workload in WORKLOADS for heading in (workload.value, "of fio")]
    table = _table(["backend", "request", "in flight", "threads", *speeds, "CPU s/GB"], gap=1)
    best = {workload: results.best(workload) for workload in WORKLOADS}
    last = ""
    for setting in sorted(
        results.settings, key=lambda each: (list(results.backends).index(each.backend), point_of(each))
    ):
        if last not in ("", setting.backend):
            table.add_row()
        row: list[str | Text] = ["" if last == setting.backend else setting.backend, size_words(setting.request_bytes)]
        last = setting.backend
        row += [str(setting.num_inflight), str(setting.num_threads) if setting.has_threads else "-"]
        for workload in WORKLOADS:
            share = results.share_of_fio(setting, workload)
            speed = _speed(results.ours.get((setting, workload), ()))
            row += [
                Text(speed, style="bold green" if best[workload] == setting else ""),
                "" if share is None else f"{100 * share:.0f} %",
            ]
        table.add_row(*row, f"{results.cores_per_gigabyte(setting):.3f}")
    return _titled("What the drive does under our requests, GB/s ± half of smallest to largest in percent", table)


def fio_table(results: Results, points: Sequence[Point]) -> ConsoleRenderable:
    """fio's best engine at every size and depth."""
    table = _table(["request", "in flight", *(each for workload in WORKLOADS for each in (workload.value, "engine"))])
    for point in points:
        row = [size_words(point.request_bytes), str(point.depth)]
        for workload in WORKLOADS:
            job = results.best_fio(workload, point)
            row += (
                ["", ""]
                if job is None
                else [_speed(results.fio[job, workload]), job.engine.replace(" registered", "+reg")]
            )
        table.add_row(*row)
    return _titled("fio on the same file, its best engine, GB/s", table)


def comparison_table(results: Results) -> ConsoleRenderable:
    """Our best against fio's best."""
    table = _table(["", "ours", "fio", "ours / fio", "interval", "settings"])
    for workload, each in results.comparisons.items():
        if each.pairs:
            interval, setting = each.interval, each.setting
            mine = f"{setting.backend} {size_words(setting.request_bytes)} x {setting.num_inflight}"
            table.add_row(
                workload.value,
                f"{median_rate(ours for ours, _ in each.pairs) / _GIGA:.2f} GB/s",
                f"{median_rate(theirs for _, theirs in each.pairs) / _GIGA:.2f} GB/s",
                f"{100 * each.share:.1f} %",
                f"{100 * interval.low:.1f}-{100 * interval.high:.1f} % ({100 * interval.level:.0f} %)",
                f"{mine}; {each.job.words()}",
            )
    num_pairs = max(len(each.pairs) for each in results.comparisons.values())
    return _titled(f"Our best against fio's best, in {num_pairs} pairs taken in turns", table)


def copies_table(results: Results) -> ConsoleRenderable:
    """Host to GPU and back."""
    table = _table(["size", "to the GPU", "to the host"])
    for each in results.copies:
        rates = (each.to_device_bytes_per_second, each.to_host_bytes_per_second)
        table.add_row(size_words(each.num_bytes), *(f"{rate / _GIGA:.1f}" for rate in rates))
    return _titled("Copies between pinned host memory and the GPU, GB/s", table)


def remarks(results: Results, *, is_memory: bool, fio_has_huge_pages: bool) -> list[str]:
    """Sentences under the tables."""
    lines = []
    for backend, reason in results.backends.items():
        known = ", ".join(
            f"{each.value} {cores:.3f}" for each, cores in results.cores_at_reference_rate(backend).items()
        )
        if reason is not None:
            lines.append(f"{backend} cannot be used here: {reason}")
        elif known:
            memory = " (in RAM this is the copying itself)" if is_memory else ""
            lines.append(f"{backend}: cores at 2 GB/s with requests of 4 MiB: {known}{memory}")
    lines += [f"Note: {note}" for note in results.notes]
    if results.verified:
        lines.append(f"Read back and found right through: {', '.join(results.verified)}")
    lines += [f"fio's engine {name}: {reason}" for name, reason in results.engines.items() if reason]
    if results.comparisons:
        lines.append("The interval holds the true median of the ratios with the probability in brackets (sign test).")
        is_above = any(each.pairs and each.share > 1.1 for each in results.comparisons.values())
        if is_above and not (fio_has_huge_pages or is_memory):
            words = (
                "our memory lies in huge pages, which spares drive and kernel work; --fio-huge-pages gives fio the same"
            )
            lines.append(f"Above 100 %: {words}")
    for each in results.alone:
        lines.append(f"{each.directory} alone: read {each.read / _GIGA:.2f}, write {each.write / _GIGA:.2f} GB/s")
    if results.alone:
        read, write = ((results.final_rate(each) or 0.0) / _GIGA for each in (Workload.READ, Workload.WRITE))
        reads, writes = (
            sum(rates) / _GIGA for rates in zip(*((each.read, each.write) for each in results.alone), strict=True)
        )
        lines.append(f"  together: read {read:.2f} of {reads:.2f}, write {write:.2f} of {writes:.2f} GB/s")
    if results.written_bytes and not is_memory:
        lines.append(f"All of this wrote {results.written_bytes / _GIGA:.1f} GB to the drive.")
    return lines


def print_advice(console: Console, advice: Advice) -> None:
    """The block to paste, and why each value."""
    console.print("\nSettings for the config", style="bold")
    lines = [f'  "{name}": {json.dumps(values)}' for name, values in advice.block.items()]
    console.print("{\n" + ",\n".join(lines) + "\n}", markup=False, highlight=False, soft_wrap=True)
    console.print(two_columns(advice.reasons))
    if advice.default_share is not None:
        words = "is this" if advice.default_share == 1.0 else f"reaches {100 * advice.default_share:.0f} % of it"
        console.print(f"A config that says nothing {words}.", markup=False)


def two_columns(lines: Iterable[tuple[str, str]]) -> ConsoleRenderable:
    """Names and words, beside each other."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, words in lines:
        table.add_row(Text(name), Text(words))
    return table


def _table(headings: Sequence[str], gap: int = 2) -> Table:
    table = Table(header_style="dim", box=None, padding=(0, gap, 0, 0))
    for heading in headings:
        table.add_column(
            heading,
            justify="left" if heading in _LEFT else "right",
            no_wrap=heading != "settings",
            style="dim" if heading in _DIM else "",
        )
    return table


def _titled(title: str, table: Table) -> ConsoleRenderable:
    """Not the table's own title, which is folded to the width of the table."""
    return Group(Text(f"\n{title}", style="bold"), table)


def _speed(samples: Sequence[Sample | FioSample]) -> str:
    """`2.31 ±4`: the median, and half of smallest to largest in percent of it."""
    rates = [sample.bytes_per_second for sample in samples]
    if not rates:
        return ""
    middle = statistics.median(rates)
    spread = f" ±{50 * (max(rates) - min(rates)) / middle:.0f}" if len(rates) > 1 and middle else ""
    return f"{middle / _GIGA:.2f}{spread}"
