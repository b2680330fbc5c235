"""The benchmark's own arithmetic and its control groups: a figure is worth what measures it is worth."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bench.case import Case, CaseResult, DriveSample, Outcome
from bench.cgroup import Cgroup
from bench.measured.models import Workload
from bench.participant import Participant, ParticipantFailed, ParticipantSpec
from bench_step import IN_MEMORY, RECOMPUTING, bound_seconds, find_alone

_TINY = Workload(model="tiny", seq_len=16)
_REFUSING = "import sys; sys.modules.update(infinity=None, swapper=None, rich=None, zarr=None)"
"""What a peer's environment has not."""


def outcome(seconds: float = 1.0, read_bytes: float = 0.0, write_bytes: float = 0.0) -> Outcome:
    return Outcome("ours", [seconds], read_bytes, write_bytes)


@pytest.mark.parametrize(
    ("throttle", "fio", "read", "write"),
    [
        (300, [], 600e6, 450e6),  # the larger direction
        (1200, [(0.9e9, 0.8e9)], 1.8e9, 1.6e9),  # what fio reached under the throttle
        (300, [(300e6, 300e6)], 600e6, 540e6),  # what fio's mix reads less than the step's, it writes more
        (None, [(1.6e9, 1.4e9)], 3.2e9, 2.8e9),
    ],
    ids=str,
)
def test_bytes_take_two_seconds(
    throttle: int | None, fio: list[tuple[float, float]], read: float, write: float
) -> None:
    result = CaseResult(Case(_TINY, throttle, ()), drive_samples=[DriveSample(*each) for each in fio])
    assert result.bytes_bound_seconds(outcome(read_bytes=read, write_bytes=write)) == pytest.approx(2.0)


def test_the_bound_is_the_slower_of_bytes_and_compute() -> None:
    result = CaseResult(Case(_TINY, 300, ()))
    ours = outcome(read_bytes=600e6)
    assert bound_seconds(result, ours, outcome(seconds=1.5)) == pytest.approx(2.0)
    assert bound_seconds(result, ours, outcome(seconds=2.5)) == pytest.approx(2.5)
    assert bound_seconds(CaseResult(Case(_TINY, None, ())), outcome(), outcome()) is None


def test_a_vertical_step_is_held_against_compute_that_recomputes_too() -> None:
    alone, recomputing = Outcome(IN_MEMORY, [1.0]), Outcome(RECOMPUTING, [1.3])
    before = CaseResult(Case(_TINY, None, ()), [alone, recomputing])
    for schedule, expected in (("vertical", recomputing), ("ordinary", alone)):
        result = CaseResult(Case(_TINY, 300, ()), [replace(outcome(), schedule=schedule)])
        assert find_alone([before, result], result) is expected
        result.outcomes += [alone, recomputing]
        assert find_alone([result], result) is expected
    assert find_alone([CaseResult(Case(_TINY, 300, ()), [outcome()])], CaseResult(Case(_TINY, 300, ()))) is None


def test_a_participant_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ParticipantFailed, match="KeyError: 'nobody'"):
        Participant(ParticipantSpec("nobody", "nobody"), _TINY, tmp_path, controllers=())
    assert list(tmp_path.iterdir()) == []


def test_memory_group_counts_and_limits(
    memory_cgroup: Cgroup, run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert run_in_cgroup(memory_cgroup, "x = bytearray(100 << 20)").returncode == 0
    memory = memory_cgroup.memory
    assert memory is not None and memory.peak_bytes > 100 << 20
    memory.limit(64 << 20)
    assert run_in_cgroup(memory_cgroup, "x = bytearray(100 << 20)").returncode != 0
    assert memory.num_out_of_memory_kills == 1
    if memory.reset_peak():
        assert memory.peak_bytes < 50 << 20


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
