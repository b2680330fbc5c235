#!/usr/bin/env python3
"""Measures how fast drives are under the engine's requests, compares that with fio, and says which settings suit them.

    python tools/profile_io.py /mnt/nvme
    python tools/profile_io.py /mnt/nvme0 /mnt/nvme1 --json io.json --png io.png --apply ds_config.json

It is `infinity profile` with a comparison: our fastest setting against fio's fastest of several, in pairs that take turns.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # While the libraries are loaded there is nothing to report yet: Ctrl-C just ends it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    import bars
    import click
    import fio

    from infinity.cli import profile as command
    from infinity.cli.main import run
    from infinity.cli.output import PathType, check_picture, table
    from infinity.machine.drive_profile import WORKLOADS, DriveProfile, drive_test, io_of
    from swapper.measure.io_setting import IOSetting, Workload
    from swapper.measure.measurement import DriveTest
except ModuleNotFoundError as error:
    root = Path(__file__).resolve().parent.parent
    print(
        f"profile_io.py: this Python ({sys.executable}) has no module {error.name!r}. Install the project into it:\n"
        f"    {sys.executable} -m pip install -e '{root}[plot,uring]' -c {root / 'constraints.txt'}",
        file=sys.stderr,
    )
    sys.exit(2)

NUM_PAIRS = 7
"""Fewer give an interval below 95 %."""
ENGINES = {
    "psync": ("--ioengine=psync",),
    "libaio": ("--ioengine=libaio",),
    "io_uring": ("--ioengine=io_uring",),
    # With buffers and files registered, which is often faster; memlock may forbid it.
    "io_uring registered": ("--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"),
}
POINTS = ((1 << 20, 8), (1 << 20, 32), (4 << 20, 8), (8 << 20, 8))
"""Bytes of a request, and requests in flight."""
_READ_PERCENT = 54
"""Of an optimizer step's bytes. fio takes whole percents only, and ours then moves the same."""
_DIRECTIONS = {Workload.READ: "read", Workload.WRITE: "write", Workload.MIXED: "rw"}


class Peer:
    """fio on the nameless files of a test, by the paths under /proc that lead to them; one job for each file."""

    def __init__(self, test: DriveTest, *, huge_pages: bool) -> None:
        sizes = {path: os.stat(path).st_size for path in test.paths}
        # Of each file the part that was written: what is behind costs nothing to read.
        part = test.num_bytes / sum(sizes.values())
        self._sizes = {path: int(part * num_bytes) // 4096 * 4096 for path, num_bytes in sizes.items()}
        self._is_direct = test.is_direct
        # It has no option for huge pages, in which our buffers are: glibc is told.
        self._environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else None
        self._position = 0.0
        self.written_bytes = 0

    def measure(self, engine: str, point: tuple[int, int], workload: Workload, seconds: float) -> float:
        """Bytes per second of one run.

        Raises:
            FioFailed: with fio's own words.
        """
        request_bytes, depth = point
        jobs_per_file = min(depth, len(os.sched_getaffinity(0))) if engine == "psync" else 1
        options = [
            *ENGINES[engine],
            f"--bs={request_bytes}",
            f"--iodepth={1 if engine == 'psync' else depth}",
            f"--rw={_DIRECTIONS[workload]}",
            f"--rwmixread={_READ_PERCENT}",
            f"--direct={int(self._is_direct)}",
            f"--end_fsync={int(not self._is_direct)}",
            "--overwrite=1",
            "--time_based",
            f"--runtime={max(1, round(1000 * seconds))}ms",
            "--group_reporting",
        ]
        for number, (path, num_bytes) in enumerate(self._sizes.items()):
            # Like ours it goes on where the run before ended, so that it does not find its bytes in some cache on the way.
            start = int(self._position * num_bytes) // request_bytes * request_bytes
            part = (num_bytes - start) // jobs_per_file // request_bytes * request_bytes
            options += [f"--name=file{number}", f"--filename={path}", f"--offset={start}", f"--size={part}"]
            options += [f"--numjobs={jobs_per_file}", f"--offset_increment={part if jobs_per_file > 1 else 0}"]
        (job,) = fio.run(*options, environment=self._environment)
        moved = int(job["read"]["io_bytes"]) + int(job["write"]["io_bytes"])
        self.written_bytes += int(job["write"]["io_bytes"])
        self._position += moved / sum(self._sizes.values())
        if (
            self._position > 0.5
        ):  # what is left must be long enough for a run not to go round in a small part of the file
            self._position = 0.0
        return fio.bytes_per_second(job)

    def fastest(
        self, workload: Workload, seconds: float, problems: dict[str, str]
    ) -> tuple[str, tuple[int, int]] | None:
        """The engine and the point that move most; None if fio can do nothing here."""
        rates = {}
        for engine, point in itertools.product(ENGINES, POINTS):
            if engine not in problems:
                try:
                    rates[engine, point] = self.measure(engine, point, workload, seconds)
                except fio.FioFailed as error:
                    problems[engine] = str(error)
        return max(rates, key=lambda each: rates[each], default=None)


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """The shortest interval between two of the sorted values that holds the true median with at least `level`, and its level.

    It is the one of the sign test: each independent value is above the true median with probability 1/2. With fewer than six
    values even smallest to largest stays below 95 %.
    """
    ordered = sorted(values)

    def coverage(cut: int) -> float:  # that it lies inside when so many values are left out at each end
        outside = sum(math.comb(len(ordered), below) for below in range(cut + 1)) / 2.0 ** len(ordered)
        return max(0.0, 1.0 - 2.0 * outside)

    cut = 0
    while coverage(cut + 1) >= level:
        cut += 1
    return ordered[cut], ordered[-1 - cut], coverage(cut)


def compare(found: DriveProfile, asked: command.Asked, *, num_pairs: int, huge_pages: bool) -> dict[str, Any]:
    """Our fastest setting against fio's, workload by workload, on new files."""
    problems: dict[str, str] = {}
    shares: dict[str, Any] = {}
    seconds = asked.effort.sample_seconds
    with drive_test(found, asked.effort, io_of({})) as test:
        test.prepare(max_seconds=asked.effort.fill_seconds)
        found.written_bytes += test.num_bytes
        peer = Peer(test, huge_pages=huge_pages)
        for workload in WORKLOADS:
            asked.console.print(f"beside fio: {workload.value}")
            setting, theirs = found.fastest(workload), peer.fastest(workload, seconds, problems)
            if setting is not None and theirs is not None:
                pairs = []
                for turn in range(num_pairs):  # each first in every other pair, so that a drive's moods meet both
                    rates: dict[str, float] = {}
                    for who in ("fio", "ours") if turn % 2 else ("ours", "fio"):
                        rates[who] = (
                            test.measure(
                                setting, workload, 3 * seconds, read_share=_READ_PERCENT / 100
                            ).bytes_per_second
                            if who == "ours"
                            else peer.measure(*theirs, workload, 3 * seconds)
                        )
                    pairs.append(rates)
                ratios = [each["ours"] / each["fio"] for each in pairs]
                shares[workload.value] = {
                    "setting": asdict(setting),
                    "fio": {"engine": theirs[0], "request_bytes": theirs[1][0], "depth": theirs[1][1]},
                    "pairs": pairs,
                    "share": statistics.median(ratios),
                    "interval": median_interval(ratios),
                }
        found.written_bytes += peer.written_bytes
    return {"share_of_fio": shares, "fio_engines": problems}


def print_comparison(asked: command.Asked, compared: dict[str, Any]) -> None:
    """A row for each workload."""
    shown = table(
        "beside fio", "ours, GB/s", "fio, GB/s", "ours / fio", "interval", "our setting", "fio's", keeps_first=True
    )
    level = 0.0
    for workload, each in compared["share_of_fio"].items():
        ours, other = (statistics.median(pair[who] for pair in each["pairs"]) / 1e9 for who in ("ours", "fio"))
        (low, high, level), theirs = each["interval"], each["fio"]
        shown.add_row(
            workload,
            f"{ours:.2f}",
            f"{other:.2f}",
            f"{100 * each['share']:.0f} %",
            f"{100 * low:.0f}-{100 * high:.0f} %",
            IOSetting(**each["setting"]).describe(),
            f"{theirs['engine']}, {theirs['request_bytes'] >> 20} MiB x {theirs['depth']}",
        )
    asked.console.print(shown)
    asked.console.print(f"The interval holds the true median of the pairs with a probability of {100 * level:.0f} %.")
    for engine, problem in compared["fio_engines"].items():
        asked.console.print(f"fio's engine {engine}: {problem}", markup=False)


def draw(found: DriveProfile, path: Path) -> None:
    """A bar for each setting and workload. Needs matplotlib."""
    panels = {}
    for workload in WORKLOADS:
        rates = [(found.rate(setting, workload) or 0.0) / 1e9 for setting in found.settings]
        panels[f"{workload.value}, GB/s"] = [(rate, f"{rate:.2f}") for rate in rates]
    title = ", ".join(str(each.path) for each in found.directories)
    bars.draw(path, title, [setting.describe() for setting in found.settings], panels)


def profile_io(**options: Any) -> int:
    """Measure how fast drives are under the engine's requests, beside fio, and say which settings suit them."""
    if options["png"] is not None:
        check_picture(options["png"], "--png", (".png", ".svg", ".pdf"))
    asked = command.ask(options)
    if not options["no_fio"] and not fio.is_available():
        asked.console.print("fio is not installed: nothing to compare with (apt-get install fio, or pass --no-fio)")
        options["no_fio"] = True
    status, compared = command.measure(asked), None
    if status == 0 and not options["no_fio"]:
        try:
            compared = compare(asked.found, asked, num_pairs=options["pairs"], huge_pages=options["fio_huge_pages"])
        except KeyboardInterrupt:
            asked.found.stop("interrupted")
            status = 130
    status = command.finish(asked, status, compared or {})
    if compared is not None:
        print_comparison(asked, compared)
    if options["png"] is not None and asked.found.settings:
        draw(asked.found, options["png"])
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a drive failed, 2 after bad input or without the packages, 130 after Ctrl-C."""
    more = [
        click.Option(["--no-fio"], is_flag=True, help="Do not compare with fio."),
        click.Option(["--fio-huge-pages"], is_flag=True, help="Give fio's buffers huge pages, which ours always have."),
        click.Option(["--pairs"], type=click.IntRange(min=1), default=NUM_PAIRS, help="Of the comparison."),
        click.Option(["--png"], type=PathType(), metavar="FILE", help="Draw the rates. Needs matplotlib."),
    ]
    made = click.Command("profile_io.py", params=[*command.profile.params, *more], callback=profile_io, help=__doc__)
    return run(made, "profile_io.py", sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
