"""DeepSpeed's own tests, where there is a copy of them; and the table of their outcomes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deepspeed_suite import table
from tests.deepspeed_suite.run import main, unpack
from tests.deepspeed_suite.suite import FILES, Outcome, judge

_COPY = "INFINITY_DEEPSPEED_COPY"
_FEW = (
    "unit/runtime/half_precision/test_dynamic_loss_scale.py",
    "unit/checkpoint/test_latest_checkpoint.py",
    "unit/runtime/zero/test_ignore_unused_parameters.py",
)


@pytest.mark.deep
@pytest.mark.skipif(_COPY not in os.environ, reason=f"{_COPY} names no copy of DeepSpeed's repository")
def test_some_of_deepspeeds_own_tests_do_as_the_table_says() -> None:
    assert main(["--copy", os.environ[_COPY], "--processes", "1", *_FEW]) == 0


def test_the_table_has_every_file_and_nine_of_ten_cases_that_apply_pass() -> None:
    rows = [line.split("\t") for line in table.RESULTS.read_text().splitlines()[1:]]
    assert {test.partition("::")[0] for _, _, test, _ in rows} <= set(FILES)
    num = {status: sum(int(cases) for each, cases, *_ in rows if each == status) for status in ("passed", "failed")}
    assert num["passed"] >= 0.9 * (num["passed"] + num["failed"])
    assert all(reason for status, _, _, reason in rows if status != "passed")


def test_a_case_that_does_worse_is_told_and_one_that_does_better_is_not() -> None:
    outcomes = {
        "unit/a.py::test_one[1]": Outcome("passed", ""),
        "unit/a.py::test_one[2]": Outcome("passed", ""),
        "unit/a.py::test_two[1]": Outcome("passed", ""),
        "unit/a.py::test_two[2]": Outcome("failed", "assert 1 == 2"),
        "unit/b.py::test_three": Outcome("not applicable", "private: x"),
    }
    text = table.write(outcomes)
    known = table.read(text)
    assert {case: table.expected(known, case) for case in outcomes} == outcomes
    assert "passed\t2\tunit/a.py::test_one\t" in text.splitlines()
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
    assert judge("unit/a.py::test", "failed", refused).status == "not applicable"
    assert judge("unit/a.py::test", "failed", "AssertionError: tensors differ") == Outcome(
        "failed", "AssertionError: tensors differ"
    )
    accepted, missing = "unit/a.py::TestZeroAllowUntestedOptimizer::test", "Failed: DID NOT RAISE AssertionError"
    assert judge(accepted, "failed", missing).status == "not applicable"
    assert judge(accepted, "failed", "ValueError: something else").status == "failed"
    assert judge("unit/a.py::test", "skipped", "Skipped: no GPU").reason == "DeepSpeed skips it: no GPU"
    assert judge("unit/a.py::test", "passed", "") == Outcome("passed", "")


def test_without_the_pinned_revision_the_error_says_what_to_pass(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / ".git").mkdir(parents=True)
    with pytest.raises(SystemExit, match="pass --copy with a clone"):
        unpack(clone, tmp_path)
