"""Other projects' own tests, where there is a copy of them; and the tables of their outcomes."""

from __future__ import annotations

import os

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
def test_each_file_has_rows_in_the_table_and_each_row_a_known_reason(name: str) -> None:
    suite = SUITES[name]
    rows = table.read(suite.results.read_text())
    assert {test.partition("::")[0] for test in rows} == set(suite.files)
    assert {each.status for each in rows.values()} <= {"passed", "failed", "refused", "skipped"}
    assert {each.reason for each in rows.values() if each.status == "refused"} <= suite.reasons
    assert all(each.reason for each in rows.values() if each.status != "passed")
