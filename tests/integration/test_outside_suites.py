"""Other projects' own tests, where there is a copy of them; and the tables of their outcomes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.outside_suites import deepspeed, table
from tests.outside_suites.run import SUITES, main, unpack
from tests.outside_suites.suite import PRIVATE, Outcome

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


def test_a_case_that_does_worse_is_told_and_one_that_does_better_is_not() -> None:
    outcomes = {
        "unit/a.py::test_one[1]": Outcome("passed", ""),
        "unit/a.py::test_one[2]": Outcome("passed", ""),
        "unit/a.py::test_two[1]": Outcome("passed", ""),
        "unit/a.py::test_two[2]": Outcome("failed", "assert 1 == 2"),
        "unit/b.py::test_three": Outcome("refused", PRIVATE, "2", "2"),
    }
    text = table.write(outcomes)
    known = table.read(text)
    assert {case: table.expected(known, case) for case in outcomes} == outcomes
    assert "passed\t2\t1\t1\tunit/a.py::test_one\t" in text.splitlines()
    assert table.merge(text, table.write(outcomes), ["unit/a.py", "unit/b.py"]) == text

    assert table.regressions(known, outcomes) == []
    better = {**outcomes, "unit/a.py::test_two[2]": Outcome("passed", "")}
    assert table.regressions(known, better) == []
    worse = {
        "unit/a.py::test_one[2]": Outcome("failed", "assert 0"),
        "unit/b.py::test_three": Outcome("failed", "assert 3"),
    }
    assert len(table.regressions(known, worse)) == 2
    assert table.regressions(known, {"unit/c.py::test_new": Outcome("passed", "")}) != []


def test_a_failure_that_no_line_explains_is_a_failure() -> None:
    refused = "infinity.errors.OptimizerNotPageableError: optimizer Lamb cannot be paged: it scales each update"
    assert deepspeed.SUITE.judge("unit/a.py::test", "failed", refused).status == "refused"
    assert deepspeed.SUITE.judge("unit/a.py::test", "failed", "AssertionError: tensors differ") == Outcome(
        "failed", "AssertionError: tensors differ"
    )
    accepted, missing = "unit/a.py::TestZeroAllowUntestedOptimizer::test", "Failed: DID NOT RAISE AssertionError"
    assert deepspeed.SUITE.judge(accepted, "failed", missing).status == "refused"
    assert deepspeed.SUITE.judge(accepted, "failed", "ValueError: something else").status == "failed"
    assert deepspeed.SUITE.judge("unit/a.py::test", "skipped", "Skipped: no GPU") == Outcome("skipped", "no GPU")
    assert deepspeed.SUITE.judge("unit/a.py::test", "passed", "") == Outcome("passed", "")
    lost = "infinity.errors.RankError: rank 0, averaging: another rank has ended, or did not come in time: ds_tensor"
    assert deepspeed.SUITE.judge("unit/a.py::test", "failed", lost).status == "failed"


def test_without_the_pinned_revision_the_error_says_what_to_pass(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / ".git").mkdir(parents=True)
    with pytest.raises(SystemExit, match="pass --copy with a clone"):
        unpack(deepspeed.SUITE, clone, tmp_path)
