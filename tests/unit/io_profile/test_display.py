"""What is seen while it runs."""

from __future__ import annotations

import time

import pytest
from rich.console import Console

from infinity.io_profile.display import Display


def test_the_time_left_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    display = Display(Console(quiet=True), expected_seconds=100.0, notes=[])
    assert display.seconds_left == pytest.approx(100.0)
    now = 150.0  # 50 seconds for what should have taken 25
    display.advance(25.0)
    assert display.seconds_left == pytest.approx(150.0)
    display.skip(25.0)
    assert display.seconds_left == pytest.approx(100.0)


def test_elsewhere_than_on_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(Console(force_terminal=False), expected_seconds=10.0, notes=[]) as display:
        display.show("sweep")
        display.advance(5.0)
        display.show("pairs")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[  0 %] sweep")
    assert lines[1].startswith("[ 50 %] pairs")
