"""A run in a terminal."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity.cli.main import main
from infinity.errors import CheckpointError
from infinity.metrics import RunLog
from infinity.plan.plan import as_record
from infinity.reporting.live import watch
from tests.unit.reporting.test_verdict import known, step
from tests.waiting import wait_until


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    found = RunLog(tmp_path / "run")
    found.on_start(0, {"a": 1}, {"cores": 2}, as_record(known(0.1, 1e8)))
    yield found
    found.release()


def _console() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=False)


def _text(console: Console) -> str:
    file: Any = console.file
    return str(file.getvalue())


def test_a_run_that_has_ended(log: RunLog) -> None:
    for number in range(1, 6):
        log.on_step(step(number, loss=2.0 / number, num_tokens=4000, buffers_peak_bytes=3 * 10**8), None)
    log.write("note", 5, text="[half] way")
    log.close(5)
    console = _console()
    assert watch(log.path.parent, console, once=True)
    for words in (
        "ended",
        "0.4000",
        "█",
        "tokens per second",
        "waiting for reads 80 %",
        "[half] way",
        "Reads of the",
    ):
        assert words in _text(console)
    assert re.search(r"buffers, peak +300\.0 MB, of a budget of \S+ [KMG]B", _text(console))
    console = _console()
    assert watch(log.path.parent, console)
    assert _text(console).count("bound by reads | loss") == 5


def test_the_bar_of_a_damaged_log_ends_at_its_width(log: RunLog) -> None:
    log.on_step(step(1, read_wait_seconds=1e12, compute_busy_seconds=-1e12), None)
    console = _console()
    watch(log.path.parent, console, once=True)
    assert 0 < _text(console).count("█") <= 100


def test_a_run_that_goes_on_is_followed_to_its_end(log: RunLog) -> None:
    console, ended = _console(), []
    thread = threading.Thread(target=lambda: ended.append(watch(log.path.parent, console)))
    thread.start()
    for number in (1, 2, 3):
        log.on_step(step(number), None)
        wait_until(lambda number=number: f"step {number}:" in _text(console))
    assert thread.is_alive()
    log.close(3)
    thread.join(60)
    assert ended == [True] and "ended" in _text(console)


def test_a_run_whose_process_is_gone(log: RunLog) -> None:
    log.on_step(step(1, loss=float("nan")), None)
    log.release()
    console = _console()
    assert not watch(log.path.parent, console)
    assert "the engine was not closed" in _text(console)
    assert main(["watch", str(log.path.parent)]) == 1


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no log of a run"):
        watch(tmp_path, _console())
    (tmp_path / "log.jsonl").write_text("x\n")
    with pytest.raises(CheckpointError, match="has no start"):
        watch(tmp_path, _console())


@pytest.mark.deep
def test_the_command_writes_a_page_and_says_the_verdict(
    log: RunLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(1, 4):
        log.on_step(step(number), None)
    assert main(["report", str(log.path.parent), "--out", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out.startswith("Reads of the optimizer state bound this run: 82 % of the step.")
    assert main(["report", str(log.path.parent), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bound_by"] == "read" and Path(found["page"]).read_text() and found["alternatives"][0]["gain"] > 1
