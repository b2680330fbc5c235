"""What is written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from infinity.io_profile import report
from infinity.io_profile.fio import FioJob
from infinity.io_profile.grid import Point, setting_at
from infinity.io_profile.results import Comparison
from swapper.measure.io_setting import Workload
from tests.unit.io_profile.samples import fio_sample, sample

_MIB = 1 << 20


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "io.json"
    report.write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        report.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["io.json"]


def test_a_comparison_is_the_median_of_its_ratios() -> None:
    setting, job = setting_at("uring", Point(_MIB, 8)), FioJob("libaio", _MIB, 1, 8)
    comparison = Comparison(setting, job)
    for ours in (0.9e9, 0.95e9, 1.0e9, 1.05e9, 1.1e9, 0.98e9, 0.97e9):
        comparison.pairs.append((sample(setting, Workload.READ, ours), fio_sample(job, Workload.READ, 1e9)))
    assert comparison.share == pytest.approx(0.98)
    assert comparison.interval.low == pytest.approx(0.9)
    assert comparison.interval.high == pytest.approx(1.1)
