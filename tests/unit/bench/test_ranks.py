"""What ranks keep and move beside the paper's formulas, as ``infinity bench ranks`` tells it."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  # which optimizers import at their first use: once here, not in each process

from infinity.bench.cgroup import why_unavailable
from infinity.bench.measured.rank import measure
from infinity.bench.ranks import KINDS, Job, deviation, formulas, ranks_table, worst
from infinity.cli.main import main
from tests.ranks import run_ranks


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_stage_divides_falls_with_the_number_of_ranks(stage: int) -> None:
    one, four = (formulas(Job(stage), num) for num in (1, 4))
    divided = {kind for kind in ("parameters", "gradients", "optimizer", "written") if four[kind] * 4 == one[kind]}
    assert divided == {0: set(), 3: {"parameters", "gradients", "optimizer", "written"}}.get(
        stage, {"gradients", "optimizer", "written"}
    )
    assert one["sent"] == 0 < four["sent"]


def test_the_rank_that_deviates_most_is_told() -> None:
    job = Job(1)
    right = formulas(job, 2)
    wrong = right | {"read": right["read"] * 0.9, "seconds": 2.0}
    found = worst(job, [right | {"seconds": 1.0}, wrong])
    assert found["read"] == (wrong["read"], pytest.approx(-10)) and found["sent"] == (right["sent"], 0)
    assert (deviation(0, 0), deviation(1, 0), deviation(3, 2)) == (0, 100, 50)
    row = [next(iter(column.cells)) for column in ranks_table(job, {2: [wrong, wrong]}).columns]
    assert row[0] == "2" and row[-1] == "2.00 s" and "(-10.0 %)" in row[1 + KINDS.index("read")]


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("stage", "clip", "dtype"), [(1, 0.0, "bfloat16"), (1, 1.0, "float32"), (3, 0.0, "bfloat16"), (3, 0.0, "float32")]
)
def test_two_ranks_count_what_the_formulas_say(stage: int, clip: float, dtype: str, tmp_path: Path) -> None:
    job = Job(stage, width=256, layers=4, steps=2, clip=clip, dtype=dtype)

    def train(rank: int) -> None:
        found = measure(asdict(job) | {"directory": str(tmp_path), "budget": job.budget_bytes})
        (tmp_path / f"found {rank}").write_text(json.dumps(found))

    assert run_ranks(2, train, tmp_path) == ["", ""]
    found = worst(job, [json.loads((tmp_path / f"found {rank}").read_text()) for rank in range(2)])
    assert found.keys() == set(KINDS)
    for kind, (_, percent) in found.items():
        assert abs(percent) < 2, (kind, percent)


def test_one_drive_is_compared_with_nothing(nvme_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ranks", "--drives", str(nvme_dir)]) == 2
    assert "name two or more" in capsys.readouterr().err
    assert not list(nvme_dir.iterdir())


@pytest.mark.deep
def test_two_drives_against_one(nvme_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if reason := why_unavailable("blkio"):
        pytest.skip(reason)
    drives = [nvme_dir / "a", nvme_dir / "b"]
    for drive in drives:
        drive.mkdir()
    small = ["--throttle", "2000", "--width", "128", "--layers", "2", "--steps", "2", "--turns", "2"]
    assert (
        main(["bench", "ranks", "--drives", ",".join(map(str, drives)), *small, "--json", str(nvme_dir / "out")]) == 0
    )
    words = capsys.readouterr().out
    found = json.loads((nvme_dir / "out").read_text())
    assert found["drives"] == [str(drive) for drive in drives] and found["bytes_per_second"] == 2_000_000_000
    medians = [statistics.median(found["turns"][of]) for of in ("alone_seconds", "together_seconds")]
    assert medians == [found["alone_seconds"], found["together_seconds"]]
    assert [len(turns) for turns in found["turns"].values()] == [2, 2]
    assert found["ratio"] == medians[1] / medians[0]
    assert found["together_processor_seconds"] > 0
    assert f"one alone {medians[0]:.2f} s" in words and f"{found['ratio']:.2f}" in words
    assert not any(any(drive.iterdir()) for drive in drives)
