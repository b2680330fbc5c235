"""Spans and the trace made of them: rows without overlap, nothing lost but what is said to be, files whole or untouched."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import ConfigError
from infinity.metrics.timeline import Row, Span, Timeline, check_writable
from tests.step_reports import report

_ELSEWHERE = Path(tempfile.gettempdir()) / "trace.json"


_INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.sampled_from("abc")), max_size=40)


@given(_INTERVALS, st.lists(st.integers(1, 50), max_size=4, unique=True))
def test_events_of_a_thread_never_overlap_and_nothing_is_lost(
    intervals: list[tuple[int, int, str]], step_ends: list[int]
) -> None:
    timeline = Timeline(_ELSEWHERE)
    timeline.began_seconds = 0.0
    for step, end in enumerate(sorted(step_ends), 1):
        timeline.add_step(end - 1.0, end, report(step))
    for number, (begin, length, name) in enumerate(intervals):
        timeline.add(Row.READS, name, begin, begin + length, num_bytes=number + 1)
    with tempfile.TemporaryDirectory() as folder:
        timeline.save(Path(folder) / "trace.json")
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    reads = [event for event in events if event.get("cat") == "reads"]
    threads = {event["tid"] for event in reads}
    for thread in threads:
        of_thread = [event for event in reads if event["tid"] == thread]
        for before, after in itertools.pairwise(of_thread):
            assert before["ts"] + before["dur"] <= after["ts"]
    assert all(any(event["name"] == "thread_name" and event["tid"] == thread for event in events) for thread in threads)
    found = sorted((event["args"]["bytes"], event["name"], event["ts"], event["dur"]) for event in reads)
    assert found == [(n + 1, name, begin * 1e6, length * 1e6) for n, (begin, length, name) in enumerate(intervals)]
    for event in reads:
        later = [step for step, end in enumerate(sorted(step_ends), 1) if event["ts"] + event["dur"] <= end * 1e6]
        assert event["args"].get("step") == (later[0] if later else None)


def test_beyond_the_most_spans_the_oldest_are_dropped_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(tmp_path / "trace.json", max_spans=10)
    for number in range(25):
        timeline.add(Row.COMPUTE, f"n{number}", number, number + 0.5)
        timeline.add_step(number, number + 1, report(number))
    assert [span.name for span in timeline.spans()] == [f"n{number}" for number in range(15, 25)]
    assert timeline.num_dropped == 15
    timeline.save()
    assert "oldest 15 spans were dropped" in caplog.text
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["dropped_spans"] == 15


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    timeline = Timeline(_ELSEWHERE)
    timeline.add(Row.COMPUTE, "x", 0, 1)

    def full(self: Timeline) -> list[Span]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Timeline, "spans", full)
    with pytest.raises(OSError, match="No space left"):
        timeline.save(path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


def test_the_end_of_a_training_does_not_fail_for_a_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    recording = Timeline(folder / "trace.json")
    folder.rmdir()
    recording.save_at_end()
    assert str(folder / "trace.json") in caplog.text
    with pytest.raises(OSError, match="No such file"):
        recording.save()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "not a regular file"),
        ("missing/trace.json", "No such file or directory"),
        ("a_file/trace.json", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("fifo", "not a regular file"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_in_words(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "a_file").write_text("")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match=words) as refused:
        check_writable(tmp_path / name)
    assert refused.value.key == "infinity.timeline"
    assert str(tmp_path) in str(refused.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a_file", "fifo"]
