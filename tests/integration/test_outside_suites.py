"""Other projects' own tests, where there is a copy of them; and the tables of their outcomes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.outside_suites import table
from tests.outside_suites.run import SUITES, main

_COPY = "INFINITY_DEEPSPEED_COPY"
_FEW = (
    "unit/runtime/half_precision/test_dynamic_loss_scale.py",
    "unit/checkpoint/test_latest_checkpoint.py",
    "unit/runtime/zero/test_ignore_unused_parameters.py",
)


@pytest.mark.deep
@pytest.mark.skipif(_COPY not in os.environ, reason=f"{_COPY} names no copy of DeepSpeed's repository")
def test_some_of_deepspeeds_own_tests_do_as_the_table_says() -> None:
    assert main(["deepspeed", "--copy", os.environ[_COPY], "--processes", "1", *_FEW]) == 0


@pytest.mark.parametrize("name", SUITES)
def test_each_row_of_the_table_has_a_known_reason(name: str) -> None:
    suite = SUITES[name]
    rows = table.read(suite.results.read_text())
    assert suite.files and all(name.endswith(".py") for name in suite.files)
    assert not [file for file in suite.files if file.startswith(suite.left_out)]
    assert {each.status for each in rows.values()} <= {"passed", "failed", "refused", "skipped"}
    assert {each.reason for each in rows.values() if each.status == "refused"} <= suite.reasons
    assert all(each.reason for each in rows.values() if each.status != "passed")


def test_a_file_that_is_neither_run_nor_left_out_is_named(tmp_path: Path) -> None:
    for name in ("unit/inference/test_left_out.py", "unit/comm/test_dist.py", "unit/runtime/test_new.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert SUITES["deepspeed"].forgotten(tmp_path) == ["unit/runtime/test_new.py"]
