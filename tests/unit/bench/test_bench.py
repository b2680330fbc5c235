"""The benchmark's own arithmetic and its control groups: a figure is worth what measures it is worth."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from bench.case import Case, CaseResult, Outcome
from bench.cgroup import Cgroup, block_device
from bench.drive import DriveSample, mixed_rate
from bench.measured.child import run_turn
from bench.measured.models import MODEL_SIZES, Program, Workload
from bench.participant import Participant, ParticipantFailed, ParticipantSpec
from bench.summary import IN_MEMORY, RECOMPUTING, bound_seconds, find_alone, remarks
from bench_step import numbered
from fio import is_available

_TINY = Workload(model="tiny", seq_len=16)
_REFUSING = "import sys; sys.modules.update(infinity=None, swapper=None, rich=None, zarr=None)"
"""What a peer's environment has not."""


def outcome(seconds: float = 1.0, read_bytes: float = 0.0, write_bytes: float = 0.0) -> Outcome:
    return Outcome("ours", [seconds], read_bytes, write_bytes)


def test_the_374m_model_has_that_many_parameters() -> None:
    size = MODEL_SIZES["374m"]
    block = 4 * size.hidden**2 + 3 * size.hidden * size.intermediate + 2 * size.hidden
    total = size.num_layers * block + 2 * size.vocabulary * size.hidden + size.hidden
    assert round(total / 1e6) == 374


def test_throttled_bound_is_the_larger_direction() -> None:
    result = CaseResult(Case(_TINY, 300, ()))
    assert result.bytes_bound_seconds(outcome(read_bytes=600e6, write_bytes=450e6)) == pytest.approx(2.0)


@pytest.mark.root
def test_fio_is_held_to_the_speed_of_the_throttle(nvme_dir: Path, blkio_cgroup: object) -> None:
    if not is_available():
        pytest.skip("fio is not installed")
    with mixed_rate(nvme_dir, bytes_per_second=40_000_000, num_bytes=32 << 20, run_seconds=2) as sample_drive:
        sample = sample_drive(0.5)
    for speed in (sample.read_bytes_per_second, sample.write_bytes_per_second):
        assert 20e6 < speed < 48e6
    assert list(nvme_dir.iterdir()) == []


def test_what_fio_reached_under_the_throttle_counts_more_than_the_throttle() -> None:
    result = CaseResult(Case(_TINY, 1200, ()), drive_samples=[DriveSample(0.9e9, 0.8e9)])
    assert result.bytes_bound_seconds(outcome(read_bytes=1.8e9, write_bytes=1.6e9)) == pytest.approx(2.0)


def test_no_direction_goes_faster_than_the_throttle() -> None:
    """fio's mix is not quite the step's: what it reads less, it writes more."""
    result = CaseResult(Case(_TINY, 300, ()), drive_samples=[DriveSample(300e6, 300e6)])
    assert result.bytes_bound_seconds(outcome(read_bytes=600e6, write_bytes=540e6)) == pytest.approx(2.0)


def test_unthrottled_bound_is_all_bytes_at_the_mixed_speed() -> None:
    result = CaseResult(Case(_TINY, None, ()), drive_samples=[DriveSample(1.6e9, 1.4e9)])
    assert result.bytes_bound_seconds(outcome(read_bytes=3.2e9, write_bytes=2.8e9)) == pytest.approx(2.0)


def test_the_bound_is_the_slower_of_bytes_and_compute() -> None:
    result = CaseResult(Case(_TINY, 300, ()))
    ours = outcome(read_bytes=600e6)
    assert bound_seconds(result, ours, outcome(seconds=1.5)) == pytest.approx(2.0)
    assert bound_seconds(result, ours, outcome(seconds=2.5)) == pytest.approx(2.5)


def test_a_vertical_step_is_held_against_compute_that_recomputes_too() -> None:
    alone, recomputing = Outcome(IN_MEMORY, [1.0]), Outcome(RECOMPUTING, [1.3])
    before = CaseResult(Case(_TINY, None, ()), [alone, recomputing])
    for schedule, expected in (("vertical", recomputing), ("ordinary", alone)):
        result = CaseResult(Case(_TINY, 300, ()), [replace(outcome(), schedule=schedule)])
        assert find_alone([before, result], result) is expected
        result.outcomes += [alone, recomputing]
        assert find_alone([result], result) is expected
    assert find_alone([CaseResult(Case(_TINY, 300, ()), [outcome()])], CaseResult(Case(_TINY, 300, ()))) is None


def test_an_unknown_drive_gives_no_bound() -> None:
    assert bound_seconds(CaseResult(Case(_TINY, None, ())), outcome(), outcome()) is None


def _turn(*reports: dict[str, object]) -> dict[str, object]:
    return {
        "num_steps": 2,
        "total_seconds": 2.0,
        "read_bytes": 4,
        "write_bytes": 2,
        "high_water_bytes": 1,
        "description": {},
        "reports": list(reports),
    }


def _report(compute: float, bound_by: str) -> dict[str, object]:
    shares = dict.fromkeys(("drive_busy_share", "read_busy_share", "write_busy_share", "optimizer_share"), 0.25)
    return {"compute_share": compute, **shares, "bound_by": bound_by, "schedule": "vertical"}


def test_busy_shares_are_medians_over_the_steps_and_are_printed() -> None:
    reports = [_report(0.1, "read"), _report(0.5, "compute"), _report(0.6, "read")]
    participant = SimpleNamespace(
        spec=SimpleNamespace(name="ours"),
        turns=[_turn(*reports[:2]), _turn(reports[2])],
        peak_bytes=None,
        steady_peak_bytes=None,
        ready={"ready_seconds": 1.0},
    )
    ours = Outcome.of(cast(Participant, participant))
    assert ours.busy_shares["compute_share"] == 0.5
    assert (ours.bound_by, ours.schedule) == ("read", "vertical")
    result = CaseResult(Case(_TINY, 300, ()), [ours])
    assert any("compute 50 %, drive 25 % (reads 25 %" in line and "read" in line for line in remarks(result, None))
    assert result.as_json()["outcomes"][0]["busy_shares"]["drive_busy_share"] == 0.25


def test_a_participant_without_reports_has_no_shares() -> None:
    assert outcome().busy_shares == {}
    assert not any("busy" in line for line in remarks(CaseResult(Case(_TINY, 300, ()), [outcome(1.0, 1.0)]), None))


def test_each_case_has_a_trace_of_its_own() -> None:
    names = [numbered(Path("/x/trace.json"), number).name for number in (1, 2, 3)]
    assert names == ["trace.json", "trace-2.json", "trace-3.json"]


class _Program(Program):
    """Counts what the turn asks of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self) -> float:
        self.calls.append("step")
        return 0.5

    def flush(self) -> None:
        self.calls.append("flush")

    def describe(self) -> dict[str, object]:
        return {}


def test_a_turn_ends_with_its_flush_and_counts_it() -> None:
    program = _Program()
    turn = run_turn(program, 3)
    assert program.calls == ["step", "step", "step", "flush"]
    assert turn["total_seconds"] >= sum(turn["seconds"])


def test_a_participant_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ParticipantFailed, match="no measured program is called 'nobody'"):
        Participant(ParticipantSpec("nobody", "nobody"), _TINY, tmp_path, controllers=())
    assert list(tmp_path.iterdir()) == []


def test_no_block_device_under_tmpfs(small_tmpfs: Callable[[int], Path]) -> None:
    assert block_device(small_tmpfs(1 << 20)) is None


def test_memory_group_counts_and_limits(
    memory_cgroup: Cgroup, run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert run_in_cgroup(memory_cgroup, "x = bytearray(100 << 20)").returncode == 0
    assert memory_cgroup.peak_bytes > 100 << 20
    memory_cgroup.limit_memory(64 << 20)
    assert run_in_cgroup(memory_cgroup, "x = bytearray(100 << 20)").returncode != 0
    assert memory_cgroup.num_out_of_memory_kills == 1
    if memory_cgroup.reset_peak():
        assert memory_cgroup.peak_bytes < 50 << 20


def test_a_throttled_drive_is_slow(
    blkio_cgroup: Cgroup, run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]], nvme_dir: Path
) -> None:
    blkio_cgroup.throttle(nvme_dir, 20_000_000)
    code = (
        "import mmap, os, time\n"
        f"file = os.open({str(nvme_dir / 'file')!r}, os.O_RDWR | os.O_CREAT | os.O_DIRECT)\n"
        "began = time.perf_counter()\n"
        "for offset in range(20):\n"
        "    os.pwrite(file, mmap.mmap(-1, 1 << 20), offset << 20)\n"
        "print(time.perf_counter() - began)\n"
    )
    answer = run_in_cgroup(blkio_cgroup, code)
    assert answer.returncode == 0, answer.stderr
    assert float(answer.stdout) > 0.5  # 20 MiB at 20 MB/s, less the first burst


def test_a_group_ends_its_processes_and_is_gone(memory_cgroup: Cgroup) -> None:
    join = memory_cgroup.task_files[0]
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'echo $$ > "{join}" && echo in && exec sleep 100'], stdout=subprocess.PIPE
    )
    with process:
        stdout = process.stdout
        assert stdout is not None
        assert stdout.readline() == b"in\n"
        memory_cgroup.close()
        assert process.wait(timeout=560) != 0
    assert not join.parent.exists()


@pytest.mark.deep
def test_a_peer_needs_nothing_of_ours(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{_REFUSING}\n$2" "$3" "$4" "$5" "$6"\n')
    python.chmod(0o755)
    spec = ParticipantSpec("peer", "in_memory", python=str(python))
    with Participant(spec, _TINY, tmp_path, controllers=()) as participant:
        assert len(participant.run_turn(1, counts=True)["losses"]) == 1
