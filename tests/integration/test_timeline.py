"""The trace of a training run: it opens, its threads do not overlap, and what it shows is what the reports say."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.errors import ConfigError
from tests.exactness.case import Case
from tests.exactness.families import FAMILIES
from tests.exactness.lockstep import PLAIN, everything_on_nvme, take_steps
from tests.waiting import wait_until

_LLAMA = next(case for case in FAMILIES if case.name == "llama")
_NUM_STEPS = 6
_ROWS = ["steps", "compute", "waiting", "reads", "writes", "optimizer", "copies"]
# Two moments that belong together are a few lines of Python apart, and somebody else may run between them.
_SLACK_SECONDS = 0.05
_NUM_ATTEMPTS = 5

Event = dict[str, Any]


class _Torn(AssertionError):
    """What a report says and what the trace shows are further apart than a few lines of Python."""


def _require_close(seconds: float, expected: float, name: str) -> None:
    if abs(seconds - expected) > _SLACK_SECONDS:
        raise _Torn(f"{name}: {seconds} in the trace, {expected} in the report")


def _attempted(check: Callable[[Path], None], directory: Path) -> None:
    """Call ``check`` with a new directory until moments that belong together are together once."""
    for attempt in range(_NUM_ATTEMPTS):
        fresh = directory / f"attempt_{attempt}"
        fresh.mkdir()
        try:
            check(fresh)
            return
        except _Torn as torn:
            why = torn
    raise why


def _config(directory: Path, changes: Mapping[str, Any] | None = None, **own: Any) -> dict[str, Any]:
    settings = {"timeline": str(directory / "trace.json"), **own}
    return everything_on_nvme(directory, {**(changes or {}), "infinity": settings})


def _train(config: dict[str, Any], case: Case = _LLAMA, num_steps: int = _NUM_STEPS) -> list[infinity.StepReport]:
    engine, *_ = infinity.initialize(model=case.make("none"), config=config)
    reports = []
    with engine:
        for step in range(num_steps):
            take_steps(engine, step, case=case)
            reports.append(engine.report)
        engine.flush()
    return reports


def _rows(path: Path) -> dict[str, list[Event]]:
    """Events by row, after checks that hold for every trace."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(dict.fromkeys(names[number] for number in sorted(names))) == _ROWS
    rows: dict[str, list[Event]] = {name: [] for name in _ROWS}
    for event in events:
        if event["ph"] == "X":
            rows[names[event["tid"]]].append(event)
        else:
            assert event["ph"] == "M"
    for thread, name in names.items():
        for before, after in itertools.pairwise(event for event in rows[name] if event["tid"] == thread):
            assert round((before["ts"] + before["dur"]) * 1e3) <= round(after["ts"] * 1e3), name
    return rows


def _within(row: Sequence[Event], step: Event) -> float:
    """Seconds of a row inside a step."""
    begin, end = step["ts"], step["ts"] + step["dur"]
    return sum(max(0.0, min(end, e["ts"] + e["dur"]) - max(begin, e["ts"])) for e in _union(row)) / 1e6


def _bytes(row: Sequence[Event], step: int) -> int:
    return sum(event["args"]["bytes"] for event in row if event["args"].get("step") == step)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_clipping": 0.1}, {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}],
    ids=["in backward", "deferred", "micro-batches"],
)
def test_the_trace_shows_what_the_reports_say(changes: dict[str, Any], tmp_path: Path) -> None:
    _attempted(lambda directory: _require_agreement(changes, directory), tmp_path)


def _require_agreement(changes: dict[str, Any], directory: Path) -> None:
    reports = _train(_config(directory, changes))
    rows = _rows(directory / "trace.json")
    assert [event["name"] for event in rows["steps"]] == [f"step {report.step}" for report in reports]
    assert rows["copies"] == []
    for report, step in zip(reports, rows["steps"], strict=True):
        assert step["dur"] / 1e6 == pytest.approx(report.seconds, abs=1e-5)
        for row, seconds in (
            ("compute", report.compute_busy_seconds),
            ("waiting", report.wait_seconds),
            ("reads", report.read_busy_seconds),
            ("writes", report.write_busy_seconds),
            ("optimizer", report.optimizer_seconds),
        ):
            _require_close(_within(rows[row], step), seconds, row)
        both = [*rows["reads"], *rows["writes"]]
        _require_close(_within(both, step), report.drive_busy_seconds, "both directions")
        assert max(report.read_busy_seconds, report.write_busy_seconds) <= report.drive_busy_seconds + 1e-9
        assert report.drive_busy_seconds <= report.read_busy_seconds + report.write_busy_seconds + 1e-9
        _require_close(max(report.drive_busy_seconds, report.seconds), report.seconds, "at most the step")
        assert 0 <= report.compute_busy_seconds <= report.compute_seconds
    for row, name in (("reads", "read_bytes"), ("writes", "write_bytes")):
        moved = [getattr(report, name) for report in reports]
        # A transfer that ends while a report is made may count on either side.
        largest = max(event["args"]["bytes"] for event in rows[row])
        counted = [_bytes(rows[row], report.step) for report in reports]
        for found, expected in [*zip(counted, moved, strict=True), (sum(counted), sum(moved))]:
            if abs(found - expected) > 8 * largest:
                raise _Torn(f"{name}: {found} in the trace, {expected} in the report")
        assert all(event["args"]["queued_ms"] >= 0 for event in rows[row])


def _union(events: Sequence[Event]) -> list[Event]:
    result: list[Event] = []
    for event in sorted(events, key=lambda event: event["ts"]):
        until = result[-1]["ts"] + result[-1]["dur"] if result else -1.0
        begin, end = max(event["ts"], until), event["ts"] + event["dur"]
        if end > begin:
            result.append({"ts": begin, "dur": end - begin})
    return result


def test_rows_name_units_phases_and_extents(tmp_path: Path) -> None:
    _train(_config(tmp_path), PLAIN)
    rows = _rows(tmp_path / "trace.json")
    last = [event["name"] for event in rows["compute"] if event["args"]["step"] == _NUM_STEPS]
    forward = list(dict.fromkeys(name.split()[1] for name in last if name.startswith("forward ")))
    backward = list(dict.fromkeys(name.split()[1] for name in last if name.startswith("backward ")))
    assert len(forward) > 1
    assert set(backward) <= set(forward), "an embedding's backward needs no weights"
    assert len(backward) > 1
    assert last[-1] == "step"
    for unit in forward:
        assert any(event["name"] == f"update of {unit}" for event in rows["optimizer"])
        assert any(event["name"] == f"optimizer state of {unit}" for event in rows["writes"])


def test_it_can_be_saved_on_the_way_and_more_than_once(tmp_path: Path) -> None:
    with infinity.initialize(model=PLAIN.make("none"), config=_config(tmp_path))[0] as engine:
        for step in range(2):
            take_steps(engine, step)
            engine.save_timeline(tmp_path / "now.json")
            assert len(_rows(tmp_path / "now.json")["steps"]) == step + 1
        assert not (tmp_path / "trace.json").exists()
        with pytest.raises(ConfigError, match="missing"):
            engine.save_timeline(tmp_path / "missing" / "now.json")
        take_steps(engine, 2)
    assert len(_rows(tmp_path / "trace.json")["steps"]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["now.json", "trace.json"]


def test_an_engine_that_nobody_closes_still_writes_it(tmp_path: Path) -> None:
    engine = infinity.initialize(model=PLAIN.make("none"), config=_config(tmp_path))[0]
    take_steps(engine, 0)
    engine.flush()
    del engine
    wait_until(lambda: gc.collect() >= 0 and (tmp_path / "trace.json").exists())  # another thread does
    assert len(_rows(tmp_path / "trace.json")["steps"]) == 1
