"""The log of a run: what is written is read again, whatever happened to the file meanwhile."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import CheckpointError, ConfigError
from infinity.metrics import RunLog, RunReader, read_run
from infinity.metrics.run_log import FILE_NAME
from tests.step_reports import report


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    found = RunLog(tmp_path / "a" / "run")
    yield found
    found.release()


def _start(log: RunLog, step: int = 0, **config: Any) -> None:
    log.on_start(step, config, {"cores": 2}, {"known": step})


def _steps(log: RunLog) -> list[int]:
    return [each.step for each in read_run(log.path.parent).steps]


def test_what_is_written_is_read(log: RunLog) -> None:
    _start(log, batch=4)
    reports = [report(1, lr=(1e-3, 2e-3), num_tokens=64), report(2, lr=(1e-3, 2e-3), loss=None, is_skipped=True)]
    for each in reports:
        log.on_step(each, None)
    log.write("note", 2, text="half way")
    log.write("plan", 2, plan={"known": 2})
    run = read_run(log.path.parent)
    assert run.steps == reports
    assert (run.start["config"], run.start["machine"], run.plan) == ({"batch": 4}, {"cores": 2}, {"known": 2})
    assert [(mark.kind, mark.step) for mark in run.marks] == [("skipped", 2), ("note", 2)]
    assert (run.num_starts, run.num_damaged, run.has_ended) == (1, 0, False)
    log.close(2)
    assert read_run(log.path).has_ended, "the file itself may be named"


def test_numbers_that_json_does_not_have(log: RunLog) -> None:
    _start(log)
    log.on_step(report(1, loss=math.nan, grad_norm=math.inf), None)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    for line in log.path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    (found,) = read_run(log.path.parent).steps
    assert math.isnan(found.loss or 0) and found.grad_norm == math.inf
    assert [mark.text for mark in read_run(log.path.parent).marks] == ["the loss is nan"]


def test_a_run_goes_on_behind_what_is_there(log: RunLog) -> None:
    _start(log)
    for step in (1, 2, 3):
        log.on_step(report(step), None)
    log.release()  # killed
    again = RunLog(log.path.parent)
    _start(again, step=2)
    again.on_step(report(3, loss=7.0), None)
    again.close(3)
    run = read_run(log.path.parent)
    assert [(each.step, each.loss) for each in run.steps] == [(1, 1.5), (2, 1.5), (3, 7.0)]
    assert [mark.text for mark in run.marks] == ["started again from step 2; the last one before was 3"]


def test_a_learning_rate_that_the_scheduler_did_not_set_is_told(log: RunLog) -> None:
    _start(log)
    log.on_step(report(1, lr=(1e-3,)), [1e-3])
    log.on_step(report(2, lr=(2e-3,)), [2e-3])
    assert not read_run(log.path.parent).marks
    log.on_step(report(3, lr=(1e-4,)), [3e-3])
    log.on_step(report(4, lr=(1e-4,)), [3e-3])
    log.on_step(report(5, lr=(5e-5,)), None)
    assert [(mark.kind, mark.step, mark.text) for mark in read_run(log.path.parent).marks] == [
        ("lr", 3, "the learning rate was changed from 0.002 to 0.0001"),
        ("lr", 5, "the learning rate was changed from 0.0001 to 5e-05"),
    ]


def test_a_schedule_of_the_scripts_own_is_told_once(log: RunLog) -> None:
    _start(log)
    for step, lr in enumerate((1e-3, 1e-3, 2e-3, 3e-3, 4e-3, 4e-3, 4e-4), start=1):
        log.on_step(report(step, lr=(lr,)), None)
    assert [(mark.kind, mark.step) for mark in read_run(log.path.parent).marks] == [("lr", 3), ("lr", 7)]


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_last_line_that_is_cut_off_is_left_out_and_closed(log: RunLog, cut: int) -> None:
    _start(log)
    log.on_step(report(1), None)
    log.on_step(report(2), None)
    log.release()
    os.truncate(log.path, log.path.stat().st_size - cut)
    assert _steps(log) == [1] and read_run(log.path.parent).num_damaged == 1
    again = RunLog(log.path.parent)
    _start(again, step=1)
    again.on_step(report(2, loss=3.0), None)
    again.close(2)
    run = read_run(log.path.parent)
    # The line that lacks nothing but its end gets that.
    assert [each.step for each in run.steps] == [1, 2] and run.steps[1].loss == 3.0
    assert run.num_damaged == (0 if cut == 1 else 1)


def test_lines_that_somebody_else_wrote_are_left_out(log: RunLog) -> None:
    _start(log)
    with log.path.open("ab") as file:
        file.write(
            b'\xff\xfe\n[1]\n{"kind":"step","step":"x","time":0}\n{"kind":"new","step":1,"time":0,"text":"?"}\n\n'
        )
    log.on_step(report(1), None)
    run = read_run(log.path.parent)
    assert ([each.step for each in run.steps], run.num_damaged) == ([1], 3)


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"'infinity\.run_log'.*cannot be written"):
        RunLog(tmp_path / "file")
    (tmp_path / "run" / FILE_NAME).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"'infinity\.run_log'.*cannot be written"):
        RunLog(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"'infinity\.run_log'.*File name too long"):
        RunLog(tmp_path / ("x" * 300))


def test_what_never_began_leaves_nothing(log: RunLog, tmp_path: Path) -> None:
    log.abandon()
    assert not log.path.parent.exists() and log.path.parent.parent == tmp_path / "a"
    with pytest.raises(CheckpointError, match="no such directory"):
        read_run(log.path.parent)
    there = RunLog(tmp_path)
    there.abandon()
    with pytest.raises(CheckpointError, match=r"no log of a run.*infinity\.run_log"):
        read_run(tmp_path)


def test_a_log_without_a_start_or_of_a_newer_version_is_refused(log: RunLog) -> None:
    with pytest.raises(CheckpointError, match="has no start"):
        read_run(log.path.parent)
    log.path.write_text('{"kind":"start","step":0,"time":0,"format":3,"version":"9.8"}\n')
    with pytest.raises(
        CheckpointError, match=r"has format 3, written by infinity 9\.8; this is infinity \S+, which reads format 2"
    ):
        read_run(log.path.parent)


def test_a_forked_child_writes_nothing(log: RunLog) -> None:
    _start(log)
    size = log.path.stat().st_size
    child = os.fork()
    if not child:
        log.close(5)
        os._exit(0)
    os.waitpid(child, 0)
    assert log.path.stat().st_size == size


def test_a_forked_child_that_lives_on_does_not_hold_the_log(log: RunLog) -> None:
    """As a data loader's workers do for some seconds, when the run was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        log.release()  # as a kill does; what the child has inherited stays open
        RunLog(log.path.parent).release()
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_secrets_are_left_out(log: RunLog) -> None:
    _start(log, comet={"api_key": "abc", "project": "p", "list": [{"hub_token": "def"}]}, password="")
    text = log.path.read_text()
    assert "abc" not in text and "def" not in text
    assert read_run(log.path.parent).start["config"]["comet"]["project"] == "p"


class _FullDisk:
    """A file on a disk that is full for a while: the first line fits in part, others not at all."""

    closed = False

    def __init__(self, file: Any, lines_lost: int) -> None:
        self._file, self._left = file, lines_lost
        self._is_first = True

    def write(self, data: bytes) -> int:
        if not self._left:
            return int(self._file.write(data))
        self._left -= 1
        if self._is_first:
            self._is_first = False
            return int(self._file.write(data[:40]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_costs_lines_and_one_warning(
    log: RunLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _start(log)
    log.on_step(report(1), None)
    monkeypatch.setattr(log, "_file", _FullDisk(log._file, lines_lost=3))
    with caplog.at_level(logging.WARNING):
        for step in range(2, 7):
            log.on_step(report(step), None)
    run = read_run(log.path.parent)
    assert ([each.step for each in run.steps], run.num_damaged) == ([1, 5, 6], 1)
    (warning,) = caplog.messages
    assert "has gaps from step 2 on" in warning and "Training continues" in warning


def test_a_reader_follows_a_writer(log: RunLog) -> None:
    _start(log)
    reader = RunReader(log.path.parent)
    assert reader.read_on() and not reader.run.steps and reader.has_writer
    assert not reader.read_on()
    log.on_step(report(1), None)
    assert reader.read_on() and [each.step for each in reader.run.steps] == [1]
    whole = log.path.read_bytes()
    log.on_step(report(2), None)
    line = log.path.read_bytes()[len(whole) :]
    os.truncate(log.path, len(whole))
    with log.path.open("ab") as file:  # a line that comes in two parts
        file.write(line[:30])
        file.flush()
        assert reader.read_on() and len(reader.run.steps) == 1
        file.write(line[30:])
    assert reader.read_on() and len(reader.run.steps) == 2 and not reader.run.num_damaged
    log.close(2)
    reader.read_on()
    assert reader.run.has_ended and not reader.has_writer
