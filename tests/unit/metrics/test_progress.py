"""The line on the terminal: there if something takes long, gone afterwards, and nowhere else."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from infinity.metrics import progress as module
from infinity.metrics.progress import progress, silent
from tests.exactness.lockstep import BF16
from tests.integration.test_checkpoints import steps_of, training


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """In place of stderr. Not a fixture: pytest puts its own there when a test begins."""
    found = _Terminal()
    monkeypatch.setattr("sys.stderr", found)
    return found


def test_the_time_left_is_shown_after_a_while_and_the_line_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress("saving", 4 << 30, is_shown=True) as note:
        now[0] = 1.9
        note(1 << 30)
        assert terminal.getvalue() == ""
        now[0] = 10.0
        note(1 << 30)
        assert terminal.getvalue() == "\r\033[Ksaving: 50% of 4294967296 bytes (4.3 GB), 10 s left"
        now[0] = 10.1
        note(1 << 30)
        assert terminal.getvalue().count("left") == 1
    assert terminal.getvalue().endswith("\r\033[K")


def test_what_is_quick_turned_off_or_no_terminal_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with progress("quick", 10, is_shown=True) as note:
        note(10)
    with progress("off", 10, is_shown=False) as note:
        assert note is silent
    for other in (io.StringIO(), None):
        monkeypatch.setattr("sys.stderr", other)
        with progress("elsewhere", 10, is_shown=True) as note:
            assert note is silent
    assert terminal.getvalue() == ""


def test_each_part_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0)
    monkeypatch.setattr(module, "_BETWEEN_SECONDS", 0)
    with training(tmp_path / "drive", BF16) as engine:
        steps_of(engine, 0)
        engine.save_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved")
        engine.save_pretrained(tmp_path / "pretrained")
        engine.save_16bit_model(tmp_path / "16bit")
    last: dict[str, str] = {}
    for line in terminal.getvalue().split("\r\033[K"):
        if line:
            last[line.split(":")[0]] = line
    assert last.keys() == {"building the engine", "saving a checkpoint", "loading a checkpoint", "saving weights"}
    for line in last.values():
        assert int(line.split(": ")[1].split("%")[0]) >= 90, line
    terminal.truncate(0)
    with training(tmp_path / "drive", {**BF16, "infinity": {"progress_bars": False}}) as engine:
        engine.save_checkpoint(tmp_path / "saved")
    assert terminal.getvalue().strip("\0") == ""
