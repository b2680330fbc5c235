"""Spans and the trace made of them: rows without overlap, nothing lost but what is said to be, files whole or untouched."""

from __future__ import annotations

import itertools
import json
import math
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


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def require_disjoint(spans: list[Span]) -> None:
    """Each begins where the one before has ended, or later."""
    for before, after in itertools.pairwise(spans):
        assert before.begin_seconds <= before.end_seconds <= after.begin_seconds <= after.end_seconds


_INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.sampled_from("abc")), max_size=40)


@given(_INTERVALS, st.lists(st.integers(1, 50), max_size=4, unique=True))
def test_cut_rows_cover_the_same_time_and_hold_the_same_bytes(
    intervals: list[tuple[int, int, str]], step_ends: list[int]
) -> None:
    timeline = Timeline(_ELSEWHERE)
    for step, end in enumerate(sorted(step_ends), 1):
        timeline.add_step(end - 1.0, end, report(step))
    for number, (begin, length, name) in enumerate(intervals):
        timeline.add(Row.READS, name, begin, begin + length, num_bytes=1 << number)
    spans = timeline.spans()[Row.READS]
    require_disjoint(spans)
    assert sum(span.num_bytes for span in spans) == (1 << len(intervals)) - 1
    assert sum(span.num_parts for span in spans) == len(intervals)
    expected = covered([(begin, begin + length) for begin, length, _ in intervals])
    assert covered([(span.begin_seconds, span.end_seconds) for span in spans]) == expected
    for step, end in enumerate(sorted(step_ends), 1):
        start = ([-math.inf, *sorted(step_ends)])[step - 1]
        in_step = [1 << n for n, (begin, length, _) in enumerate(intervals) if start < begin + length <= end]
        assert sum(span.num_bytes for span in spans if span.step == step) == sum(in_step)


def test_transfers_that_overlap_share_the_time_and_those_of_one_extent_are_joined() -> None:
    timeline = Timeline(_ELSEWHERE)
    for begin, end, name in [(0, 4, "x"), (1, 5, "x"), (2, 6, "y"), (3, 3.5, "z"), (9, 10, "y")]:
        timeline.add(Row.WRITES, name, begin, end, num_bytes=10, queued_seconds=begin)
    assert timeline.spans()[Row.WRITES] == [
        Span(Row.WRITES, "x", 0, 5, 20, 2, 0),
        Span(Row.WRITES, "y", 5, 6, 20, 2, 2),
        Span(Row.WRITES, "y", 9, 10, 10, 1, 9),
    ]


def test_a_full_ring_drops_the_oldest_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(tmp_path / "trace.json", max_spans=10)
    for number in range(25):
        timeline.add(Row.COMPUTE, f"n{number}", number, number + 0.5)
        timeline.add_step(number, number + 1, report(number))
    assert [span.name for span in timeline.spans()[Row.COMPUTE]] == [f"n{number}" for number in range(15, 25)]
    assert timeline.num_dropped == 15
    assert [report.step for _, report in timeline.steps()] == list(range(15, 25)), (
        "of the others nothing could be shown"
    )
    timeline.save()
    assert "oldest 15 spans were dropped" in caplog.text
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["dropped_spans"] == 15
    (process,) = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert "the oldest 15 spans were dropped" in process["args"]["name"]


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    timeline = Timeline(_ELSEWHERE)
    timeline.add(Row.COMPUTE, "x", 0, 1)

    def full(self: Timeline) -> dict[Row, list[Span]]:
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
        ("", "it is a directory"),
        ("missing/trace.json", "No such file or directory"),
        ("a_file/trace.json", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("fifo", "no regular file"),
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
