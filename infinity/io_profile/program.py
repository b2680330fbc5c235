"""Measures what drives do under the engine's requests, compares that with fio, and gives the settings for it."""

from __future__ import annotations

import datetime
import json
import shutil
import signal
import sys
from typing import Any

from infinity.console import Console
from infinity.io_profile import config_file, fio, picture, tables
from infinity.io_profile.advice import Advice, advise
from infinity.io_profile.arguments import STDOUT, Asked
from infinity.io_profile.display import Display
from infinity.io_profile.machine import describe_machine, why_no_copies
from infinity.io_profile.model import facts_of
from infinity.io_profile.places import Places
from infinity.io_profile.report import as_json, write_json
from infinity.io_profile.results import Results
from infinity.io_profile.session import Session
from infinity.io_profile.training import Outlook
from infinity.numerics.state_format import StateFormat
from swapper.errors import SwapperError, VolumeError
from swapper.measure.io_setting import Workload
from swapper.measure.measurement import DriveTest
from swapper.measure.speeds import with_speeds


def run(asked: Asked) -> int:
    """Measure and report what a command line asks for.

    Returns:
        The exit code: 0, 1 if a drive failed, 2 if a directory turned out to be useless, 130 after Ctrl-C or SIGTERM.
        Both signals are ignored from then on.
    """
    is_printed = asked.options.json_file == STDOUT
    console = Console(highlight=False, stderr=is_printed, width=None if sys.stdout.isatty() else 100)
    executable = None if asked.options.no_fio else shutil.which("fio")
    facts = describe_machine(asked.places.paths[0]) | {
        "fio": None if executable is None else fio.version(executable),
        "fio_has_huge_pages": asked.options.fio_huge_pages,
    }
    results = Results(asked.effort.request_sizes)
    engines = tuple(fio.ENGINES) if executable is not None else ()
    session = Session(asked.effort, asked.backends, engines, len(asked.places.drives), results)
    _introduce(console, asked, facts, session.seconds, has_fio=executable is not None)
    is_direct, code = _measure(console, asked, session, results, executable)
    return max(code, _report(console, asked, facts, results, is_direct=is_direct))


def _take_signals(handler: Any) -> None:
    """Ctrl-C and SIGTERM are one thing. A process that was started in the background ignores the first by default."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _introduce(console: Console, asked: Asked, facts: dict[str, Any], seconds: float, *, has_fio: bool) -> None:
    notes = [*asked.remarks, why_no_copies()]
    if not has_fio and not asked.options.no_fio:
        notes.append(fio.MISSING)
    if facts["load_average"] > facts["num_cores"] / 2:
        notes.append("the machine is busy with other work: speeds will be low and vary")
    for line in (
        asked.places.words(),
        f"{facts['processor']}, {facts['num_cores']} cores; Linux {facts['kernel']}; {facts['accelerator']}",
        *(f"Note: {note}" for note in notes if note),
        f"This takes about {seconds:.0f} seconds; Ctrl-C ends it with what was measured by then.",
    ):
        console.print(line, markup=False, soft_wrap=True)


def _measure(
    console: Console, asked: Asked, session: Session, results: Results, executable: str | None
) -> tuple[bool, int]:
    """Fills `results`. Returns whether transfers bypass the page cache, and the exit code."""
    paths, file_bytes = asked.places.paths, asked.effort.file_bytes
    is_direct = False
    try:
        _take_signals(signal.default_int_handler)
        with Display(console, session.seconds, results.notes) as display:
            session.measure_alone(paths, display)
            with DriveTest(with_speeds(paths, file_bytes * len(paths)), file_bytes) as test:
                is_direct, theirs = test.is_direct, None
                if executable is not None:
                    huge_pages = asked.options.fio_huge_pages
                    theirs = fio.Fio(executable, test.paths, is_direct=is_direct, huge_pages=huge_pages)
                session.run(test, theirs, display)
    except KeyboardInterrupt:
        _take_signals(signal.SIG_IGN)
        results.stopped_by = "interrupted"
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


def _report(console: Console, asked: Asked, facts: dict[str, Any], results: Results, *, is_direct: bool) -> int:
    """Prints and writes what there is. Returns an exit code."""
    options = asked.options
    if results.stopped_by:
        console.print(f"\nNot finished: {results.stopped_by}", style="yellow", markup=False, soft_wrap=True)
    if results.ours:
        console.print(tables.sweep_table(results))
    if results.fio:
        console.print(tables.fio_table(results, asked.effort.points))
    if any(comparison.pairs for comparison in results.comparisons.values()):
        console.print(tables.comparison_table(results))
    is_memory, huge_pages = asked.places.is_memory, options.fio_huge_pages
    for line in tables.remarks(results, is_memory=is_memory, fio_has_huge_pages=huge_pages):
        console.print(line, markup=False)
    if results.copies:
        console.print(tables.copies_table(results))
    advice = advise(results, is_direct=is_direct)
    if advice is not None:
        tables.print_advice(console, advice)
    training = _print_training(console, asked, results)
    try:
        if options.json_file is not None:
            found = as_json(results, asked, facts, advice, training)
            if options.json_file == STDOUT:
                json.dump(found, sys.stdout, indent=1, allow_nan=False)
            else:
                write_json(options.json_file, found)
                _say(console, f"Results: {options.json_file}")
        if options.png is not None and results.ours:
            picture.draw(options.png, results, asked.effort, _subtitle(asked.places, facts))
            _say(console, f"Picture: {options.png}")
        if options.apply is not None:
            _say(console, f"{options.apply}{_apply(asked, results, advice)}")
    except (OSError, config_file.ConfigRefused) as error:
        _say(console, f"Could not be written: {error}")
        return 1
    return 0


def _say(console: Console, words: str) -> None:
    console.print(words, markup=False, soft_wrap=True)


def _print_training(console: Console, asked: Asked, results: Results) -> dict[str, Any] | None:
    rate, options, num_drives = results.final_rate(Workload.MIXED), asked.options, asked.places.num_drives
    if rate is None:
        return None
    facts = facts_of(asked.model_name, asked.model, StateFormat(options.state_dtype))
    tbw_bytes = None if options.tbw is None else options.tbw * num_drives
    outlook = Outlook(facts, rate, options.tokens_per_second, tbw_bytes, num_drives)
    values = outlook.as_json()
    is_example = " (an example: --model N or the path of a Hugging Face config takes yours)"
    name = f"{facts.name}{is_example if options.model is None else ''}"
    console.print(f"\nTraining {name}", style="bold", markup=False)
    optimizer = "AdamW" if facts.states is StateFormat.FP32 else f"AdamW with {facts.states.value} states"
    console.print(f"bf16, {optimizer}, everything on these drives, one micro-batch per step, no clipping", style="dim")
    console.print(tables.two_columns(outlook.lines(values)))
    return values


def _apply(asked: Asked, results: Results, advice: Advice | None) -> str:
    """Writes the settings into the config that was named; returns what to say behind its name."""
    if advice is None or results.stopped_by:
        return " is left as it is: the measurement is not finished"
    note = f"{asked.places.words()}, {results.final_rate(Workload.MIXED) or 0:.3g} B/s mixed"
    changes = config_file.apply(asked.options.apply, advice.block, note)
    return f": {'; '.join(change.words() for change in changes) or 'was so already'}"


def _subtitle(places: Places, facts: dict[str, Any]) -> str:
    drives = "; ".join(f"{drive.path} on {drive.words()}" for drive in places.drives)
    return f"{drives}  ·  {facts['processor']}, {facts['num_cores']} cores  ·  {datetime.date.today().isoformat()}"
