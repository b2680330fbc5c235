"""The whole of `profile_io.py`: measure what the command line asks for, report, write."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import signal
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from bench.machine import describe_machine
from infinity.numerics.state_format import StateFormat
from swapper.errors import SwapperError, VolumeError
from swapper.measure.io_setting import Workload
from swapper.measure.measurement import STEP_READ_SHARE, DriveTest
from swapper.measure.speeds import with_speeds

from . import config_file, fio, picture, tables
from .advice import Advice, advise
from .arguments import parse
from .compute import FLOPS_PER_PARAMETER, measure_flops_per_second
from .copies import why_not as why_no_copies
from .display import Display
from .model import facts_of
from .places import Places
from .report import as_json, write_json
from .results import Results
from .session import Plan, Session
from .training import Outlook
from .warnings_seen import collected_warnings

INTERRUPTED = "interrupted"
_READ_SHARE = round(STEP_READ_SHARE, 2)  # fio takes whole percents only


def run(command_line: Sequence[str], description: str | None) -> int:
    """Measures and reports what the command line asks for.

    Returns:
        0, 1 if a drive failed, 2 if a directory turned out to be useless, 130 after Ctrl-C or SIGTERM. Other bad input
        ends the process with 2.
    """
    arguments = parse(command_line, description)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    places: Places = arguments.places
    executable = None if arguments.no_fio else fio.find_fio()
    plan = Plan(
        arguments.effort,
        arguments.grid,
        arguments.backend_names,
        tuple(fio.ENGINES) if executable is not None else (),
        _READ_SHARE,
    )
    facts = describe_machine(places.paths[0]) | {
        "fio": None if executable is None else fio.version(executable),
        "fio_has_huge_pages": arguments.fio_huge_pages,
    }
    _introduce(console, arguments, plan, facts, has_fio=executable is not None)
    results = Results(request_sizes=plan.effort.request_sizes)
    is_direct, code = _measure(console, arguments, plan, results, executable)
    return max(code, _report(console, arguments, plan, facts, results, is_direct=is_direct))


def _take_signals(handler: Any) -> None:
    """Ctrl-C and SIGTERM are one thing. A process that was started in the background ignores the first by default."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _introduce(
    console: Console, arguments: argparse.Namespace, plan: Plan, facts: dict[str, Any], *, has_fio: bool
) -> None:
    def say(words: str) -> None:
        console.print(words, markup=False, soft_wrap=True)

    say(arguments.places.words())
    say(f"{facts['processor']}, {facts['num_cores']} cores; Linux {facts['kernel']}; {facts['accelerator']}")
    for remark in arguments.remarks:
        say(f"Note: {remark}")
    if not has_fio and not arguments.no_fio:
        say(f"Note: {fio.MISSING}")
    if (reason := why_no_copies()) is not None:
        say(f"Note: {reason}")
    if facts["load_average"] > facts["num_cores"] / 2:
        say("Note: the machine is busy with other work: speeds will be low and vary")
    seconds = plan.total_seconds(len(arguments.places.paths))
    say(f"This takes about {seconds:.0f} seconds; Ctrl-C ends it with what was measured by then.")


def _measure(
    console: Console, arguments: argparse.Namespace, plan: Plan, results: Results, executable: str | None
) -> tuple[bool, int]:
    """Fills `results`. Returns whether transfers bypass the page cache, and the exit code."""
    places: Places = arguments.places
    is_direct = False
    try:
        _take_signals(signal.default_int_handler)
        with contextlib.ExitStack() as stack:
            stack.enter_context(collected_warnings(results.notes))
            display = stack.enter_context(Display(console, plan.total_seconds(len(places.paths))))
            session = Session(plan, results, display)
            session.measure_alone(places.paths)
            file_bytes = plan.effort.file_bytes
            directories = with_speeds(places.paths, file_bytes * len(places.paths))
            test = stack.enter_context(DriveTest(directories, file_bytes))
            is_direct = test.is_direct
            theirs = None
            if executable is not None:
                theirs = fio.Fio(
                    executable,
                    test.paths,
                    is_direct=is_direct,
                    read_share=plan.read_share,
                    huge_pages=arguments.fio_huge_pages,
                )
            session.run(test, theirs)
    except KeyboardInterrupt:
        _take_signals(signal.SIG_IGN)
        results.stopped_by = INTERRUPTED
        return is_direct, 130
    except VolumeError as error:  # a directory that only its first use shows to be useless
        results.stopped_by = str(error)
        return is_direct, 1 if results.written_bytes else 2
    except SwapperError as error:
        results.stopped_by = f"{type(error).__name__}: {error}"
        return is_direct, 1
    finally:
        # The report takes a second or two, and half of one helps nobody.
        _take_signals(signal.SIG_IGN)
    return is_direct, 0


def _report(
    console: Console,
    arguments: argparse.Namespace,
    plan: Plan,
    facts: dict[str, Any],
    results: Results,
    *,
    is_direct: bool,
) -> int:
    """Prints and writes what there is. Returns an exit code."""
    if results.stopped_by:
        console.print(f"\nNot finished: {results.stopped_by}", style="yellow", markup=False, soft_wrap=True)
    if results.ours:
        console.print(tables.sweep_table(results))
    if results.fio:
        console.print(tables.fio_table(results, plan.grid))
    if any(comparison.pairs for comparison in results.comparisons.values()):
        console.print(tables.comparison_table(results))
    for line in _remarks(arguments, results):
        console.print(line, markup=False)
    if results.copies:
        console.print(tables.copies_table(results))
    advice = advise(results, is_direct=is_direct)
    if advice is not None:
        tables.print_advice(console, advice)
    outlook = _outlook(arguments, results)
    if outlook is not None:
        tables.print_outlook(console, outlook, is_example=arguments.model is None)
    return _write(console, arguments, plan, facts, results, advice, outlook)


def _remarks(arguments: argparse.Namespace, results: Results) -> list[str]:
    return tables.remarks(results, is_memory=arguments.places.is_memory, fio_has_huge_pages=arguments.fio_huge_pages)


def _outlook(arguments: argparse.Namespace, results: Results) -> Outlook | None:
    rate = results.final_rate(Workload.MIXED)
    if rate is None:
        return None
    model = facts_of(arguments.model_name, arguments.model_shapes, StateFormat(arguments.state_dtype))
    tokens_per_second, source = arguments.tokens_per_second, "given by --tokens-per-second"
    if tokens_per_second is None:
        flops, device = measure_flops_per_second()
        tokens_per_second = flops / (FLOPS_PER_PARAMETER * model.num_parameters)
        source = f"estimated: {flops / 1e12:.2g} TFLOP/s on {device}, {FLOPS_PER_PARAMETER} per parameter and token"
    num_drives = arguments.places.num_drives
    return Outlook(
        model,
        rate,
        tokens_per_second,
        source,
        is_compute_estimated=arguments.tokens_per_second is None,
        tbw_bytes=None if arguments.tbw is None else arguments.tbw * num_drives,
        num_drives=num_drives,
    )


def _write(
    console: Console,
    arguments: argparse.Namespace,
    plan: Plan,
    facts: dict[str, Any],
    results: Results,
    advice: Advice | None,
    outlook: Outlook | None,
) -> int:
    """The files that were asked for."""

    def say(words: str) -> None:
        console.print(words, markup=False, soft_wrap=True)

    try:
        if arguments.json is not None:
            write_json(arguments.json, as_json(results, plan, facts, arguments.places, advice, outlook))
            say(f"Results: {arguments.json}")
        if arguments.png is not None and results.ours:
            picture.draw(arguments.png, results, plan.grid, _subtitle(arguments.places, facts))
            say(f"Picture: {arguments.png}")
        if arguments.apply is not None:
            if advice is None or results.stopped_by:
                say(f"{arguments.apply} is left as it is: the measurement is not finished")
            else:
                note = f"{arguments.places.words()}, {results.final_rate(Workload.MIXED) or 0:.3g} B/s mixed"
                changes = config_file.apply(arguments.apply, advice.block, note)
                say(f"{arguments.apply}: {'; '.join(change.words() for change in changes) or 'was so already'}")
    except (OSError, config_file.ConfigRefused) as error:
        say(f"Could not be written: {error}")
        return 1
    return 0


def _subtitle(places: Places, facts: dict[str, Any]) -> str:
    drives = "; ".join(f"{path} on {drive.words()}" for path, drive in zip(places.paths, places.drives, strict=True))
    return f"{drives}  ·  {facts['processor']}, {facts['num_cores']} cores  ·  {datetime.date.today().isoformat()}"
