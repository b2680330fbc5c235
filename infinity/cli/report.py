"""``infinity report`` and ``infinity watch``: show the log of a run, as a page or live."""

from __future__ import annotations

from pathlib import Path

import click

from infinity.cli.output import PathType, json_option, print_result

_RUN = click.argument("run_dir", metavar="RUN_DIR", type=PathType())


@click.command()
@_RUN
@click.option("--out", type=PathType(), help="Path of the page. Default: report.html in RUN_DIR.")
@json_option
def report(run_dir: Path, out: Path | None, as_json: bool) -> None:
    """Write one HTML page about a run: loss, times, drives, memory, and what bound it.

    RUN_DIR is the directory that the config's infinity.run_log names. The page needs no network and no script.

    \b
    Examples:
      infinity report runs/a
      infinity report runs/a --out a.html
      infinity report runs/a --json
    """
    from infinity.metrics import read_run, showing
    from infinity.reporting.page import render
    from infinity.reporting.verdict import judge
    from swapper.volumes.publish import replacing

    run = read_run(run_dir)
    # A log with a value that no engine writes is a `CheckpointError` here, not a traceback.
    with showing(run.directory):
        verdict, page = judge(run), render(run)
    path = out or run.directory / "report.html"
    # An old page stays until the new one is whole.
    with replacing(path) as file:
        file.write(page.encode(errors="replace"))  # what a path has that is no text
    facts = vars(verdict) | {"alternatives": [vars(each) for each in verdict.alternatives], "page": path}
    print_result(as_json, facts, verdict.words, str(path))


@click.command()
@_RUN
@click.option("--once", is_flag=True, help="Print the present state, and end.")
def watch(run_dir: Path, once: bool) -> int:
    """Show a run while it trains. Ends with the run, or with Ctrl-C.

    Exit status 1 if the process of the run is gone without having closed its engine.

    \b
    Examples:
      infinity watch runs/a
      infinity watch runs/a --once
      infinity watch runs/a | tee steps.txt
    """
    from infinity.console import Console
    from infinity.reporting.live import watch as watch_run

    has_ended = watch_run(run_dir, Console(), once=once)
    return 0 if has_ended or once else 1
